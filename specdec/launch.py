"""Turns a plan into launched passes: which kind of pass, and what its rows ask of it."""

from dataclasses import dataclass, replace

from specdec.outputs import StepRecord
from specdec.request import Request
from specdec.runner import Needs, Runner
from specdec.scheduler import StepPlan
from specdec.verifier.batch import PendingResult


@dataclass(frozen=True, slots=True)
class Launched:
    """A pass whose results have not been read."""

    requests: list[Request]
    results: PendingResult
    is_decode: bool
    most_tokens: int  # that each of its requests may get from it

    @property
    def rounds(self) -> int:
        return self.results.rounds


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
        verified, record = runner.split(rows, plan.k, needs, grammars)
        records.append(record)
        rows, needs = [], replace(needs, catch_up_passes=0)
    if plan.prefills:
        of_prompts = [request.grammar for request in sampling]
        beside, first, record = runner.mixed(plan.prefills, rows, plan.k, needs, of_prompts)
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
        launched.append(Launched(plan.decodes, verified, True, most_tokens))
    if first is not None:
        launched.append(Launched(sampling, first, False, 1))
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
