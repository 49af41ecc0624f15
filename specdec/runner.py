"""Launches what the scheduler planned: picks the graph, replays it, and copies the results back."""

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.drafters.base import Draft
from specdec.drafters.step_costs import StepCosts
from specdec.flatten import PromptChunk, flatten_chunks, padding_prompts, upload
from specdec.graphs import EngineGraphs, Progress, UniformPass, uniform_only
from specdec.outputs import StepRecord
from specdec.rows import RequestRow
from specdec.step import DecodeStep
from specdec.step_timing import StepTimer
from specdec.verifier.batch import PassResult, PendingResult, PrefillBatch
from specdec.verifier.context import set_forward_context
from specdec.verifier.dispatcher import CudagraphDispatcher
from specdec.verifier.flat_model import FlatModel
from specdec.verifier.graph import GraphRow
from specdec.verifier.modes import BatchDescriptor, CUDAGraphMode
from specdec.verifier.state import RowState
from specdec.verifier.tensor_tree import map_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What the rows of a step ask of its passes."""

    sampled: bool  # some row has a temperature, a logit rule, a format or asks for logprobs
    has_lora: bool
    with_logprobs: bool
    catch_up_passes: int  # that bring the drafter's KV up to date before it drafts


# More rows than the kernels for few rows take.
WARM_UP_TOKENS = 128


class Runner:
    """The device side of an engine."""

    def __init__(
        self,
        step: DecodeStep,
        flat: FlatModel,
        dispatcher: CudagraphDispatcher,
        *,
        mode: CUDAGraphMode,
        query_lens: Sequence[int],
        capture_sizes: Sequence[int] | None,
        request_counts: Sequence[int] | None,
        memory_limit: int | None = None,
        debug: bool = False,
        verify: bool = False,
        rounds_at_start: bool = False,
        largest: Callable[[int], int] = int,
        watch: Callable[[], None] | None = None,
        compare: Callable[[int, str], None] | None = None,
    ) -> None:
        """
        flat: the model that ``step`` calls, with the pool that all graphs share.
        dispatcher: of the decode pass and of batches with prompts; the others get their own.
        verify: compare each graph's first replay with an eager run.
        rounds_at_start: capture graphs of several rounds with the others, not on first use.
        largest: see ``EngineGraphs``.
        watch: called while results are waited for; raises where they will not come.
        compare: raises where other ranks have another number for what it is called with.
        """
        self.step = step
        self._ks = sorted({query_len - 1 for query_len in query_lens})
        self.state = step.state
        self.device = step.state.device
        self._rows_in_slots: list[int] = []
        self._watch = watch
        self._compare = compare
        drafter = step.drafter
        self._host_drafts = drafter is not None and not drafter.capturable
        self._graphs = EngineGraphs(
            pool=flat.pool,
            flat=flat,
            dispatcher=dispatcher,
            park=self._park,
            memory_limit=memory_limit,
            debug=debug,
            verify_state=step.changing_tensors if verify else None,
            largest=largest,
        )
        # A split step verifies on its own: captured on first use where steps are whole.
        self._verify = self._graphs.add_pass(
            "target", step.verify, dispatcher, at_start=self._host_drafts
        )
        self._decode = self._verify
        if not self._host_drafts:
            self._decode = self._graphs.add_pass(
                "step",
                step.decode,
                dispatcher,
                round_variants=("greedy",) if rounds_at_start else (),
            )

        drafts_adapted = bool(getattr(drafter, "uses_adapters", False))

        def add(
            role: str, run: Callable, lens: Sequence[int], sizes: Sequence[int] | None
        ) -> UniformPass:
            own = CudagraphDispatcher(max_num_seqs=dispatcher.max_num_seqs)
            # Without it these passes run, on no graph: attention may support single tokens alone.
            if max(query_lens) > 1:
                own.initialize_cudagraph_keys(
                    uniform_only(mode),
                    capture_sizes=sizes,
                    uniform_query_lens=tuple(lens),
                    uniform_request_counts=request_counts,
                )
            return self._graphs.add_pass(role, run, own, reads_adapters=drafts_adapted)

        self._catch_up: UniformPass | None = None
        if drafter is not None and drafter.catchup_width:
            self._catch_up = add("draft_catchup", step.catch_up, [drafter.catchup_width], None)
        self._draft_pass: UniformPass | None = None
        drafting = [query_len for query_len in query_lens if query_len > 1]
        if drafter is not None and drafter.capturable and step.draft_ids.shape[1]:
            self._draft_pass = add("draft_decode", step.draft, drafting, capture_sizes)

    @torch.inference_mode()
    def capture_all(self, progress: Progress | None = None) -> None:
        """Capture every greedy key of every table that has no graph yet, largest first."""
        if self.device.type == "cuda":
            self.warm_up()
        self._graphs.capture_all(progress)
        self.warm_up_pieces()

    @torch.inference_mode()
    def warm_up_pieces(self) -> None:
        """Where batches run in pieces: between them one request's attention is another kernel."""
        if self._graphs.dispatcher.mode.decode_mode() is CUDAGraphMode.PIECEWISE:
            self._fill_slots([])
            for k in self._ks:
                self._graphs.run(self._decode, 1, k, sampled=False, has_lora=False)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run batches of padding, so that traffic finds every kernel compiled.

        Kernels are compiled per power of two of requests, and for few and for many tokens.
        """
        num_reqs, most = 1, self.step.slots.shape[0]
        self._fill_slots([])
        while True:
            for num_tokens in sorted({num_reqs, max(num_reqs, WARM_UP_TOKENS)}):
                prompts = padding_prompts(self.state, num_reqs, num_tokens)
                self._warm_up_mixed(prompts, None, 0)
                for k in self._ks:
                    self._warm_up_mixed(prompts, self.step.rows(num_reqs, False), k)
            for each in self._graphs.passes:
                for k in [self.catchup_width - 1] if each is self._catch_up else self._ks:
                    if k > 0 or each is not self._draft_pass:
                        with set_forward_context():
                            each.run(num_reqs, k, False, False)
            if num_reqs == most:
                return
            num_reqs = min(2 * num_reqs, most)

    def _warm_up_mixed(self, prompts: PrefillBatch, rows: RowState | None, k: int) -> None:
        num_rows = 0 if rows is None else rows.slots.shape[0]
        shape = BatchDescriptor(
            prompts.input_ids.shape[0] + num_rows * (1 + k),
            prompts.rows.slots.shape[0] + num_rows,
        )
        with set_forward_context(batch_descriptor=shape):
            self.step.mixed(prompts, rows, Draft(self.step.draft_ids[:num_rows, :k]))

    @torch.inference_mode()
    def capture_rounds(self, sizes: Collection[int], why: str, progress: Progress | None) -> None:
        """See ``EngineGraphs.capture_rounds``."""
        self._graphs.capture_rounds(self._decode, sizes, why, progress)

    @property
    def round_sizes(self) -> list[int]:
        """See ``EngineGraphs.round_sizes``."""
        return self._graphs.round_sizes(self._decode)

    def timer(self, num_adapter_slots: int) -> StepTimer:
        """Times the graphs of an engine that has no requests yet."""
        return StepTimer(
            self._graphs,
            self.step,
            decode=self._decode,
            catch_up=self._catch_up,
            ks=self._ks,
            num_adapter_slots=num_adapter_slots,
            fill_slots=self._fill_slots,
        )

    def decode_costs(self, num_adapter_slots: int = 0) -> StepCosts:
        """What steps take, of an engine that has no requests yet: see ``StepTimer.costs``."""
        return self.timer(num_adapter_slots).costs()

    def write_k(self, rows: list[int], ks: list[int]) -> None:
        """Change how many drafts these state rows take, from the next pass on."""
        index, values = upload([rows, ks], torch.int64, self.device)
        self.state.column("k").index_copy_(0, index, values)

    def enable_lora(self, num_slots: int) -> None:
        """From now on batches with adapters have graphs of their own, beside those without."""
        self._graphs.enable_lora(num_slots)

    def forget_replays(self) -> None:
        """Let the graph table count replays from here on."""
        self._graphs.forget_replays()

    def graph_table(self) -> list[GraphRow]:
        return self._graphs.table()

    def write_blocks(self, entries: Sequence[tuple[int, int, list[int]]]) -> None:
        """Add KV blocks to rows: see ``DecodeState.write_blocks``."""
        self.state.write_blocks(entries)

    def write_row(self, row: RequestRow) -> None:
        """Install a request."""
        row.write(self.state)

    def tell_drafter(self, entered: Sequence[tuple[int, str | None]]) -> None:
        """Requests have taken rows, see ``Drafter.enter``; the drafter is ready for a step then."""
        drafter = self.step.drafter
        if drafter is not None:
            for row, group in entered:
                drafter.enter(row, group)
            drafter.refresh()

    def teach_drafter(self, token_ids: Sequence[int], group: str) -> None:
        """A text is whole, see ``Drafter.learn``."""
        if self.step.drafter is not None:
            self.step.drafter.learn(token_ids, group)

    def release(self) -> None:
        """Let go of the graphs and their memory."""
        self._graphs.clear()

    # -- steps ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(
        self, rows: list[int], k: int, needs: Needs, rounds: int = 1
    ) -> tuple[PendingResult, StepRecord]:
        """Launch a uniform pass over these state rows; ``rounds`` of it where a graph has them."""
        self._fill_slots(rows)
        self._run_catch_up(len(rows), k, needs)
        if self._host_drafts and k > 0:
            self.step.draft_on_host(len(rows), k, needs.sampled)
        result, record = self._graphs.run(
            self._decode,
            len(rows),
            k,
            sampled=needs.sampled,
            has_lora=needs.has_lora,
            rounds=rounds,
        )
        assert isinstance(result, PassResult)
        self._check_ranks(record, result)
        return self.pending(result, len(rows), needs), record

    @torch.inference_mode()
    def mixed(
        self,
        chunks: Sequence[PromptChunk],
        rows: list[int],
        k: int,
        needs: Needs,
        first_masks: np.ndarray | None = None,
    ) -> tuple[PendingResult | None, PendingResult | None, StepRecord]:
        """Launch one flattened pass over chunks of prompts and the verify rows beside them.

        ``first_masks``: [prompts that end here, 1, words] int32, what their first tokens may be.
        Returns the results of the rows, and of the prompts that end here.
        """
        prompts = flatten_chunks(chunks, self.state, needs.sampled, needs.has_lora)
        verify_rows, draft = None, Draft(self.step.draft_ids[: len(rows), :0])
        if rows:
            self._fill_slots(rows)
            self._run_catch_up(len(rows), k, needs)
            verify_rows = self.step.rows(len(rows), needs.sampled, needs.has_lora)
            draft = self._draft(len(rows), k, needs)
        allowed = None if first_masks is None else torch.from_numpy(first_masks).to(self.device)
        num_tokens = prompts.input_ids.shape[0] + len(rows) * (1 + k)
        descriptor = BatchDescriptor(num_tokens, len(rows) + len(chunks), False, needs.has_lora)
        mode, padded = self._graphs.dispatch_flat(descriptor)
        with set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=padded):
            verified, first = self.step.mixed(prompts, verify_rows, draft, allowed)
        reason = None
        if mode is not CUDAGraphMode.FULL:
            kind = "prefill beside decode rows" if rows else "prefill"
            reason = f"{kind}: {self._graphs.explain(descriptor)}"
            if self.catchup_width:
                reason += "; the drafter reads prompts on no graph"
        record = StepRecord(
            mode=mode.name,
            descriptor=padded,
            num_reqs=descriptor.num_reqs,
            num_tokens=num_tokens,
            k=k,
            reason=reason,
        )
        results = [result for result in (verified, first) if result is not None]
        self._check_ranks(record, *results)
        pending = [
            None if each is None else self.pending(each, each.packed.shape[0], needs)
            for each in (verified, first)
        ]
        return pending[0], pending[1], record

    def pending(self, result: PassResult, num_reqs: int, needs: Needs) -> PendingResult:
        """The results of a launch, on their way to the host."""
        return PendingResult(result, num_reqs, with_logprobs=needs.with_logprobs, watch=self._watch)

    def _check_ranks(self, record: StepRecord, *results: PassResult) -> None:
        """In debug mode: every rank took the same graph, and commits the same tokens."""
        if self._compare is None:
            return
        taken = repr((record.mode, record.descriptor, record.num_reqs, record.k, record.rounds))
        self._compare(zlib.crc32(taken.encode()), f"the graph they took, {taken}")
        tokens = b"".join(each.packed.cpu().numpy().tobytes() for each in results)
        self._compare(zlib.crc32(tokens), f"the tokens they commit on {taken}")

    @torch.inference_mode()
    def draft_apart(self, rows: list[int], k: int, needs: Needs) -> Draft:
        """Launch the drafting of a uniform pass alone: the host looks at its drafts next."""
        self._fill_slots(rows)
        self._run_catch_up(len(rows), k, needs)
        return self._draft(len(rows), k, needs)

    @torch.inference_mode()
    def verify_apart(
        self, ids: list[list[int]], k: int, needs: Needs, masks: np.ndarray
    ) -> tuple[PassResult, StepRecord]:
        """Launch the verification of these drafts of ``draft_apart``'s rows.

        ``masks``: [rows, 1 + k, words] int32, what may stand at each verify row.
        """
        step, count = self.step, len(ids)
        if k:
            step.draft_ids[:count, :k] = upload(ids, torch.int64, self.device)
            step.draft_ids[count:, :k] = -1
        step.allowed[:count, : 1 + k] = torch.from_numpy(masks).to(self.device)
        result, record = self._graphs.run(
            self._verify, count, k, sampled=needs.sampled, has_lora=needs.has_lora
        )
        # Rows without a grammar find all tokens allowed again.
        step.allowed[:count, : 1 + k] = -1
        assert isinstance(result, PassResult)
        self._check_ranks(record, result)
        return result, record

    def _draft(self, num_reqs: int, k: int, needs: Needs) -> Draft:
        """Drafts for verify rows that do not ride in the step's own graph."""
        if k == 0 or self.step.drafter is None:
            return Draft(self.step.draft_ids[:num_reqs, :0])
        if self._draft_pass is None:
            self.step.draft_on_host(num_reqs, k, needs.sampled)
            return Draft(self.step.draft_ids[:num_reqs, :k])
        draft, _ = self._graphs.run(
            self._draft_pass, num_reqs, k, sampled=needs.sampled, has_lora=needs.has_lora
        )
        assert isinstance(draft, Draft)
        # The graph's outputs lie in memory that other graphs of the pool use.
        return map_tensors(draft, lambda each: each[:num_reqs].clone())

    def _run_catch_up(self, num_reqs: int, k: int, needs: Needs) -> None:
        if self._catch_up is None or k == 0:
            return
        for _ in range(needs.catch_up_passes):
            self._graphs.run(
                self._catch_up,
                num_reqs,
                self.catchup_width - 1,
                sampled=False,
                has_lora=needs.has_lora,
            )

    @property
    def catchup_width(self) -> int:
        """Tokens per row that one catch-up pass feeds the drafter; 0 where it keeps no KV."""
        return self.step.drafter.catchup_width if self.step.drafter is not None else 0

    def _park(self) -> Callable[[], None]:
        """Make every batch row padding, and return what puts the rows back."""
        live = self._rows_in_slots
        self._fill_slots([])
        return lambda: self._fill_slots(live)

    def _fill_slots(self, rows: list[int]) -> None:
        """Name the batch's state rows; all further batch rows are padding."""
        if rows == self._rows_in_slots:
            return
        padding = [self.state.dump_row] * (self.step.slots.shape[0] - len(rows))
        self.step.slots.copy_(upload(rows + padding, torch.int64, self.device))
        self._rows_in_slots = rows
