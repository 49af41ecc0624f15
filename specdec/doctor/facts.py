"""A plan in words: what is used and why, and what of it somebody may not have wanted."""

import os
from collections.abc import Iterator
from pathlib import Path

from specdec.config import EngineConfig
from specdec.doctor.plan import Plan
from specdec.doctor.report import FAULT, OK, UNSEEN, WARNING, Check, Fact
from specdec.doctor.subject import Subject
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.support import graph_support
from specdec.verifier.modes import BatchDescriptor, CUDAGraphMode

FULL = CUDAGraphMode.FULL


def plan_facts(subject: Subject, plan: Plan, config: EngineConfig) -> Iterator[Fact]:
    """One line for each thing that is used."""
    model = subject.target.config
    yield Fact(
        name="family",
        value=f"{model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"{plan.num_weights / 1e6:,.1f} M weights",
    )
    yield Fact(name="dtype", value=name_of(plan.dtype), why=_why_dtype(config, plan, model.dtype))
    if plan.draft_dtype is not None and subject.draft_model is not None:
        own = subject.draft_model.config.dtype
        yield Fact(
            name="draft's dtype",
            value=name_of(plan.draft_dtype),
            why=f"its files say {name_of(own)}",
        )
    yield Fact(name="attention", value=plan.attention.backend.name, why=plan.attention.reason)
    for name, why_not in plan.attention.others:
        yield Fact(name=f"  not {name}", value=why_not)
    if plan.draft_attention is not None and plan.draft_attention.backend.name != (
        plan.attention.backend.name
    ):
        choice = plan.draft_attention
        yield Fact(name="draft's attention", value=choice.backend.name, why=choice.reason)
    yield Fact(name="graphs", value=str(plan.mode), why=_why_mode(model, plan))
    yield Fact(name="capture grid", value=_grid(plan), why=_coverage(plan))
    yield Fact(name="weights", value=format_size(plan.weight_bytes), why=_draft_share(plan))
    yield Fact(
        name="KV cache",
        value=_kv(plan),
        why="" if subject.draft is None else _draft_kv(subject, plan),
    )
    if plan.state_bytes:
        why = f"of {plan.max_num_seqs} requests; with them no prefix is cached"
        yield Fact(name="recurrent states", value=format_size(plan.state_bytes), why=why)
    yield Fact(name="exact mode", value=_exact(plan), why=_why_exact(plan))
    yield Fact(
        name="context",
        value=f"{plan.max_model_len} tokens",
        why=f"the model's is {model.max_position_embeddings}",
    )


def plan_checks(plan: Plan, config: EngineConfig, context: int) -> Iterator[Check]:
    """What a plan falls short of. ``context``: the model's own."""
    backend = plan.attention.backend
    if config.exact is True and not backend.batch_invariant:
        yield Check(
            name="exact mode",
            status=FAULT,
            found=f"exact=True, and {backend.name} is not batch-invariant on {plan.device.type}",
            todo="take attention_backend triton on a GPU, or exact='auto'",
        )
    if plan.max_model_len > context:
        yield Check(
            name="context",
            status=FAULT,
            found=f"max_model_len is {plan.max_model_len}, the model's context {context}",
            todo=f"set max_model_len to {context} or less",
        )
    if plan.downgrades:
        yield Check(
            name="graph mode",
            status=WARNING,
            found=f"{plan.asked_mode} was asked for, {plan.mode} is served: "
            + "; ".join(plan.downgrades),
            todo=f"take another attention backend, or ask for {plan.mode}",
        )
    else:
        yield Check(name="graph mode", status=OK, found=f"{plan.mode}, as asked for")
    yield _coverage_check(plan)
    yield _memory_check(plan)
    if plan.device.type == "cuda" and plan.attention.backend.name == "sdpa":
        yield Check(
            name="attention",
            status=WARNING,
            found="sdpa is the reference, and slow on a GPU",
            todo="install triton, or see above what speaks against it",
        )


def name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def format_size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _why_dtype(config: EngineConfig, plan: Plan, stored: object) -> str:
    said = f"the model's files say {name_of(stored)}"
    if config.dtype != "auto":
        return f"asked for; {said}"
    return f"float32 on the CPU; {said}" if plan.device.type == "cpu" else said


def _why_mode(model: ModelConfig, plan: Plan) -> str:
    backend = plan.attention.backend
    support = graph_support(model, backend)
    layers = "attention supports" if support == backend.cg_support else "recurrent layers support"
    return f"{layers} {support.name}"


def _grid(plan: Plan) -> str:
    counts: dict[int, list[int]] = {}
    for _, shape in plan.dispatcher.capture_list():
        if shape.uniform:
            counts.setdefault(shape.query_len - 1, []).append(shape.num_reqs)
    if not counts:
        return "no graphs of decode steps"
    alike: dict[str, list[int]] = {}
    for k, found in sorted(counts.items()):
        alike.setdefault(", ".join(map(str, sorted(found))), []).append(k)
    return "; ".join(f"{_ks(ks)}: {found} requests" for found, ks in alike.items())


def _coverage(plan: Plan) -> str:
    reach = {k: _covered(plan, k) for k in plan.allowed_k}
    if all(found == plan.max_num_seqs for found in reach.values()):
        return f"FULL for every decode batch up to {plan.max_num_seqs} requests"
    return "; ".join(f"k={k}: FULL up to {found} requests" for k, found in reach.items())


def _covered(plan: Plan, k: int) -> int:
    """The most requests up to which every decode batch of this k takes a FULL graph."""
    for count in range(1, plan.max_num_seqs + 1):
        mode, _ = plan.dispatcher.dispatch(BatchDescriptor(count * (1 + k), count, True))
        if mode is not FULL:
            return count - 1
    return plan.max_num_seqs


def _coverage_check(plan: Plan) -> Check:
    short = {k: found for k in plan.allowed_k if (found := _covered(plan, k)) < plan.max_num_seqs}
    if not short:
        full = f"every decode batch up to {plan.max_num_seqs} requests has a FULL graph"
        return Check(name="coverage", status=OK, found=full)
    parts = ", ".join(f"k={k} up to {found} of {plan.max_num_seqs}" for k, found in short.items())
    return Check(
        name="coverage",
        status=WARNING,
        found=f"decode batches without a FULL graph: FULL reaches {parts} requests",
        todo="ask for cudagraph_mode FULL_AND_PIECEWISE and a backend that supports it",
    )


def _ks(ks: list[int]) -> str:
    return " and ".join(f"k={k}" for k in ks)


def _draft_share(plan: Plan) -> str:
    if not plan.draft_weight_bytes:
        return ""
    share = plan.draft_weight_bytes / plan.weight_bytes
    return f"and {format_size(plan.draft_weight_bytes)} of the draft, {share:.0%} of the target's"


def _kv(plan: Plan) -> str:
    if plan.num_blocks is None:
        return "no room"
    size = format_size(plan.num_blocks * plan.block_bytes)
    texts = plan.kv_tokens // plan.max_model_len
    return (
        f"{size}: {plan.num_blocks} blocks of {plan.block_size}, {plan.kv_tokens:,} tokens, "
        f"{texts} texts of {plan.max_model_len}"
    )


def _draft_kv(subject: Subject, plan: Plan) -> str:
    if subject.draft_model is not None:
        return "the draft's included"
    if subject.head is None and isinstance(subject.draft, str | Path):
        return "the drafter has none of its own"
    return "without the drafter's own, which only loading it shows"


def _exact(plan: Plan) -> str:
    return "on" if plan.attention.backend.batch_invariant else "off"


def _why_exact(plan: Plan) -> str:
    name = plan.attention.backend.name
    if plan.attention.backend.batch_invariant:
        return f"{name} is batch-invariant: a row's bits do not depend on its batch"
    return (
        f"{name} is not batch-invariant on {plan.device.type}: texts are the same but for near ties"
    )


def _memory_check(plan: Plan) -> Check:
    name, needed = "memory", plan.weight_bytes + plan.draft_weight_bytes
    if plan.num_blocks is None:
        free = format_size(plan.free_bytes or 0)
        return Check(
            name=name,
            status=FAULT,
            found=f"the weights take {format_size(needed)} of {free} free, and no KV cache fits",
            todo="free the GPU, raise gpu_memory_utilization, or take a smaller model",
        )
    if plan.num_blocks * plan.block_size < plan.max_model_len:
        return Check(
            name=name,
            status=WARNING,
            found=f"the KV cache holds {plan.kv_tokens:,} tokens, one text may have "
            f"{plan.max_model_len:,}",
            todo="lower max_model_len, or raise num_kv_blocks",
        )
    if plan.device.type == "cpu":
        total = _ram()
        needed += plan.num_blocks * plan.block_bytes
        if total is None:
            return Check(name=name, status=UNSEEN, found="this system does not say how much it has")
        if needed > total:
            return Check(
                name=name,
                status=WARNING,
                found=f"weights and KV cache take {format_size(needed)} of {format_size(total)}",
                todo="lower num_kv_blocks, or take dtype bfloat16",
            )
    found = f"weights and KV cache fit; a KV block takes {format_size(plan.block_bytes)}"
    return Check(name=name, status=OK, found=found)


def _ram() -> int | None:
    """Bytes of memory of this machine."""
    names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    if not all(name in os.sysconf_names for name in names):
        return None
    return os.sysconf(names[0]) * os.sysconf(names[1])
