"""The engine as it was built: what only loading shows, and whether the plan told the truth."""

from collections.abc import Iterator

from specdec.doctor.facts import format_size, name_of
from specdec.doctor.inside import step_of
from specdec.doctor.plan import Plan
from specdec.doctor.report import FAULT, OK, WARNING, Check, Fact
from specdec.engine import Engine
from specdec.graph_report import start_up_line
from specdec.verifier.modes import BatchDescriptor


def loaded_facts(engine: Engine) -> Iterator[Fact]:
    """What start-up made and took."""
    rows = engine.graph_table()
    yield Fact(name="captured", value=start_up_line(rows, engine.capture_seconds))
    step = step_of(engine)
    size = format_size(step.kv_cache.num_bytes)
    yield Fact(name="KV made", value=f"{size} of the target's in {step.kv_cache.num_blocks} blocks")
    if step.drafter is not None:
        where = "in the step's graph" if step.drafter.capturable else "on the host, between graphs"
        width = step.drafter.catchup_width
        why = f"reads what it lacks {width} tokens a row at a time" if width else ""
        yield Fact(name="drafter", value=f"{step.drafter.name}, {where}", why=why)


def loaded_checks(engine: Engine, plan: Plan) -> Iterator[Check]:
    """The plan against the engine. The number of blocks depends on what else the GPU holds."""
    model = step_of(engine).model
    pairs = {
        "attention": (plan.attention.backend.name, engine.attention.backend.name),
        "dtype": (name_of(plan.dtype), name_of(model.dtype)),
        "block size": (plan.block_size, engine.block_size),
        "context": (plan.max_model_len, engine.max_model_len),
        "drafts": (plan.max_k, engine.k),
    }
    other = [
        f"{name} {asked} planned, {got} built"
        for name, (asked, got) in pairs.items()
        if asked != got
    ]
    if other:
        yield Check(
            name="plan",
            status=FAULT,
            found="; ".join(other),
            todo="report this: the doctor and the engine decide differently",
        )
    else:
        yield Check(name="plan", status=OK, found="the engine was built as planned")
    if engine.config.capture == "eager":
        yield _captured(engine, plan)


def _captured(engine: Engine, plan: Plan) -> Check:
    """What is planned for start-up and was not captured: for want of memory, or it failed."""
    on_gpu = plan.device.type == "cuda"
    wanted = {
        _key(mode.name, shape)
        for mode, shape in plan.dispatcher.capture_list()
        if shape.uniform or on_gpu
    }
    roles = ("step", "target")
    rows = [row for row in engine.graph_table() if row.role in roles]
    lost = sorted(wanted - {_key(row.mode, row.descriptor) for row in rows})
    if not lost:
        return Check(name="capture", status=OK, found=f"all {len(wanted)} planned graphs are there")
    mode, shape = lost[0]
    return Check(
        name="capture",
        status=WARNING,
        found=f"{len(lost)} of {len(wanted)} planned graphs were not captured, first {mode} of "
        f"{shape.num_tokens} tokens",
        todo="raise graph_memory_limit, or see the log for a capture that failed",
    )


def _key(mode: str, shape: BatchDescriptor) -> tuple[str, BatchDescriptor]:
    """What one graph stands for: a PIECEWISE one for any number of requests."""
    return mode, shape if mode == "FULL" else shape.relaxed()
