"""Launches what the scheduler planned: picks the graph, replays it, and copies the results back."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.outputs import StepRecord
from specdec.request import Request
from specdec.scheduler import PrefillChunk
from specdec.step import DecodeStep
from specdec.verifier.attention.base import AttentionMetadata
from specdec.verifier.batch import PassResult, PendingResult, PrefillBatch
from specdec.verifier.capture import CaptureError
from specdec.verifier.context import set_forward_context
from specdec.verifier.dispatcher import CudagraphDispatcher
from specdec.verifier.graph import CUDAGraphWrapper, GraphPool, GraphRow
from specdec.verifier.modes import BatchDescriptor, CUDAGraphMode, GraphKey
from specdec.verifier.state import RowState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pass:
    """One kind of uniform pass: what it runs, its graphs, and which of them exist."""

    role: str
    run: Callable[[int, int, bool], PassResult | Tensor]
    wrapper: CUDAGraphWrapper
    dispatcher: CudagraphDispatcher


class Runner:
    """The device side of an engine."""

    def __init__(
        self,
        step: DecodeStep,
        *,
        mode: CUDAGraphMode,
        query_lens: Sequence[int],
        max_num_seqs: int,
        capture_sizes: Sequence[int] | None,
        request_counts: Sequence[int] | None,
        debug: bool = False,
    ) -> None:
        self.step = step
        self.state = step.state
        self.device = step.state.device
        self._rows_in_slots: list[int] = []
        self._pool = GraphPool(self.device)
        drafter = step.drafter
        self._host_drafts = drafter is not None and not drafter.capturable
        self._full = mode.has_mode(CUDAGraphMode.FULL)

        def make(role: str, run: Callable, lens: Sequence[int], sizes: Sequence[int] | None):
            dispatcher = CudagraphDispatcher(max_num_seqs=max_num_seqs)
            dispatcher.initialize_cudagraph_keys(
                mode,
                capture_sizes=sizes,
                uniform_query_lens=tuple(lens),
                uniform_request_counts=request_counts,
            )
            wrapper = CUDAGraphWrapper(
                run, CUDAGraphMode.FULL, role=role, pool=self._pool, debug=debug
            )
            return _Pass(role, run, wrapper, dispatcher)

        if self._host_drafts:
            self._decode = make("target", step.verify, query_lens, capture_sizes)
        else:
            self._decode = make("step", step.decode, query_lens, capture_sizes)
        self._catch_up: _Pass | None = None
        if drafter is not None and drafter.catchup_width:
            width = drafter.catchup_width
            self._catch_up = make("draft_catchup", step.catch_up, [width], None)

    # -- capture ----------------------------------------------------------------------------------

    @property
    def passes(self) -> list[_Pass]:
        return [self._decode] + ([self._catch_up] if self._catch_up else [])

    @torch.inference_mode()
    def capture_all(self, on_key: Callable[[str, BatchDescriptor], None] | None = None) -> None:
        """Capture every greedy key of every table, largest first."""
        with self._pool.capture_window():
            for each in self.passes:
                for _, descriptor in each.dispatcher.capture_list():
                    if on_key is not None:
                        on_key(each.role, descriptor)
                    self._capture(each, descriptor, "greedy")

    def _capture(self, each: _Pass, descriptor: BatchDescriptor, variant: str) -> None:
        """Run a batch of padding once eagerly, so that all first uses are over, then capture it."""
        live = self._rows_in_slots
        self._fill_slots([])
        arguments = (descriptor.num_reqs, descriptor.query_len - 1, variant == "sampled")
        try:
            with self._pool.capture_window():
                for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL):
                    with (
                        self._pool.stream(),
                        set_forward_context(
                            cudagraph_runtime_mode=mode,
                            batch_descriptor=descriptor,
                            variant=variant,
                        ),
                    ):
                        each.wrapper(*arguments)
        except CaptureError as error:
            logger.warning("%s; such batches take the next larger graph, or none", error)
            each.dispatcher.remove_key(CUDAGraphMode.FULL, descriptor, str(error))
        self._fill_slots(live)

    def graph_table(self) -> list[GraphRow]:
        return [row for each in self.passes for row in each.wrapper.table()]

    def install(self, request: Request) -> None:
        """Write a request's state row."""
        params = request.params
        self.state.write_row(
            request.row,
            request.token_ids,
            {
                "end": request.end,
                "k": request.k,
                "prompt_len": len(request.prompt_ids),
                "draft_len": request.num_cached,
                "top_k": params.top_k or 0,
                "seed": request.seed,
                "coupled": request.coupled,
            },
            {
                "temperature": params.temperature,
                "top_p": params.top_p,
                "min_p": params.min_p,
            },
        )
        self.state.write_rules(
            request.row,
            bias=dict(params.logit_bias or {}),
            penalties=[
                params.presence_penalty,
                params.frequency_penalty,
                math.log(params.repetition_penalty),
            ],
            min_tokens=params.min_tokens,
            stop_ids=sorted(request.stop_ids) if params.min_tokens else [],
            bad_words=request.bad_words,
        )

    def release(self) -> None:
        """Let go of the graphs and their memory."""
        for each in self.passes:
            each.wrapper.clear()

    # -- steps ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(
        self,
        rows: list[int],
        k: int,
        *,
        sampled: bool,
        catch_up_passes: int,
        with_logprobs: bool,
    ) -> tuple[PendingResult, StepRecord]:
        """Launch one uniform pass over these state rows."""
        self._fill_slots(rows)
        if self._catch_up is not None and k > 0:
            for _ in range(catch_up_passes):
                self._run(self._catch_up, len(rows), self._catch_up_k, sampled=False)
        if self._host_drafts and k > 0:
            self._draft_on_host(len(rows), k, sampled)
        result, record = self._run(self._decode, len(rows), k, sampled=sampled)
        assert isinstance(result, PassResult)
        return PendingResult(result, len(rows), with_logprobs=with_logprobs), record

    @torch.inference_mode()
    def prefill(
        self, chunks: list[PrefillChunk], *, sampled: bool, with_logprobs: bool
    ) -> tuple[PendingResult | None, StepRecord]:
        """Launch one flattened pass over chunks of prompts."""
        batch = self._prefill_batch(chunks, sampled)
        num_tokens = batch.input_ids.shape[0]
        descriptor = BatchDescriptor(num_tokens, len(chunks))
        with set_forward_context(
            cudagraph_runtime_mode=CUDAGraphMode.NONE, batch_descriptor=descriptor
        ):
            result = self.step.prefill(batch)
        record = StepRecord(
            mode=CUDAGraphMode.NONE.name,
            descriptor=descriptor,
            num_reqs=len(chunks),
            num_tokens=num_tokens,
            k=0,
            reason="prefill",
        )
        if result is None:
            return None, record
        num_reqs = result.packed.shape[0]
        return PendingResult(result, num_reqs, with_logprobs=with_logprobs), record

    @property
    def _catch_up_k(self) -> int:
        assert self.step.drafter is not None
        return self.step.drafter.catchup_width - 1

    def _run(
        self, each: _Pass, num_reqs: int, k: int, *, sampled: bool
    ) -> tuple[PassResult | Tensor, StepRecord]:
        live = BatchDescriptor(num_reqs * (1 + k), num_reqs, uniform=True)
        variant = "sampled" if sampled else "greedy"
        mode, padded = each.dispatcher.dispatch(live)
        while mode is CUDAGraphMode.FULL and not each.wrapper.has_graph(
            GraphKey(each.role, padded, variant)
        ):
            self._capture(each, padded, variant)
            mode, padded = each.dispatcher.dispatch(live)
        with set_forward_context(
            cudagraph_runtime_mode=mode, batch_descriptor=padded, variant=variant
        ):
            result = each.wrapper(padded.num_reqs, k, sampled)
        reason = None if mode is CUDAGraphMode.FULL else each.dispatcher.explain(live)
        return result, StepRecord(mode.name, padded, num_reqs, live.num_tokens, k, reason)

    def _draft_on_host(self, num_reqs: int, k: int, sampled: bool) -> None:
        """Ask a drafter that cannot be captured, and put what it says where the graph reads it."""
        drafter = self.step.drafter
        assert drafter is not None
        self.step.set_host_draft(num_reqs, k, drafter.propose(self.step.rows(num_reqs, sampled), k))

    def _fill_slots(self, rows: list[int]) -> None:
        """Name the batch's state rows; all further batch rows are padding."""
        if rows == self._rows_in_slots:
            return
        padding = [self.state.dump_row] * (self.step.slots.shape[0] - len(rows))
        self.step.slots.copy_(self._upload(rows + padding, torch.int64), non_blocking=True)
        self._rows_in_slots = rows

    def _upload(self, values: list, dtype: torch.dtype) -> Tensor:
        host = torch.tensor(values, dtype=dtype)
        if self.device.type != "cuda":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    def _prefill_batch(self, chunks: list[PrefillChunk], sampled: bool) -> PrefillBatch:
        ids: list[int] = []
        positions: list[int] = []
        request_of_token: list[int] = []
        starts = [0]
        for number, chunk in enumerate(chunks):
            ids += chunk.request.token_ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            request_of_token += [number] * (chunk.end - chunk.start)
            starts.append(len(ids))
        upload = self._upload
        rows = RowState(self.state, upload([c.request.row for c in chunks], torch.int64), sampled)
        position = upload(positions, torch.int64)
        block_size = self.state.block_size
        block_of_token = rows.block_table[
            upload(request_of_token, torch.int64), position // block_size
        ]
        ends = upload([chunk.end for chunk in chunks], torch.int64)
        metadata = AttentionMetadata(
            query_start_loc=upload(starts, torch.int32),
            context_lens=upload([chunk.start for chunk in chunks], torch.int32),
            seq_lens=ends.int(),
            block_table=rows.block_table,
            slot_mapping=block_of_token.long() * block_size + position % block_size,
            max_query_len=max(chunk.end - chunk.start for chunk in chunks),
            uniform=False,
        )
        sampling = [number for number, chunk in enumerate(chunks) if chunk.samples]
        sampling_rows = None
        if sampling:
            slots = upload([chunks[number].request.row for number in sampling], torch.int64)
            sampling_rows = RowState(self.state, slots, sampled)
        return PrefillBatch(
            rows=rows,
            input_ids=upload(ids, torch.int64),
            positions=position,
            metadata=metadata,
            ends=ends,
            sampling_rows=sampling_rows,
            last_token_rows=upload([starts[n + 1] - 1 for n in sampling], torch.int64),
        )
