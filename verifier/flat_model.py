"""A model over flattened batches (prompts, verify rows beside them), on graphs of its own.

Nested as in vLLM: the whole pass is wrapped for FULL graphs, each piece between two attention
operators for PIECEWISE ones, and the forward context says which of them fires. Inside another
capture, and for uniform batches with a FULL graph of their own, the model runs straight through.

Shape letters: T tokens, R requests, W width of a block table.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.verifier.attention.base import PAD_SLOT_ID, AttentionMetadata
from specdec.verifier.attention.op import LayerAttention, PagedAttention
from specdec.verifier.compile import CompilationConfig, PieceFunction, compile_pieces
from specdec.verifier.context import ForwardContext, get_forward_context, set_forward_context
from specdec.verifier.graph import CUDAGraphWrapper, GraphPool, GraphRow
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.modes import BatchDescriptor, CUDAGraphMode
from specdec.verifier.split import OpCall, PieceCall, SplitModel
from specdec.verifier.tensor_tree import tensors

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


class FlatModel:
    """``forward`` stands in for the model's own; it obeys the forward context."""

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: KVCache,
        pool: GraphPool,
        *,
        role: str = "target",
        max_num_tokens: int,
        max_num_seqs: int,
        table_width: int,
        compilation: CompilationConfig,
        debug: bool = False,
        verify: bool = False,
    ) -> None:
        """
        max_num_tokens: of the largest graph; larger batches run without one.
        table_width: columns of a block table.
        verify: compare each graph's first replay with an eager run.
        """
        self.model = model
        self.kv_cache = kv_cache
        self.pool = pool
        self.role = role
        self._compilation = compilation
        # A piece has no state; what the whole pass writes to the cache is written again.
        self._state: list[Tensor] | None = [] if verify else None
        self._debug = debug
        self._captured: set[tuple[CUDAGraphMode, BatchDescriptor]] = set()
        self._chain: _Chain | None = None
        if compilation.is_compiled:
            self._chain = self._make_chain()

        device, config = model.device, model.config

        def integers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self._ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._attention_out = torch.zeros(
            max_num_tokens, config.num_heads, config.value_size, dtype=model.dtype, device=device
        )
        self._query_start_loc = integers(max_num_seqs + 1)
        self._context_lens = integers(max_num_seqs)
        self._seq_lens = integers(max_num_seqs)
        self._block_table = integers(max_num_seqs, table_width)
        self._slot_mapping = torch.full(
            (max_num_tokens,), PAD_SLOT_ID, dtype=torch.int64, device=device
        )
        self._full = CUDAGraphWrapper(
            self._run, FULL, role=role, pool=pool, debug=debug, verify_state=self._state
        )

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache: KVCache, attn: AttentionMetadata
    ) -> Tensor:
        """Hidden states [T, hidden]. From a graph, they are overwritten by the pool's next replay.

        ``kv_cache`` must be the one that the graphs were captured on.
        """
        assert kv_cache is self.kv_cache
        context = get_forward_context()
        descriptor = context.batch_descriptor
        if (
            context.cudagraph_runtime_mode is NONE
            or self.pool.is_capturing
            or descriptor is None
            or descriptor.uniform
        ):
            return self._straight(input_ids, positions, attn)
        return self._padded(context, descriptor, input_ids, positions, attn)

    @torch.inference_mode()
    def capture(self, mode: CUDAGraphMode, key: BatchDescriptor) -> None:
        """Run a batch of padding of this shape once without a graph, then capture it.

        Raises ``CaptureError``; the pool's capture window must be open.
        """
        if self.has_graph(mode, key):
            return
        if mode is PIECEWISE and self._chain is None:
            self._chain = self._make_chain()
        # The recorder needs no warm-up: there is nothing to compile or to set up.
        on_gpu = self.model.device.type == "cuda"
        for each in (NONE, mode) if on_gpu else (mode,):
            self._run_padding(each, key)
        self._captured.add((mode, _key_of(mode, key)))

    def _run_padding(self, mode: CUDAGraphMode, key: BatchDescriptor) -> None:
        tokens = torch.zeros(key.num_tokens, dtype=torch.int64, device=self.model.device)
        ends = torch.full_like(self._query_start_loc[: key.num_reqs + 1], key.num_tokens)
        ends[0] = 0
        nothing = torch.zeros_like(self._seq_lens[: key.num_reqs])
        padding = AttentionMetadata(
            query_start_loc=ends,
            context_lens=nothing,
            seq_lens=nothing,
            block_table=torch.zeros_like(self._block_table[: key.num_reqs]),
            slot_mapping=torch.full_like(tokens, PAD_SLOT_ID),
            max_query_len=key.num_tokens,
            uniform=False,
        )
        with (
            self.pool.stream(),
            set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=key),
        ):
            self.forward(tokens, tokens, self.kv_cache, padding)

    @property
    def num_pieces(self) -> int:
        """Distinct pieces of the model; 0 before it was split."""
        return len(self._chain.split.pieces) if self._chain is not None else 0

    def has_graph(self, mode: CUDAGraphMode, key: BatchDescriptor) -> bool:
        return (mode, _key_of(mode, key)) in self._captured

    def table(self) -> list[GraphRow]:
        """One row per key; a PIECEWISE row sums up its pieces."""
        pieces = self._chain.table() if self._chain is not None else []
        return pieces + self._full.table()

    def clear(self) -> None:
        self._captured.clear()
        self._full.clear()
        if self._chain is not None:
            self._chain.clear()

    def _make_chain(self) -> "_Chain":
        # No other model can be cut: PIECEWISE graphs and compilation are refused for it.
        assert isinstance(self.model, CausalLM)
        split, functions = compile_pieces(self.model, self._compilation)
        return _Chain(split, functions, self.pool, self.role, self._debug, self._state)

    def _straight(self, input_ids: Tensor, positions: Tensor, attn: AttentionMetadata) -> Tensor:
        """Without graphs of this object: through compiled pieces where there are any."""
        if not self._compilation.is_compiled or attn.adapter_slots is not None:
            # Pieces know nothing of adapters.
            return self.model.forward(input_ids, positions, self.kv_cache, attn)
        assert self._chain is not None
        attend = PagedAttention(self.model.attention_backend, self.kv_cache, attn)
        # Direct attention makes tensors of its own.
        return self._chain.run(input_ids, positions, self._attention_out[:0], attend)

    def _padded(
        self,
        context: ForwardContext,
        descriptor: BatchDescriptor,
        input_ids: Tensor,
        positions: Tensor,
        attn: AttentionMetadata,
    ) -> Tensor:
        live, padded = input_ids.shape[0], descriptor.num_tokens
        _stage(self._ids[:padded], input_ids, 0)
        _stage(self._positions[:padded], positions, 0)
        if context.cudagraph_runtime_mode is FULL:
            attn = self._stage_metadata(attn, descriptor)
        with set_forward_context(
            cudagraph_runtime_mode=context.cudagraph_runtime_mode,
            batch_descriptor=descriptor,
            attn_metadata=attn,
            kv_cache=self.kv_cache,
            attn_backend=self.model.attention_backend,
        ):
            # The metadata of a PIECEWISE batch is not static: its attention reads the context.
            static = attn if context.cudagraph_runtime_mode is FULL else None
            hidden = self._full(self._ids[:padded], self._positions[:padded], static)
        return hidden[:live]

    def _run(self, input_ids: Tensor, positions: Tensor, attn: AttentionMetadata | None) -> Tensor:
        if attn is not None:
            return self._straight(input_ids, positions, attn)
        assert self._chain is not None
        out = self._attention_out[: input_ids.shape[0]]
        return self._chain.run(input_ids, positions, out, None)

    def _stage_metadata(
        self, attn: AttentionMetadata, descriptor: BatchDescriptor
    ) -> AttentionMetadata:
        """The same batch in static memory; requests and tokens of padding have no length."""
        num_tokens, num_reqs = descriptor.num_tokens, descriptor.num_reqs
        loc = self._query_start_loc[: num_reqs + 1]
        loc.fill_(attn.slot_mapping.shape[0])
        loc[: attn.query_start_loc.shape[0]].copy_(attn.query_start_loc)
        _stage(self._context_lens[:num_reqs], attn.context_lens, 0)
        _stage(self._seq_lens[:num_reqs], attn.seq_lens, 0)
        _stage(self._block_table[:num_reqs], attn.block_table, 0)
        _stage(self._slot_mapping[:num_tokens], attn.slot_mapping, PAD_SLOT_ID)
        return AttentionMetadata(
            query_start_loc=loc,
            context_lens=self._context_lens[:num_reqs],
            seq_lens=self._seq_lens[:num_reqs],
            block_table=self._block_table[:num_reqs],
            slot_mapping=self._slot_mapping[:num_tokens],
            max_query_len=num_tokens,
            uniform=False,
        )


class _Chain:
    """The pieces in order, each place with a PIECEWISE wrapper of its own."""

    def __init__(
        self,
        split: SplitModel,
        functions: Sequence[PieceFunction],
        pool: GraphPool,
        role: str,
        debug: bool,
        verify_state: list[Tensor] | None,
    ) -> None:
        self.split = split
        self._last_uses = _last_uses(split)
        self._wrappers: dict[int, CUDAGraphWrapper] = {}
        # What eager operators other than attention give, by place and number of tokens.
        self._op_results: dict[tuple[int, int], Any] = {}
        for place, call in enumerate(split.calls):
            if isinstance(call, PieceCall):
                self._wrappers[place] = CUDAGraphWrapper(
                    _with_weights(functions[call.piece], call.weights),
                    PIECEWISE,
                    role=role,
                    pool=pool,
                    debug=debug,
                    verify_state=verify_state,
                )

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention_out: Tensor,
        attend: LayerAttention | None,
    ) -> Tensor:
        """``attend`` None: the opaque operator, which reads the batch from the forward context."""
        values = dict(zip(self.split.inputs, (input_ids, positions, attention_out), strict=True))
        for place, call in enumerate(self.split.calls):
            if isinstance(call, PieceCall):
                results = self._wrappers[place](*[values[name] for name in call.inputs])
                values.update(zip(call.outputs, results, strict=True))
            else:
                self._call_op(place, call, values, attend)
            for name in self._last_uses[place]:
                values.pop(name, None)
        return values[self.split.output]

    def _call_op(
        self, place: int, call: OpCall, values: dict[str, Tensor], attend: LayerAttention | None
    ) -> None:
        args: list[Any] = [
            values[a] if isinstance(a, str) and a in call.names else a for a in call.args
        ]
        if call.is_attention and attend is not None:
            query, key, value, _, *rest = args
            # The name of the shared output stands for this layer's until the next attends.
            values[call.args[3]] = attend(query, key, value, *rest)
            return
        result = call.op(*args)
        if not call.is_attention and attend is None:
            # The next piece's graph reads it at a fixed address.
            num_tokens = values[self.split.inputs[0]].shape[0]
            static = self._op_results.setdefault((place, num_tokens), result)
            for target, made in zip(tensors(static), tensors(result), strict=True):
                target.copy_(made)
            result = static
        values[call.output] = result

    def table(self) -> list[GraphRow]:
        rows: dict[tuple, list[GraphRow]] = {}
        for wrapper in self._wrappers.values():
            for row in wrapper.table():
                rows.setdefault((row.descriptor, row.variant), []).append(row)
        return [_summed(group) for group in rows.values()]

    def clear(self) -> None:
        for wrapper in self._wrappers.values():
            wrapper.clear()


def _with_weights(function: PieceFunction, weights: tuple[Tensor, ...]) -> PieceFunction:
    return lambda *activations: function(*activations, *weights)


def _last_uses(split: SplitModel) -> list[list[str]]:
    """Per call, the values that no later call reads."""
    # The ids are kept for their number.
    seen = {split.output, split.inputs[0]}
    last: list[list[str]] = []
    for call in reversed(split.calls):
        used = set(call.inputs) | set(call.outputs) if isinstance(call, PieceCall) else call.names
        last.append(sorted(used - seen))
        seen |= used
    return last[::-1]


def _stage(target: Tensor, values: Tensor, padding: int) -> None:
    """Copy ``values`` to the head of a static tensor, and fill the rest."""
    live = values.shape[0]
    target[:live].copy_(values)
    if live < target.shape[0]:
        target[live:].fill_(padding)


def _summed(rows: list[GraphRow]) -> GraphRow:
    errors = [row.max_error for row in rows if row.max_error is not None]
    first = rows[0]
    return GraphRow(
        role=first.role,
        mode=first.mode,
        descriptor=first.descriptor,
        variant=first.variant,
        num_bytes=sum(row.num_bytes for row in rows),
        capture_seconds=sum(row.capture_seconds for row in rows),
        replays=first.replays,
        max_error=max(errors, default=None),
        rounds=first.rounds,
    )


def _key_of(mode: CUDAGraphMode, key: BatchDescriptor) -> BatchDescriptor:
    return key.relaxed() if mode is PIECEWISE else key
