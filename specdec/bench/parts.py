"""The parts of a step, each timed alone: an engine's own graphs over rows written by hand.

*Draft* and *verify* (target forward with head, acceptance and state advance) are graphs of their
own roles, replayed between two events; *accept* (acceptance and state advance alone) is the mean of
a chain. What the whole step takes beyond draft and verify is not theirs: the sum need not be exact.
"""

import statistics
import time
from collections.abc import Callable

import torch

from specdec.engine import Engine
from specdec.verifier.passes import accept_and_commit

ACCEPT_CHAIN = 20
# Cycles for which the device is kept busy, so that what is timed is enqueued as a whole.
SLEEP_CYCLES = 400_000


class PartTimer:
    """Times the passes of an engine that runs no request meanwhile."""

    def __init__(self, engine: Engine, replays: int) -> None:
        self.engine = engine
        self.replays = replays
        self.runner = engine._runner
        self.step = engine._runner.step
        self.on_gpu = engine.device.type == "cuda"
        self._saved = self.runner.state.ints.clone()
        self._context = 0

    def most_context(self, num_reqs: int, k: int) -> int:
        """Committed tokens that each of ``num_reqs`` rows can have and still run a step of k."""
        state = self.runner.state
        of_pool = self.step.kv_cache.num_blocks // num_reqs * state.block_size
        return min(state.max_model_len, of_pool) - 1 - k

    @torch.inference_mode()
    def rows_at(self, num_reqs: int, context: int, k: int, temperature: float = 0.0) -> None:
        """``num_reqs`` rows with ``context`` committed tokens, blocks of their own and room.

        Raises ValueError where the pool has no such room.
        """
        state = self.runner.state
        # A chain of acceptances writes no KV; a step writes 1 + k tokens.
        width = -(-(context + 1 + k) // state.block_size)
        if (
            num_reqs * width > self.step.kv_cache.num_blocks
            or context + 1 + k > state.max_model_len
        ):
            raise ValueError(f"no room for {num_reqs} rows of {context} tokens")
        generator = torch.Generator().manual_seed(0)
        for row in range(num_reqs):
            ids = torch.randint(self.step.vocab_size, (context,), generator=generator).tolist()
            state.write_blocks([(row, 0, list(range(row * width, (row + 1) * width)))])
            fields = {
                "end": state.max_model_len,
                "k": k,
                "prompt_len": context - 1,
                "draft_len": context - 1,
                "seed": row,
            }
            state.write_row(row, ids, fields, {"temperature": temperature, "top_p": 1.0})
            state.write_rules(
                row, bias={}, penalties=[0.0] * 3, min_tokens=0, stop_ids=[], bad_words=[]
            )
        self.runner._fill_slots(list(range(num_reqs)))
        self.step.draft_ids.fill_(1)
        self._context = context
        self._saved = state.ints.clone()

    def ms(self, run: Callable[[], object], calls: int = 1) -> float:
        """Median milliseconds of one call, every time from the same state."""
        state = self.runner.state
        for _ in range(2 if self.on_gpu else 1):
            state.ints.copy_(self._saved)
            run()
        times = []
        if not self.on_gpu:
            for _ in range(self.replays):
                state.ints.copy_(self._saved)
                started = time.perf_counter()
                run()
                times.append(1e3 * (time.perf_counter() - started))
            return statistics.median(times) / calls
        pairs = []
        for _ in range(self.replays):
            state.ints.copy_(self._saved)
            torch.cuda._sleep(SLEEP_CYCLES)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs) / calls

    @torch.inference_mode()
    def pass_ms(self, role: str, num_reqs: int, k: int, *, sampled: bool = False) -> float | None:
        """The pass of a role ("step", "target", "draft_decode"); None where there is none."""
        graphs = self.runner._graphs
        each = next((each for each in graphs.passes if each.role == role), None)
        if each is None:
            return None
        return self.ms(lambda: graphs.run(each, num_reqs, k, sampled=sampled, has_lora=False))

    @torch.inference_mode()
    def accept_ms(self, num_reqs: int, k: int) -> float:
        """Acceptance and state advance on given tokens, greedy: up to twenty in a chain."""
        device = self.engine.device
        targets = torch.ones(num_reqs, 1 + k, dtype=torch.int64, device=device)
        finite = torch.ones(num_reqs, 1 + k, dtype=torch.bool, device=device)
        drafted = torch.full((num_reqs,), k, dtype=torch.int64, device=device)
        drafts = targets[:, 1:].contiguous()
        drafter = self.step.drafter
        # Every link advances the text, which must not run past its row.
        room = self.runner.state.max_model_len - self._context
        length = max(1, min(ACCEPT_CHAIN, room // (1 + k)))
        rows = self.step.rows(num_reqs, False)
        # What the passes before it have read anyway.
        known = [each.clone() for each in (rows.seq_lens, rows.remaining, rows.max_drafts)]
        table = rows.block_table

        def once() -> None:
            advanced = self.step.rows(num_reqs, False)
            advanced.remember(table, *known)
            _, accepted = accept_and_commit(
                advanced, targets, finite, drafts, drafted, self.step._rates
            )
            if drafter is not None and k:
                drafter.advance(advanced, accepted)

        def chain() -> None:
            for _ in range(length):
                once()

        if not self.on_gpu:
            return self.ms(chain, length)
        once()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        return self.ms(graph.replay, length)

    def parts(self, num_reqs: int, k: int, context: int) -> dict[str, float | None]:
        """Milliseconds of the whole step and its parts; ``draft`` is None where it is not one."""
        self.rows_at(num_reqs, context, k)
        return {
            "step": self.pass_ms("step", num_reqs, k),
            "draft": self.pass_ms("draft_decode", num_reqs, k) if k else 0.0,
            "verify": self.pass_ms("target", num_reqs, k),
            "accept": self.accept_ms(num_reqs, k),
        }
