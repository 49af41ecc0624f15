"""What a drafter proposes after each prefix of a finished text, worked out without its state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdec.doctor.forced import Choices, forced_choices
from specdec.doctor.inside import step_of, without_prefix_cache
from specdec.doctor.replay import FinishedText, Guess
from specdec.drafters.base import Drafter
from specdec.drafters.combined import CombinedDrafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.layer_skip import LayerSkipDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.engine import Engine
from specdec.params import SamplingParams
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.state import DecodeState, RowState

# A proposal that is none of the text's tokens: an id past every vocabulary.
NOT_ACCEPTED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Guesser:
    """How one text's proposals are worked out.

    Attributes:
        how: in words.
        blind_to: what would be wrong here in the same way as in the engine, so that no comparison
            shows it.
        of: a text -> its guess and, where a model was run, that model's choices.
        runs_alone: without the engine, so that every guess is cheap.
    """

    how: str
    blind_to: str
    of: Callable[[FinishedText], tuple[Guess, Choices | None]]
    runs_alone: bool = True


def guesser_of(engine: Engine) -> Guesser:
    """The way that suits the engine's drafter: its model alone, its lookup alone, or fresh requests
    where neither can be told from outside.
    """
    step = step_of(engine)
    assert step.drafter is not None
    alone = _guesser_alone(engine, step.drafter, step.vocab_size)
    return _fresh_guesser(engine, step.drafter) if alone is None else alone


def _guesser_alone(engine: Engine, drafter: Drafter, vocab_size: int) -> Guesser | None:
    """None where the drafter's parts do not run on their own."""
    if isinstance(drafter, DraftModelDrafter) and not drafter.uses_adapters:
        return model_guesser(drafter.model, vocab_size, reach=drafter.max_model_len)
    if isinstance(drafter, LayerSkipDrafter) and not engine.loras:
        return model_guesser(drafter.model, vocab_size, num_layers=drafter.num_layers)
    if isinstance(drafter, NgramDrafter | SuffixDrafter):
        return _lookup_guesser(engine, drafter)
    if isinstance(drafter, CombinedDrafter):
        first = _guesser_alone(engine, drafter.first, vocab_size)
        second = _guesser_alone(engine, drafter.second, vocab_size)
        if first is not None and second is not None:
            return _combined_guesser(first, second)
    return None


def model_guesser(
    model: LanguageModel,
    vocab_size: int,
    *,
    num_layers: int | None = None,
    reach: int | None = None,
) -> Guesser:
    """One pass of the model over the finished text.

    A draft counts only while all before it were the text's own tokens, so after each prefix of the
    text one choice says all there is to know. ``reach``: the model's context; a step whose drafts
    would end past it drafts nothing.
    """

    def of(text: FinishedText) -> tuple[Guess, Choices]:
        ids = text.ids[: model.config.max_position_embeddings]
        choices = forced_choices(model, ids, vocab_size, num_layers=num_layers)
        first = len(text.prompt_ids) - 1

        def guess(committed: int, width: int) -> list[int]:
            if reach is not None and len(text.prompt_ids) + committed + width > reach:
                return []
            known = choices.tokens[first + committed : first + committed + width]
            # Past the end of the text the model goes on, and nothing is accepted.
            return known + [NOT_ACCEPTED] * (width - len(known))

        return guess, choices

    part = "the model" if num_layers is None else f"the first {num_layers} layers"
    return Guesser(
        f"{part} run over the finished text without a cache",
        "a model that is wrong in itself (weights, rope, dtype)",
        of,
    )


def _lookup_guesser(engine: Engine, drafter: Drafter) -> Guesser:
    """The lookup over each prefix of the text, in a state that holds nothing else."""
    limits = step_of(engine).state

    def of(text: FinishedText) -> tuple[Guess, None]:
        state = DecodeState(
            max_num_seqs=1,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            vocab_size=1,
            device=limits.device,
        )
        rows = RowState(state, torch.zeros(1, dtype=torch.int64, device=state.device))

        def guess(committed: int, width: int) -> Sequence[int]:
            known = text.prompt_ids + text.token_ids[:committed]
            state.write_row(0, known, {}, {})
            with torch.inference_mode():
                draft = drafter.propose(rows, width)
            ids: list[int] = draft.ids[0].tolist()  # type: ignore[union-attr]
            return ids

        return guess, None

    return Guesser(
        "the lookup repeated over each prefix of the text",
        "a lookup that is wrong in itself, and what it learns of earlier outputs",
        of,
    )


def _combined_guesser(lookup: Guesser, second: Guesser) -> Guesser:
    def of(text: FinishedText) -> tuple[Guess, Choices | None]:
        first_guess, _ = lookup.of(text)
        second_guess, choices = second.of(text)

        def guess(committed: int, width: int) -> list[int]:
            given = list(first_guess(committed, width))
            count = (*(token < 0 for token in given), True).index(True)
            return given[:count] + list(second_guess(committed, width))[count:]

        return guess, choices

    how = f"{lookup.how}, and where it ends {second.how}"
    return Guesser(how, f"{lookup.blind_to}; {second.blind_to}", of)


def _fresh_guesser(engine: Engine, drafter: Drafter) -> Guesser:
    """Each step as the first of a request of its own, whose prompt is the text up to there.

    Only drafts that the target accepts are seen this way: the others come out as none, after the
    number that were drafted.
    """

    def of(text: FinishedText) -> tuple[Guess, None]:
        def guess(committed: int, width: int) -> list[int]:
            # The prefill gives the last committed token again; the step after it drafts.
            prompt = text.prompt_ids + text.token_ids[: committed - 1]
            params = SamplingParams(max_new_tokens=width + 2, k=width)
            with without_prefix_cache(engine):
                (request,) = engine.add_request(prompt, params, text.adapter)
                while not request.stats.steps and request.finish_reason is None:
                    engine.step()
            engine.abort(request.id)
            if not request.stats.steps:
                return []
            drafted = request.stats.drafted_per_step[0]
            accepted = request.stats.accepted_per_step[0]
            return request.output_ids[1 : 1 + accepted] + [NOT_ACCEPTED] * (drafted - accepted)

        return guess, None

    return Guesser(
        f"fresh requests: each step of {drafter.name} repeated with the text so far as the prompt",
        "whatever the drafter reads wrongly in a prompt; only what it carries from step to step "
        "is tested",
        of,
        runs_alone=False,
    )
