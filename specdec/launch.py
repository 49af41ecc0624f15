"""Turns a plan into launched passes: which kind of pass, and what its rows ask of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specdec import draft_notes
from specdec.flatten import PromptChunk
from specdec.grammar import GrammarState
from specdec.lora import LoraManager
from specdec.outputs import StepRecord
from specdec.request import Request
from specdec.rows import RequestRow
from specdec.runner import Needs, Runner
from specdec.scheduler import PrefillChunk, StepPlan
from specdec.verifier.batch import PendingResult


@dataclass(frozen=True, slots=True)
class Launched:
    """A pass whose results have not been read."""

    requests: list[Request]
    results: PendingResult
    is_decode: bool
    most_tokens: int  # that each of its requests may get from it
    mode: str  # of its graph

    @property
    def rounds(self) -> int:
        return self.results.rounds


def install(runner: Runner, lora: LoraManager, plan: StepPlan) -> None:
    """Write the rows and block tables that this plan adds."""
    lora.load_pending()
    if plan.new_blocks:
        runner.write_blocks([(each.row, first, new) for each, first, new in plan.new_blocks])
    for request in plan.admitted:
        runner.write_row(RequestRow.of(request, runner.step.vocab_size))
    draft_notes.before_step(runner, plan.admitted)


def launch(runner: Runner, plan: StepPlan) -> tuple[list[Launched], list[StepRecord]]:
    """Launch a step. Nothing here waits for the device, except for drafts that the host must see.

    Decode rows alone replay one graph; prompts share a pass with the rows that decode. Where a row
    follows a format, the decode rows take the split step, and prompts a pass of their own.
    """
    sampling = [chunk.request for chunk in plan.prefills if chunk.samples]
    needs = _needs(runner, plan, plan.decodes + sampling)
    rows = [request.row for request in plan.decodes]
    grammars = [request.grammar for request in plan.decodes]
    verified: PendingResult | None = None
    first: PendingResult | None = None
    records: list[StepRecord] = []
    if any(grammar is not None for grammar in grammars):
        verified, record = _split(runner, rows, plan.k, needs, grammars)
        records.append(record)
        rows, needs = [], replace(needs, catch_up_passes=0)
    if plan.prefills:
        of_prompts = [request.grammar for request in sampling]
        chunks = [_chunk(each) for each in plan.prefills]
        masks = _first_masks(runner, of_prompts)
        beside, first, record = runner.mixed(chunks, rows, plan.k, needs, masks)
        records.append(record)
        verified = verified or beside
    elif rows:
        verified, record = runner.decode(rows, plan.k, needs, plan.rounds.count)
        records.append(record)
    if plan.rounds.reason is not None and plan.decodes:
        records = [replace(record, rounds_reason=plan.rounds.reason) for record in records]
    launched = []
    if verified is not None:
        most_tokens = verified.rounds * (1 + plan.k)
        _note_drafting(plan, verified.rounds)
        launched.append(Launched(plan.decodes, verified, True, most_tokens, records[0].mode))
    if first is not None:
        launched.append(Launched(sampling, first, False, 1, records[-1].mode))
    return launched, records


def _needs(runner: Runner, plan: StepPlan, launched: list[Request]) -> Needs:
    return Needs(
        sampled=any(request.needs_sampling for request in launched),
        has_lora=any(request.adapter is not None for request in plan.requests),
        with_logprobs=any(request.params.logprobs is not None for request in launched),
        catch_up_passes=_catch_up_passes(runner.catchup_width, plan),
    )


def _catch_up_passes(width: int, plan: StepPlan) -> int:
    """How many catch-up passes bring every row's draft KV up to date before this step."""
    if plan.k == 0 or not plan.decodes:
        return 0
    behind = max(request.undrafted_steps for request in plan.decodes)
    # One more token than steps: the last draft of a fully accepted run was never fed.
    return -(-(behind + 1) // width) if width and behind else 0


def _note_drafting(plan: StepPlan, rounds: int) -> None:
    """Keep for how many steps each text has not been read by the drafter."""
    for request in plan.decodes:
        request.undrafted_steps = 0 if plan.k else request.undrafted_steps + rounds


def _chunk(chunk: PrefillChunk) -> PromptChunk:
    request = chunk.request
    tokens = request.token_ids[chunk.start : chunk.end]
    return PromptChunk(request.row, chunk.start, tokens, chunk.samples)


def _first_masks(runner: Runner, grammars: Sequence[GrammarState | None]) -> np.ndarray | None:
    """What the first tokens of prompts may be; None where they may be anything."""
    if all(grammar is None for grammar in grammars):
        return None
    masks = _free_masks(runner, len(grammars), 1)
    for row, grammar in enumerate(grammars):
        if grammar is not None:
            masks[row] = grammar.masks([], 1)[1]
    return masks


def _split(
    runner: Runner,
    rows: list[int],
    k: int,
    needs: Needs,
    grammars: Sequence[GrammarState | None],
) -> tuple[PendingResult, StepRecord]:
    """Launch a uniform pass whose drafts the host looks at before they are verified.

    A draft that a row's grammar forbids is cut with all after it, and every verify row gets the
    mask of its own prefix. Waits for the drafts.
    """
    draft = runner.draft_apart(rows, k, needs)
    ids = draft.ids.tolist()
    masks = _free_masks(runner, len(rows), 1 + k)
    for row, grammar in enumerate(grammars):
        if grammar is not None:
            legal, masks[row] = grammar.masks(ids[row], 1 + k)
            ids[row][legal:] = [-1] * (k - legal)
    result, record = runner.verify_apart(ids, k, needs, masks)
    result = replace(result, num_from_first=draft.num_from_first)
    pending = runner.pending(result, len(rows), needs)
    return pending, replace(record, reason="split step: response_format")


def _free_masks(runner: Runner, num_rows: int, width: int) -> np.ndarray:
    words = runner.step.allowed.shape[-1]
    return np.full((num_rows, width, words), -1, dtype=np.int32)
