"""Why less is accepted than could be: what changes when one thing about the pair is changed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.doctor.acceptance import Acceptance, predict
from specdec.doctor.forced import with_rope
from specdec.doctor.guesses import model_guesser
from specdec.doctor.inside import step_of
from specdec.doctor.subject import Subject
from specdec.drafters.combined import CombinedDrafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.eagle import EagleDrafter
from specdec.drafters.eagle_head import EagleHead
from specdec.drafters.layer_skip import LayerSkipDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.engine import Engine
from specdec.verifier.attention.select import select_backend
from specdec.verifier.loading import load_model
from specdec.verifier.models.llama import CausalLM

# Tokens per step that a change must add to be called the cause.
GAIN = 0.1


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that lowers the acceptance, with what showed it."""

    name: str
    found: str
    todo: str


def draft_model_of(engine: Engine) -> DraftModelDrafter | None:
    """The engine's draft model, alone or behind a lookup."""
    drafter = step_of(engine).drafter
    if isinstance(drafter, CombinedDrafter):
        drafter = drafter.second
    return drafter if isinstance(drafter, DraftModelDrafter) else None


def causes_of(
    result: Acceptance,
    engine: Engine,
    subject: Subject,
    without_graphs: Callable[[], Acceptance | None],
) -> Iterator[Cause]:
    """``without_graphs``: the same test on an engine without graphs, or None for want of room."""
    drafter = draft_model_of(engine)
    if drafter is not None and isinstance(drafter.model, CausalLM):
        yield from _rope(result, engine, drafter, drafter.model)
        yield from _dtype(result, engine, drafter, drafter.model, subject)
    is_stale = result.audit is not None and result.audit.stale is not None
    if not result.unexplained or is_stale:
        return
    if not result.guesser.runs_alone:
        yield Cause(
            "drafter's state",
            "a fresh request for the same text accepts more than the running one did: what the "
            "drafter carries from step to step is stale",
            "see its advance and catch_up, and what it keeps of rejected drafts",
        )
    if any(steps.mode != "NONE" for steps in engine.recent_steps()):
        eager = without_graphs()
        if eager is not None and not eager.unexplained:
            yield Cause(
                "graphs",
                f"without graphs the same prompts give {eager.measured.mean:.2f} tokens per step, "
                "as predicted: a graph replays something stale",
                "run with cudagraph_mode NONE until this is fixed, and report it",
            )


def _rope(
    result: Acceptance, engine: Engine, drafter: DraftModelDrafter, model: CausalLM
) -> Iterator[Cause]:
    target = step_of(engine).model.config.rope
    own = model.config.rope
    if own == target or own.rotary_dim != target.rotary_dim:
        return
    now = _mean_with(result, engine, model, drafter)
    mean = _mean_with(result, engine, with_rope(model, target), drafter)
    if mean > now + GAIN:
        yield Cause(
            "draft's rope",
            f"with the target's rope (theta {target.theta:g}, not {own.theta:g}) the draft would "
            f"give {mean:.2f} tokens per step instead of {now:.2f}",
            "correct rope_theta or rope_scaling in the draft's config.json",
        )


def _dtype(
    result: Acceptance,
    engine: Engine,
    drafter: DraftModelDrafter,
    model: CausalLM,
    subject: Subject,
) -> Iterator[Cause]:
    """The draft in float32, read from its files again, against the dtype that it runs in."""
    files = None if subject.draft_model is None else subject.draft_model.model
    if model.dtype == torch.float32 or not isinstance(files, str | Path):
        return
    wide = _in_float32(files, model)
    now = _mean_with(result, engine, model, drafter)
    mean = _mean_with(result, engine, wide, drafter)
    if mean <= now + GAIN and result.draft_finite:
        return
    name = str(model.dtype).removeprefix("torch.")
    overflow = "" if result.draft_finite else f"its logits are not finite in {name}, and "
    yield Cause(
        "draft's dtype",
        f"{overflow}in float32 the draft would give {mean:.2f} tokens per step instead of "
        f"{now:.2f}",
        f"run the draft in another dtype than {name}",
    )


def _mean_with(
    result: Acceptance, engine: Engine, model: CausalLM, drafter: DraftModelDrafter
) -> float:
    """Tokens per step, were ``model`` the draft model, without a lookup before it."""
    vocab_size, reach = step_of(engine).vocab_size, drafter.max_model_len
    guesser = model_guesser(model, vocab_size, reach=reach)
    guesses = [guesser.of(text)[0] for text in result.texts]
    return predict(result.texts, guesses, result.k).mean


def _in_float32(path: str | Path, like: CausalLM) -> CausalLM:
    backend = select_backend(
        "auto",
        head_size=like.config.head_size,
        dtype=torch.float32,
        block_size=16,
        device=like.device,
        sliding_window=like.config.sliding_window,
        soft_cap=like.config.attention_soft_cap,
        latent_size=like.config.latent_size,
    )
    return load_model(
        path,
        dtype=torch.float32,
        device=like.device,
        attention_backend=backend,
    )


def pass_cost(engine: Engine) -> float | None:
    """Bytes of weights that one draft pass reads, as a share of the target's; None if unknown."""
    step = step_of(engine)
    drafter, target = step.drafter, step.model
    if isinstance(drafter, CombinedDrafter):
        drafter = drafter.second
    if isinstance(drafter, NgramDrafter | SuffixDrafter):
        return 0.0
    if not isinstance(target, CausalLM):
        return None
    whole = _bytes_read(target)
    if isinstance(drafter, DraftModelDrafter) and isinstance(drafter.model, CausalLM):
        return _bytes_read(drafter.model) / whole
    if isinstance(drafter, LayerSkipDrafter):
        skipped = sum(_num_bytes(layer) for layer in target.first_layers()[drafter.num_layers :])
        return (whole - skipped) / whole
    if isinstance(drafter, EagleDrafter) and isinstance(drafter.head, EagleHead):
        # All drafts of a parallel head come from one pass, which this is not the cost of.
        return None if drafter.head.config.parallel else _bytes_read(drafter.head) / whole
    return None


def _bytes_read(model: CausalLM | EagleHead) -> int:
    """All weights but an embedding of its own, of which a pass reads a row per token."""
    own = model.embed_tokens.nbytes if model.lm_head is not model.embed_tokens else 0
    return _num_bytes(model) - own


def _num_bytes(module: torch.nn.Module) -> int:
    return sum(each.nbytes for each in module.parameters())
