"""Times an engine's graphs of decode steps by replay, at start-up: over rows written by hand."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from specdec.drafters.step_costs import CostKey, StepCosts, Timing
from specdec.graphs import EngineGraphs, UniformPass
from specdec.step import DecodeStep

# Tokens of context at which graphs are timed, where texts and the pool are that long.
SHORT_CONTEXT, LONG_CONTEXT = 128, 4096
# Of these replays the first is not counted: it runs while the host enqueues the others.
REPLAYS = {"cuda": 3, "cpu": 2}


class StepTimer:
    """For an engine without requests: it writes state rows and KV anywhere, and clears the rows."""

    def __init__(
        self,
        graphs: EngineGraphs,
        step: DecodeStep,
        *,
        decode: UniformPass,
        catch_up: UniformPass | None,
        ks: Sequence[int],
        num_adapter_slots: int,
        fill_slots: Callable[[list[int]], None],
    ) -> None:
        """
        decode: the pass of whole steps. ks: the drafts that it has graphs for.
        catch_up: the pass in which a drafter reads tokens that it lacks.
        fill_slots: makes state rows the rows of the batch.
        """
        self._graphs = graphs
        self._step = step
        self._state = step.state
        self._decode = decode
        self._catch_up = catch_up
        self._ks = ks
        self._num_adapter_slots = num_adapter_slots
        self._fill_slots = fill_slots
        self._num_blocks = step.kv_cache.num_blocks

    def costs(self) -> StepCosts:
        """Of every k, number of requests and kind of rows that has a graph."""
        width = 0
        catch_up: dict[CostKey, Timing] = {}
        with self._clean_state():
            steps = {
                key: self._timing(self._decode, key)
                for size, has_lora in self._sizes()
                for key in [CostKey(size, k, has_lora) for k in self._ks]
            }
            if self._catch_up is not None and self._step.drafter is not None:
                width = self._step.drafter.catchup_width
                for size, has_lora in self._sizes():
                    if self._catch_up.reads_adapters or not has_lora:
                        key = CostKey(size, width - 1, has_lora)
                        timing = self._timing(self._catch_up, key, lag=width)
                        catch_up[key._replace(k=0)] = timing
        return StepCosts(steps, catch_up, width)

    def round_seconds(self, sizes: Sequence[int], costs: StepCosts | None) -> dict[int, float]:
        """Of one round, by number of requests: what the host's work is held against.

        With the widest drafts, or any where the engine chooses (whose ``costs`` are known then).
        """
        if costs is not None:
            return {
                size: min(costs.timing(size, k).short_seconds for k in self._ks) for size in sizes
            }
        keys = {size: CostKey(size, self._ks[-1]) for size in sizes}
        with self._clean_state():
            return {
                size: self._seconds(self._decode, key, self._context(key, SHORT_CONTEXT))
                for size, key in keys.items()
            }

    def _sizes(self) -> list[tuple[int, bool]]:
        """Requests and kind of rows; without any graph, of one request and of as many as can be."""
        shapes = [shape for _, shape in self._decode.dispatcher.capture_list()]
        sizes = {(shape.num_reqs, shape.has_lora) for shape in shapes if shape.uniform}
        return sorted(sizes or {(1, False), (self._state.max_num_seqs, False)})

    def _timing(self, each: UniformPass, key: CostKey, lag: int = 0) -> Timing:
        short, long = (self._context(key, length) for length in (SHORT_CONTEXT, LONG_CONTEXT))
        seconds = self._seconds(each, key, short, lag)
        return Timing(
            short, seconds, long, self._seconds(each, key, long, lag) if long > short else seconds
        )

    def _context(self, key: CostKey, wanted: int) -> int:
        """``wanted`` tokens, or as many as a row may have and the pool holds for every row."""
        room = self._num_blocks // key.num_reqs * self._state.block_size
        return max(min(wanted, room - 1 - key.k, self._state.max_model_len - 1 - key.k), 1)

    def _seconds(self, each: UniformPass, key: CostKey, context: int, lag: int = 0) -> float:
        self._write_rows(key, context, lag)
        saved = self._state.ints.clone()

        def replay() -> None:
            self._graphs.run(each, key.num_reqs, key.k, sampled=False, has_lora=key.has_lora)

        def restore() -> None:
            self._state.ints.copy_(saved)

        count = REPLAYS[self._state.device.type]
        if self._state.device.type == "cuda":
            return min(_device_seconds(replay, restore, count)[1:])
        return min(_host_seconds(replay, restore, count)[1:])

    def _write_rows(self, key: CostKey, context: int, lag: int) -> None:
        """Rows of ``context`` committed tokens, whose drafter has not read the last ``lag``."""
        state, rows = self._state, slice(0, key.num_reqs)
        width = min(
            -(-(context + 1 + key.k) // state.block_size),
            state.block_table.shape[1],
        )
        blocks = torch.arange(key.num_reqs * width, device=state.device) % self._num_blocks
        state.block_table[rows, :width] = blocks.view(key.num_reqs, width).int()
        # Token ids that repeat seldom: a lookup finds what it finds in ordinary text.
        vocab_size = self._step.vocab_size
        ids = torch.arange(context, device=state.device) * 7919 % vocab_size
        state.tokens[rows, :context] = ids.int()
        values = {
            "seq_len": context,
            "end": state.max_model_len,
            "k": key.k,
            "prompt_len": context,
            "draft_len": max(context - 1 - lag, 0),
        }
        for name, value in values.items():
            state.column(name)[rows] = value
        slots = torch.arange(key.num_reqs, device=state.device) % max(self._num_adapter_slots, 1)
        state.column("adapter")[rows] = slots if key.has_lora else -1
        self._fill_slots(list(range(key.num_reqs)))

    @contextmanager
    def _clean_state(self) -> Iterator[None]:
        """Leaves every row as it is before the first request."""
        state = self._state
        with torch.inference_mode():
            # What a drafter on the host would have put there.
            self._step.draft_ids.fill_(0)
            try:
                yield
            finally:
                self._step.draft_ids.fill_(-1)
                self._fill_slots([])
                for tensor in (*self._step.changing_tensors, state.block_table):
                    tensor.zero_()
                state.column("adapter").fill_(-1)


def _device_seconds(
    replay: Callable[[], None], restore: Callable[[], None], count: int
) -> list[float]:
    pairs = []
    for _ in range(count):
        restore()
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        replay()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def _host_seconds(
    replay: Callable[[], None], restore: Callable[[], None], count: int
) -> list[float]:
    seconds = []
    for _ in range(count):
        restore()
        started = time.perf_counter()
        replay()
        seconds.append(time.perf_counter() - started)
    return seconds
