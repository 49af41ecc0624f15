"""Who runs in the next step: rows that decode, chunks that prefill, and the blocks for both."""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from specdec.adapters import AdapterTable
from specdec.request import Request
from specdec.rounds import ONE_ROUND, Rounds
from specdec.verifier.kv_cache import BlockPool, OutOfBlocks, block_contents


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    request: Request
    start: int
    end: int
    samples: bool  # it ends a prompt, whose first token comes from here; a resumed text has its own


@dataclass(slots=True)
class StepPlan:
    """What one step runs."""

    k: int = 0
    rounds: Rounds = ONE_ROUND
    decodes: list[Request] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    new_blocks: list[tuple[Request, int, list[int]]] = field(default_factory=list)

    @property
    def requests(self) -> list[Request]:
        """All requests with tokens in the step."""
        return self.decodes + [chunk.request for chunk in self.prefills]

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.prefills


class Scheduler:
    """Continuous batching by rank (priority, then arrival) over one token budget per step.

    Decode rows come first and are scheduled with their whole 1 + k or not at all; where the budget
    does not hold all of them they take turns, so each runs at least once in
    ``ceil(rows / (budget // (1 + k)))`` steps. While prompts wait, a quarter of the budget is
    theirs; beside decode rows they get no more than a graph holds. When the pool is short of
    blocks the last in rank gives up its own and is recomputed later; the first always goes on, so
    every request ends. A text whose adapter finds all slots in use by others waits at the head of
    the queue, and only texts without an adapter pass it.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_size: int,
        pool: BlockPool,
        allowed_k: tuple[int, ...],
        draft_lag: int,
        prefix_caching: bool,
        lookahead: int = 0,
        graphed_tokens: int | None = None,
    ) -> None:
        """
        draft_lag: committed tokens at the end of a text that a drafter's KV may lack.
        lookahead: tokens after a position that a drafter's KV of it depends on.
        graphed_tokens: of the largest batch with prompts that has a graph.
        """
        self.max_num_batched_tokens = max_num_batched_tokens
        self.block_size = block_size
        self.pool = pool
        self.allowed_k = sorted(allowed_k)
        self.waiting: list[Request] = []  # by rank
        self.running: list[Request] = []
        self.draft_lag = draft_lag
        self.lookahead = lookahead
        self.graphed_tokens = graphed_tokens
        self.prefix_caching = prefix_caching
        self.adapters: AdapterTable | None = None
        self.suspects: list[Request] = []  # only the first of them runs: see ``isolate``
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._step = 0
        self._unwritten_blocks: list[tuple[Request, int, list[int]]] = []

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: r.rank)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self, *, may_preempt: bool, rounds: Rounds = ONE_ROUND) -> StepPlan | None:
        """Plan the next step, or as many as ``rounds`` where nothing speaks against it.

        None: blocks are short, and passes in flight must be read first.
        """
        self._clear_suspects()
        plan = StepPlan(new_blocks=self._unwritten_blocks)
        self._unwritten_blocks = []
        able = [request for request in self.running if self._may_run(request)]
        decodes = [request for request in able if request.is_prefilled and not request.surely_done]
        plan.k = self._batch_k(decodes)
        chosen = self._take_turns(decodes, plan.k)
        plan.rounds = self._rounds(rounds, decodes, chosen, plan.k)
        num_tokens = plan.rounds.count * (1 + plan.k)
        for request in chosen:
            if request.row < 0:
                continue  # preempted for an earlier row of this step
            while not self._reserve(request, request.slots_needed(num_tokens), plan):
                if not may_preempt:
                    self._unwritten_blocks = plan.new_blocks
                    return None
                victim = max(self.running, key=lambda r: r.rank)
                self._preempt(victim, plan)
                if victim is request:
                    break
            if request.row >= 0:
                plan.decodes.append(request)
        self._schedule_prefills(plan)
        return plan

    def _batch_k(self, decodes: list[Request]) -> int:
        wanted = max((min(r.k, r.remaining - 1) for r in decodes), default=0)
        return next(k for k in self.allowed_k if k >= wanted)

    def _rounds(
        self, wanted: Rounds, decodes: list[Request], chosen: list[Request], k: int
    ) -> Rounds:
        """``wanted``, or one round where others would wait for the rest, or nothing would run."""
        if wanted.count == 1 or not chosen:
            return wanted
        if self._prompts_wait:
            return Rounds(1, "prompts wait or share the step")
        if len(chosen) < len(decodes):
            return Rounds(1, "max_num_batched_tokens: rows take turns")
        if any(request.grammar is not None for request in chosen):
            return Rounds(1, "response_format")
        if max(request.steps_left for request in chosen) < wanted.count:
            return Rounds(1, "every text is about to end")
        num_tokens = wanted.count * (1 + k)
        missing = sum(self._missing_blocks(r, r.slots_needed(num_tokens)) for r in chosen)
        if missing > self.pool.num_free:
            return Rounds(1, f"{missing} KV blocks ahead are wanted, {self.pool.num_free} are free")
        return wanted

    @property
    def _prompts_wait(self) -> bool:
        can_start = bool(self.waiting and self._free_rows)
        return can_start or any(not request.is_prefilled for request in self.running)

    def _take_turns(self, decodes: list[Request], k: int) -> list[Request]:
        budget = self.max_num_batched_tokens
        prompts_wait = self._prompts_wait
        if prompts_wait:
            budget -= budget // 4
        self._step += 1
        limit = budget // (1 + k)
        if limit == 0:
            # Room for one row or for prompts: every other step is the prompts'.
            if prompts_wait and self._step % 2:
                return []
            limit = 1
        chosen = sorted(decodes, key=lambda r: (r.last_step, r.rank))[:limit]
        for request in chosen:
            request.last_step = self._step
        return sorted(chosen, key=lambda r: r.rank)

    def _schedule_prefills(self, plan: StepPlan) -> None:
        num_decoded = len(plan.decodes) * (1 + plan.k)
        budget = self._step_budget(num_decoded) - num_decoded
        for request in self.running:
            if self._may_run(request) and not request.is_prefilled and budget > 0:
                budget -= self._add_chunk(request, budget, plan)
        while self._free_rows and budget > 0:
            first = self._next_waiting()
            if first is None:
                break
            request = first
            # The last committed token is a decode step's input. A text without output has no such
            # step before it: its prefill reads the whole prompt and samples the first token.
            request.prefill_goal = request.num_committed - bool(request.output_ids)
            self._take_cached(request, plan)
            if not self._reserve(request, request.slots_needed(2 + request.k), plan):
                self._give_up_blocks(request, plan)
                self._unpin_adapter(request)
                break
            self.waiting.remove(request)
            self.num_cached_tokens += request.num_cached
            request.row = self._free_rows.pop()
            request.last_step = self._step
            self.running.append(request)
            plan.admitted.append(request)
            budget -= self._add_chunk(request, budget, plan)

    def _step_budget(self, num_decoded: int) -> int:
        """Tokens of a step with so many of decode rows: what graphs hold, where that leaves prompts
        their quarter of the budget.
        """
        budget, graphed = self.max_num_batched_tokens, self.graphed_tokens
        if num_decoded == 0 or graphed is None or graphed - num_decoded < budget // 4:
            return budget
        return min(budget, graphed)

    def _next_waiting(self) -> Request | None:
        """The earliest request that may start, its adapter pinned in a slot."""
        slots_are_short = False
        for request in filter(self._may_run, self.waiting):
            if request.adapter is None:
                return request
            if not slots_are_short:
                assert self.adapters is not None
                if self.adapters.pin(request.adapter):
                    return request
                slots_are_short = True
        return None

    def _unpin_adapter(self, request: Request) -> None:
        if request.adapter is not None:
            assert self.adapters is not None
            self.adapters.unpin(request.adapter)

    def _take_cached(self, request: Request, plan: StepPlan) -> None:
        """Start from blocks that an earlier text with the same beginning has filled."""
        if self.prefix_caching:
            # One token at least is computed, for its logits.
            request.num_published = 0
            contents = list(self._contents(request, request.prefill_goal - 1))
            request.blocks = self.pool.take_prefix([content for content, _ in contents])
            request.prefix_key = b""
            if request.blocks:
                plan.new_blocks.append((request, 0, list(request.blocks)))
                request.prefix_key = contents[len(request.blocks) - 1][1]
        request.num_published = len(request.blocks)
        request.num_cached = request.num_computed = len(request.blocks) * self.block_size

    def publish(self, request: Request) -> None:
        """Offer the full blocks of committed, verified tokens to texts with the same beginning."""
        if not self.prefix_caching or request.row < 0:
            return
        valid = request.num_committed - 1 - self.draft_lag - request.undrafted_steps
        if valid // self.block_size <= request.num_published:
            return
        for content, key in self._contents(request, valid, request.prefix_key):
            self.pool.publish(request.blocks[request.num_published], content)
            request.num_published += 1
            request.prefix_key = key

    def _contents(
        self, request: Request, length: int, prefix_key: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        """Of the full blocks of a text's first ``length`` tokens, those not published yet."""
        first = request.num_published * self.block_size
        tokens = request.tokens_between(first, length + self.lookahead)
        salt, ahead = request.cache_salt, self.lookahead
        return block_contents(tokens, self.block_size, salt, ahead, prefix_key)

    def _add_chunk(self, request: Request, budget: int, plan: StepPlan) -> int:
        start = request.num_computed
        end = min(request.prefill_goal, start + budget)
        samples = end == request.prefill_goal and not request.output_ids
        plan.prefills.append(PrefillChunk(request, start, end, samples))
        request.num_computed = end
        return end - start

    def _reserve(self, request: Request, num_slots: int, plan: StepPlan) -> bool:
        first = len(request.blocks)
        missing = self._missing_blocks(request, num_slots)
        if not missing:
            return True
        try:
            blocks = self.pool.allocate(missing)
        except OutOfBlocks:
            return False
        request.blocks.extend(blocks)
        plan.new_blocks.append((request, first, blocks))
        return True

    def _missing_blocks(self, request: Request, num_slots: int) -> int:
        return max(-(-num_slots // self.block_size) - len(request.blocks), 0)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        assert request.passes_in_flight == 0
        self.num_preemptions += 1
        self._put_back(request)
        plan.decodes = [r for r in plan.decodes if r is not request]
        plan.new_blocks = [entry for entry in plan.new_blocks if entry[0] is not request]

    def give_back(self, plan: StepPlan) -> None:
        """Undo a plan that could not be launched: its requests wait, to be computed anew."""
        for request in plan.requests:
            if request.row >= 0:
                self._put_back(request)

    def isolate(self, suspects: list[Request]) -> None:
        """From now on these run alone, each until it has a new token or ends; all others wait."""
        for request in list(self.running):
            self._put_back(request)
        self.suspects = list(suspects)

    def _may_run(self, request: Request) -> bool:
        return not self.suspects or request is self.suspects[0]

    def _clear_suspects(self) -> None:
        while self.suspects and not self.suspects[0].num_failures:
            cleared = self.suspects.pop(0)
            if cleared.row >= 0:
                self._put_back(cleared)

    def _put_back(self, request: Request) -> None:
        self._release(request)
        self.add(request)

    def _give_up_blocks(self, request: Request, plan: StepPlan) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        plan.new_blocks = [entry for entry in plan.new_blocks if entry[0] is not request]

    def finish(self, request: Request) -> None:
        """Give back what an ended or aborted request holds, wherever it stands."""
        self.suspects = [each for each in self.suspects if each is not request]
        if request.row >= 0:
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self._unpin_adapter(request)
        self.pool.release(request.blocks)
        request.blocks = []
        self._free_rows.append(request.row)
        self._unwritten_blocks = [e for e in self._unwritten_blocks if e[0] is not request]
        request.row = -1

    def check_integrity(self) -> None:
        """Blocks and rows are each held once. Raises AssertionError with the numbers."""
        self.pool.check_integrity(request.blocks for request in self.running)
        rows = sorted(self._free_rows + [request.row for request in self.running])
        if rows != list(range(len(rows))):
            raise AssertionError(f"state rows held other than once: {rows}")
