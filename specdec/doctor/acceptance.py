"""Acceptance: what finished texts predict by teacher forcing, against what the engine counted."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.doctor.forced import CLOSE_CALL, Choices, forced_choices
from specdec.doctor.guesses import Guesser, guesser_of
from specdec.doctor.inside import step_of
from specdec.doctor.kv_audit import KVAudit, audit_of
from specdec.doctor.replay import (
    FinishedText,
    Guess,
    Step,
    Tally,
    replay,
    step_at,
    steps_from_counts,
)
from specdec.engine import Engine
from specdec.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A step that did not draft or accept what it should have."""

    prompt: int
    measured: Step
    expected: Step
    is_close: bool  # the draft's two best logits were nearly equal there: rounding explains it


@dataclass(frozen=True, slots=True)
class OtherText:
    """A token that the target, forced over the text, does not choose."""

    prompt: int
    position: int  # in the output
    token: int
    choice: int
    margin: float


@dataclass(kw_only=True, slots=True)
class Acceptance:
    """One measured run and its prediction."""

    guesser: Guesser
    texts: list[FinishedText]
    k: int
    guesses: list[Guess] = field(default_factory=list)  # of each text
    measured: Tally = field(default_factory=Tally)
    predicted: Tally = field(default_factory=Tally)
    mismatches: list[Mismatch] = field(default_factory=list)
    other_text: OtherText | None = None
    draft_finite: bool = True
    failed: int = 0  # requests that ended with an error
    unforced: int = 0  # texts of adapters, which the target alone cannot be forced over
    audit: KVAudit | None = None

    @property
    def unexplained(self) -> list[Mismatch]:
        return [each for each in self.mismatches if not each.is_close]


def run_texts(
    engine: Engine,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    adapters: Sequence[str | None],
    audit: KVAudit | None = None,
) -> tuple[list[FinishedText], int]:
    """Greedy texts of all prompts at once, and how many failed. ``audit`` looks at every step."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    requests = [
        engine.add_request(prompt, params, adapter)[0]
        for prompt, adapter in zip(prompts, adapters, strict=True)
    ]
    while any(request.finish_reason is None for request in requests):
        engine.step()
        if audit is not None:
            audit.after_step(engine, requests[0].arrival)
    texts = [
        FinishedText(
            prompt_ids=request.prompt_ids,
            token_ids=request.output_ids,
            budget=request.end - len(request.prompt_ids),
            steps=steps_from_counts(
                request.stats.drafted_per_step, request.stats.accepted_per_step
            ),
            adapter=adapter,
        )
        for request, adapter in zip(requests, adapters, strict=True)
        if request.finish_reason != "error"
    ]
    return texts, len(requests) - len(texts)


def examine(
    engine: Engine,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    adapters: Sequence[str | None] | None = None,
) -> Acceptance:
    """Generate with the engine's drafter, predict the counts from the texts, and compare.

    Waits for the device after each step. The texts are greedy, with k the engine's.
    """
    adapters = [None] * len(prompts) if adapters is None else adapters
    audit = audit_of(engine)
    texts, failed = run_texts(engine, prompts, max_new_tokens, adapters, audit)
    result = Acceptance(
        guesser=guesser_of(engine), texts=texts, k=engine.k, failed=failed, audit=audit
    )
    for number, text in enumerate(texts):
        _force_target(result, engine, number, text)
        guess, choices = result.guesser.of(text)
        result.guesses.append(guess)
        result.draft_finite &= choices is None or choices.finite
        result.measured.add(text.steps, len(text.token_ids))
        _compare(result, engine, number, text, guess, choices)
    result.predicted = predict(texts, result.guesses, engine.k)
    return result


def predict(texts: Sequence[FinishedText], guesses: Sequence[Guess], k: int) -> Tally:
    """The steps of all texts where each is drafted as its guess says, k at a time."""
    tally = Tally()
    for text, guess in zip(texts, guesses, strict=True):
        tally.add(list(replay(text, guess, k)), len(text.token_ids))
    return tally


def _force_target(result: Acceptance, engine: Engine, number: int, text: FinishedText) -> None:
    """The accept rule rests on every token being the target's own choice: see that it is."""
    if text.adapter is not None:
        result.unforced += 1
        return
    if result.other_text is not None:
        return
    step = step_of(engine)
    choices = forced_choices(step.model, text.ids, step.vocab_size)
    first = len(text.prompt_ids) - 1
    for position, token in enumerate(text.token_ids):
        choice, margin = choices.tokens[first + position], choices.margins[first + position]
        if choice != token and margin >= CLOSE_CALL[step.model.dtype]:
            result.other_text = OtherText(number, position, token, choice, margin)
            return


def _compare(
    result: Acceptance,
    engine: Engine,
    number: int,
    text: FinishedText,
    guess: Guess,
    choices: Choices | None,
) -> None:
    """Every step against what one that begins at the same token should do."""
    first = len(text.prompt_ids) - 1
    for measured in text.steps:
        expected = step_at(text, guess, engine.k, measured.committed)
        if (measured.drafted, measured.accepted) == (expected.drafted, expected.accepted):
            continue
        is_close = False
        if choices is not None and measured.drafted == expected.drafted:
            at = first + measured.committed + min(measured.accepted, expected.accepted)
            assert at < len(choices.margins), "both would have accepted what is not there"
            limit = CLOSE_CALL[step_of(engine).model.dtype]
            is_close = choices.margins[at] < limit
        result.mismatches.append(Mismatch(number, measured, expected, is_close))
