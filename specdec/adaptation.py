"""k="auto" in an engine: what the choice is told of the rows, and what the device is told of it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.config import BASE
from specdec.drafters.adaptive import AdaptiveK, Batch
from specdec.drafters.step_costs import StepCosts
from specdec.request import Request
from specdec.runner import Runner
from specdec.scheduler import StepPlan

# Steps between two looks at how much of a draft each row takes.
_LIMITS_EVERY = 16


@dataclass(frozen=True, slots=True)
class _Step:
    """A launched step of decode rows alone, whose time is not known yet."""

    batch: Batch
    k: int
    rounds: int


class Adaptation:
    """Gives the rows that adapt their k before each step, and learns from what steps did."""

    def __init__(self, costs: StepCosts, runner: Runner, *, reads_late: bool) -> None:
        """``reads_late``: the time between two launches is that of the step before the last."""
        self.choice = AdaptiveK(costs, BASE)
        self._runner = runner
        self._reads_late = reads_late
        self._seen: Counter[tuple[str, int, int]] = Counter()
        self._batch: Batch | None = None
        self._last: _Step | None = None
        self._num_steps = 0

    def before_step(self, running: Sequence[Request], rounds: int) -> None:
        """Choose k for the rows that decode next; those that prefill begin with it."""
        if self._seen:
            self.choice.observe(self._seen)
            self._seen.clear()
        self._batch = batch = self._batch_of(running, rounds)
        if not batch.rows:
            return
        k = self.choice.choose(batch)
        self._num_steps += 1
        if k > 1 and self._num_steps % _LIMITS_EVERY == 0:
            prices = self.choice.row_limits(batch, k)
            for request in running:
                request.k_limit = self.choice.row_limit(
                    request.acceptance, request.num_committed, prices
                )
        rows: list[int] = []
        widths: list[int] = []
        for request in running:
            if request.adapts:
                width = min(k, request.k_limit)
                if request.k != width:
                    request.k = width
                    rows.append(request.row)
                    widths.append(width)
        if rows:
            self._runner.write_k(rows, widths)

    def _batch_of(self, running: Sequence[Request], rounds: int) -> Batch:
        rows: Counter[tuple[str, int]] = Counter()
        num_reqs = num_context = lag = left = floor = 0
        has_lora = False
        for request in running:
            if request.num_computed < request.prefill_goal:
                continue
            # This runs for every row of every step: properties and calls are spared.
            num_reqs += 1
            length = len(request.prompt_ids) + len(request.output_ids)
            num_context += length
            if request.end - length > left:
                left = request.end - length
            if request.undrafted_steps > lag:
                lag = request.undrafted_steps
            adapter = request.adapter
            has_lora = has_lora or adapter is not None
            if request.adapts:
                rows[BASE if adapter is None else adapter.name, request.k_limit] += 1
            else:
                floor = max(floor, min(request.k, request.end - length - 1))
        return Batch(
            num_reqs=num_reqs,
            rows=rows,
            num_context=num_context,
            has_lora=has_lora,
            lag=lag,
            tokens_left=left,
            floor=floor,
            rounds=rounds,
        )

    def after_row(self, request: Request, drafted: int, accepted: int) -> None:
        """A row's step has been read."""
        self._seen[request.adapter_name, drafted, accepted] += 1
        if drafted:
            request.acceptance = self.choice.row_acceptance(request.acceptance, drafted, accepted)

    def after_step(self, plan: StepPlan, seconds: float | None, waited: float, rounds: int) -> None:
        """``plan`` has been launched, ``rounds`` times in one, and what is due has been read.

        seconds: since the launch before it; None where one of the two held prompts.
        waited: how many of them the host waited for the device.
        """
        batch = self._batch
        launched = None
        if batch is not None and plan.decodes and not plan.prefills:
            launched = _Step(batch, plan.k, rounds)
        timed = self._last if self._reads_late else launched
        self._last = launched
        if timed is None or seconds is None or (timed.k and timed.batch.lag):
            return
        self.choice.costs.observe(
            timed.batch.num_reqs,
            timed.k,
            seconds / timed.rounds,
            num_context=timed.batch.num_context,
            has_lora=timed.batch.has_lora,
            waited=waited / timed.rounds if self._reads_late else None,
        )
