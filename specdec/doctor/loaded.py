"""The engine as it was built: what only loading shows, and whether the plan told the truth."""

from collections.abc import Iterator

from specdec.doctor.facts import format_size, name_of
from specdec.doctor.inside import step_of
from specdec.doctor.plan import Plan
from specdec.doctor.report import FAULT, OK, WARNING, Check, Fact
from specdec.engine import Engine
from specdec.graph_report import start_up_line


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
    wanted = {
        (mode.name, shape)
        for mode, shape in plan.dispatcher.capture_list()
        if shape.uniform or plan.device.type == "cuda"
    }
    roles = ("step", "target")
    got = {(r.mode, r.descriptor) for r in engine.graph_table() if r.role in roles}
    lost = wanted - got
    if lost and engine.config.capture == "eager":
        yield Check(
            name="capture",
            status=WARNING,
            found=f"{len(lost)} of {len(wanted)} planned graphs were not captured, first "
            f"{min(lost)[1].num_reqs} requests and {min(lost)[1].num_tokens} tokens",
            todo="raise graph_memory_limit, or see the log for a capture that failed",
        )
    elif not other:
        yield Check(name="plan", status=OK, found="the engine was built as planned")
