"""The graphs of one engine: what each pass runs, which graphs exist, and how they are captured."""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.graph_keys import CaptureKey, PassOutput, UniformPass, groups_of
from specdec.outputs import StepRecord
from specdec.verifier.capture import CaptureError
from specdec.verifier.context import set_forward_context
from specdec.verifier.dispatcher import CudagraphDispatcher
from specdec.verifier.flat_model import FlatModel
from specdec.verifier.graph import CUDAGraphWrapper, GraphPool, GraphRow
from specdec.verifier.modes import BatchDescriptor, CUDAGraphMode, GraphKey
from specdec.verifier.planner import keys_that_fit

logger = logging.getLogger(__name__)

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


class Progress(Protocol):
    """Follows the captures of an engine's start-up."""

    def __call__(self, done: int, total: int, name: str) -> None: ...


class EngineGraphs:
    """Captures the graphs of an engine, and runs each batch on the one that fits it."""

    def __init__(
        self,
        *,
        pool: GraphPool,
        flat: FlatModel,
        dispatcher: CudagraphDispatcher,
        park: Callable[[], Callable[[], None]],
        memory_limit: int | None = None,
        debug: bool = False,
        verify_state: Sequence[Tensor] | None = None,
        largest: Callable[[int], int] = int,
    ) -> None:
        """
        dispatcher: of the decode pass and of flattened batches.
        park: makes every batch row one of padding, and returns what puts the rows back.
        memory_limit: bytes that start-up captures may take; None is what the device has free.
        verify_state: what the passes both read and write; each graph's first replay is compared.
        largest: the largest of all ranks' numbers, which must have the same graphs.
        """
        self.pool = pool
        self.flat = flat
        self.dispatcher = dispatcher
        self.passes: list[UniformPass] = []
        self._park = park
        self._memory_limit = memory_limit
        self._debug = debug
        self._verify_state = verify_state
        self._largest = largest

    def add_pass(
        self,
        role: str,
        run: Callable[..., PassOutput],
        dispatcher: CudagraphDispatcher,
        *,
        reads_adapters: bool = True,
        at_start: bool = True,
        round_variants: tuple[str, ...] = (),
    ) -> UniformPass:
        wrapper = CUDAGraphWrapper(
            run,
            FULL,
            role=role,
            pool=self.pool,
            debug=self._debug,
            verify_state=self._verify_state,
        )
        added = UniformPass(
            role, run, wrapper, dispatcher, reads_adapters, at_start, round_variants
        )
        self.passes.append(added)
        return added

    # -- running ----------------------------------------------------------------------------------

    def run(
        self,
        each: UniformPass,
        num_reqs: int,
        k: int,
        *,
        sampled: bool,
        has_lora: bool,
        rounds: int = 1,
    ) -> tuple[PassOutput, StepRecord]:
        """Run a uniform batch, padded to its graph where there is one, and say which it took.

        Without a graph of so many ``rounds`` it runs one.
        """
        has_lora = has_lora and each.reads_adapters
        live = BatchDescriptor(num_reqs * (1 + k), num_reqs, True, has_lora)
        variant = "sampled" if sampled else "greedy"
        mode, padded = self._dispatch(each, live, variant, rounds)
        rounds_reason = None
        if rounds > 1 and mode is NONE:
            rounds_reason = self.explain(live, each.dispatcher, rounds)
            rounds = 1
            mode, padded = self._dispatch(each, live, variant)
        whole = mode is FULL and padded.uniform
        with set_forward_context(
            cudagraph_runtime_mode=mode, batch_descriptor=padded, variant=variant, rounds=rounds
        ):
            if whole:
                result = each.wrapper(*_arguments(padded, sampled, rounds))
            else:
                # Only the model may be in a graph: of a flattened batch, or in pieces.
                result = each.run(num_reqs, k, sampled, has_lora)
        reason = None if mode is FULL else self.explain(live, each.dispatcher)
        record = StepRecord(
            mode.name, padded, num_reqs, live.num_tokens, k, reason, rounds, rounds_reason
        )
        return result, record

    def dispatch_flat(self, batch: BatchDescriptor) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """The mode and padded shape of a flattened batch, whose graph exists afterwards."""
        assert not batch.uniform
        return self._dispatch(None, batch, "greedy")

    def explain(
        self,
        batch: BatchDescriptor,
        dispatcher: CudagraphDispatcher | None = None,
        rounds: int = 1,
    ) -> str | None:
        """Why a batch got no FULL graph, and why no PIECEWISE one where it might have had one."""
        dispatcher = dispatcher or self.dispatcher
        forbidden = self.flat.model.attention_backend.forbids_full(batch)
        if forbidden is None:
            return dispatcher.explain(batch, rounds=rounds)
        return dispatcher.explain(batch, rounds=rounds, allow_full=False, forbidden=forbidden)

    def _dispatch(
        self,
        each: UniformPass | None,
        live: BatchDescriptor,
        variant: str,
        rounds: int = 1,
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """Dispatch, capturing what is missing; a key whose capture fails is not tried again."""
        dispatcher = self.dispatcher if each is None else each.dispatcher
        allow_full = self.flat.model.attention_backend.forbids_full(live) is None
        while True:
            mode, padded = dispatcher.dispatch(live, allow_full=allow_full, rounds=rounds)
            if mode is NONE:
                return mode, padded
            of = each if padded.uniform else None
            key = CaptureKey(of, mode, padded, rounds)
            if self._has_graph(key, variant) or self._capture(key, variant):
                return mode, padded

    # -- capture ----------------------------------------------------------------------------------

    def capture_all(self, progress: Progress | None = None) -> None:
        """Capture every greedy key that has no graph yet, largest first, within the limit.

        Raises ValueError where the widest graphs alone are over it.
        """
        keys = self._missing()
        groups = groups_of([key for key in keys if key.rounds == 1])
        taken: dict[CaptureKey, int] = {}
        done = 0

        def capture(key: CaptureKey) -> int:
            nonlocal done
            if progress is not None:
                progress(done, len(keys), str(key))
            done += 1
            before = self._num_bytes(key)
            for variant in key.variants:
                if not self._capture(key, variant):
                    break
            taken[key] = self._largest(self._num_bytes(key) - before)
            return taken[key]

        with self.pool.capture_window():
            limit = self._limit()
            for group in groups:
                group.probed = [capture(key) for key in group.probes]
            for group, kept in zip(groups, keys_that_fit(groups, limit), strict=True):
                for key in group.rest:
                    if key in kept:
                        capture(key)
                    else:
                        self._remove(key, _no_room(limit, key))
            # Batches without a graph of several rounds take one round, so these come last.
            for key in keys:
                if key.rounds > 1:
                    expected = len(key.variants) * key.rounds * self._bytes_of_one_round(key)
                    if limit is None or sum(taken.values()) + expected <= limit:
                        capture(key)
                    else:
                        self._remove(key, _no_room(limit, key))
        if progress is not None:
            progress(len(keys), len(keys), "done")

    def capture_rounds(
        self, each: UniformPass, sizes: Collection[int], why: str, progress: Progress | None
    ) -> None:
        """Capture a pass's graphs of several rounds for these numbers of requests, for no others.

        ``why`` the others have none. Sampled ones are captured too: no batch is to wait for
        several rounds at once. Under a memory limit none are: nobody has measured what sampled
        ones take, which is more.
        """
        if self._memory_limit is not None:
            sizes, why = (), "auto: graph_memory_limit is set"
        for rounds in each.dispatcher.rounds:
            for mode, shape in each.dispatcher.capture_list(rounds):
                if shape.num_reqs not in sizes:
                    each.dispatcher.remove_key(mode, shape, why, rounds)
        each.round_variants = ("greedy", "sampled")
        self.capture_all(progress)

    @staticmethod
    def round_sizes(each: UniformPass) -> list[int]:
        """Numbers of requests that a pass's graphs of several rounds are planned or there for."""
        of = each.dispatcher
        shapes = [shape for rounds in of.rounds for _, shape in of.capture_list(rounds)]
        return sorted({shape.num_reqs for shape in shapes})

    @torch.inference_mode()
    def enable_lora(self, num_slots: int) -> None:
        """From now on batches with adapters have graphs of their own, beside those without."""
        self.flat.enable_lora(num_slots)
        own = {id(each.dispatcher): each.dispatcher for each in self.passes if each.reads_adapters}
        for dispatcher in own.values():
            dispatcher.add_lora_keys()

    def table(self) -> list[GraphRow]:
        return self.flat.table() + [row for each in self.passes for row in each.wrapper.table()]

    def forget_replays(self) -> None:
        """Those of the start-up, which warm up and time, are no traffic."""
        self.flat.forget_replays()
        for each in self.passes:
            each.wrapper.forget_replays()

    def clear(self) -> None:
        self.flat.clear()
        for each in self.passes:
            each.wrapper.clear()

    def _missing(self) -> list[CaptureKey]:
        """Keys to capture at start-up: PIECEWISE before FULL, largest first."""
        mixed = self.dispatcher.capture_list() if self.pool.device.type == "cuda" else []
        keys = [CaptureKey(None, mode, shape) for mode, shape in mixed if not shape.uniform]
        keys += [
            CaptureKey(each, mode, shape)
            for each in self.passes
            if each.at_start
            for mode, shape in each.dispatcher.capture_list()
            if shape.uniform
        ]
        keys += [
            CaptureKey(each, mode, shape, rounds)
            for each in self.passes
            if each.round_variants
            for rounds in each.dispatcher.rounds
            for mode, shape in each.dispatcher.capture_list(rounds)
        ]
        return [key for key in keys if not self._has_graph(key, "greedy")]

    def _limit(self) -> int | None:
        if self._memory_limit is not None or self.pool.device.type != "cuda":
            return self._memory_limit
        # A tenth stays free for what steps allocate outside of graphs.
        free, _ = torch.cuda.mem_get_info(self.pool.device)
        return -self._largest(-int(0.9 * free))

    def _has_graph(self, key: CaptureKey, variant: str) -> bool:
        if key.of is None:
            return self.flat.has_graph(key.mode, key.descriptor)
        graph = GraphKey(key.of.role, key.descriptor, variant, key.rounds)
        return key.of.wrapper.has_graph(graph)

    def _num_bytes(self, key: CaptureKey) -> int:
        table = self.flat.table() if key.of is None else key.of.wrapper.table()
        return sum(row.num_bytes for row in table)

    def _bytes_of_one_round(self, key: CaptureKey) -> int:
        """Of the graph that ``key``, of several rounds, repeats."""
        assert key.of is not None
        table = key.of.wrapper.table()
        wanted = key.descriptor, 1, "greedy"
        return self._largest(
            sum(
                row.num_bytes
                for row in table
                if (row.descriptor, row.rounds, row.variant) == wanted
            )
        )

    def _remove(self, key: CaptureKey, reason: str) -> None:
        dispatcher = self.dispatcher if key.of is None else key.of.dispatcher
        shape = self._dispatcher_key(key, dispatcher)
        dispatcher.remove_key(key.mode, shape, reason, key.rounds)

    @staticmethod
    def _dispatcher_key(key: CaptureKey, dispatcher: CudagraphDispatcher) -> BatchDescriptor:
        """A PIECEWISE batch keeps its own number of requests; the dispatcher lists the most."""
        if key.mode is not PIECEWISE:
            return key.descriptor
        num_tokens = key.descriptor.num_tokens
        return key.descriptor._replace(num_reqs=min(num_tokens, dispatcher.max_num_seqs))

    def _capture(self, key: CaptureKey, variant: str) -> bool:
        """Capture one key; False where that fails, and then the key is gone."""
        unpark = self._park()
        failure = ""
        try:
            with self.pool.capture_window():
                if key.of is None:
                    self.flat.capture(key.mode, self._dispatcher_key(key, self.dispatcher))
                else:
                    self._capture_pass(key.of, key.descriptor, variant, key.rounds)
        except (CaptureError, torch.OutOfMemoryError) as error:
            failure = str(error)
        finally:
            unpark()
        if not self._largest(bool(failure)):
            return True
        failure = failure or f"{key}: another rank could not capture it"
        others = "one of one round" if key.rounds > 1 else "none"
        logger.warning("%s; such batches take the next larger graph, or %s", failure, others)
        self._remove(key, failure)
        return False

    def _capture_pass(
        self, each: UniformPass, descriptor: BatchDescriptor, variant: str, rounds: int
    ) -> None:
        """Run a batch of padding once eagerly, so that all first uses are over, then capture it."""
        arguments = _arguments(descriptor, variant == "sampled", rounds)
        for mode in (NONE, FULL):
            with (
                self.pool.stream(),
                set_forward_context(
                    cudagraph_runtime_mode=mode,
                    batch_descriptor=descriptor,
                    variant=variant,
                    rounds=rounds,
                ),
            ):
                each.wrapper(*arguments)


def _no_room(limit: int | None, key: CaptureKey) -> str:
    return f"graph_memory_limit {limit} has no room for {key}"


def _arguments(shape: BatchDescriptor, sampled: bool, rounds: int) -> tuple[int | bool, ...]:
    """What a pass is called with for a uniform batch."""
    arguments = (shape.num_reqs, shape.query_len - 1, sampled, shape.has_lora)
    return arguments if rounds == 1 else (*arguments, rounds)


def uniform_only(mode: CUDAGraphMode) -> CUDAGraphMode:
    """The mode of a pass that no flattened batch takes."""
    return CUDAGraphMode.FULL_DECODE_ONLY if mode.decode_mode() is FULL else NONE
