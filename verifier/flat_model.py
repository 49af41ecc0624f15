"""A model over flattened batches (prompts, verify rows beside them), on graphs of its own.

Nested as in vLLM: the whole pass is wrapped for FULL graphs, each piece between two attention
operators for PIECEWISE ones, and the forward context says which of them fires. Inside another
capture, and for uniform batches with a FULL graph of their own, the model runs straight through.

Shape letters: T tokens, R requests, W width of a block table.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.kernels.lora_rows import packed_size, slot_tiles
from specdec.verifier.attention.base import PAD_SLOT_ID, AttentionMetadata
from specdec.verifier.attention.op import PagedAttention
from specdec.verifier.chain import Chain
from specdec.verifier.compile import CompilationConfig, compile_pieces
from specdec.verifier.context import ForwardContext, get_forward_context, set_forward_context
from specdec.verifier.graph import CUDAGraphWrapper, GraphPool, GraphRow
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.models.lora import max_groups
from specdec.verifier.modes import BatchDescriptor, CUDAGraphMode

if TYPE_CHECKING:
    from specdec.verifier.partitioned import PartitionedModel

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
        # Without adapters, and with them once there are any.
        self._chains: dict[bool, Chain | PartitionedModel] = {}
        if compilation.is_compiled:
            self._chain(has_lora=False)

        device, config = model.device, model.local_config

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
        self._num_adapter_slots = 0
        self._adapter_slots = self._slot_mapping[:0]
        self._adapter_tiles = self._seq_lens[:0]
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

    def enable_lora(self, num_slots: int) -> None:
        """From now on batches may have adapters, which lie in so many slots."""
        assert self._num_adapter_slots == 0
        self._num_adapter_slots = num_slots
        self._adapter_slots = torch.full_like(self._slot_mapping, -1)
        if self.model.device.type == "cuda":
            sizes = map(self._tiles_size, range(1, self._slot_mapping.shape[0] + 1))
            self._adapter_tiles = self._seq_lens.new_zeros(max(sizes))
        if self._compilation.is_compiled:
            self._chain(has_lora=True)

    @torch.inference_mode()
    def capture(self, mode: CUDAGraphMode, key: BatchDescriptor) -> None:
        """Run a batch of padding of this shape once without a graph, then capture it.

        Raises ``CaptureError``; the pool's capture window must be open.
        """
        if self.has_graph(mode, key):
            return
        if mode is PIECEWISE:
            self._chain(key.has_lora)
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
            adapter_slots=torch.full_like(tokens, -1) if key.has_lora else None,
            # The row of padding, behind those of requests.
            state_rows=torch.full_like(nothing, self._seq_lens.shape[0], dtype=torch.int64),
        )
        with (
            self.pool.stream(),
            set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=key),
        ):
            self.forward(tokens, tokens, self.kv_cache, padding)

    @property
    def num_pieces(self) -> int:
        """Distinct pieces of the model; 0 before it was split."""
        return self._chains[False].num_pieces if self._chains else 0

    def has_graph(self, mode: CUDAGraphMode, key: BatchDescriptor) -> bool:
        return (mode, _key_of(mode, key)) in self._captured

    def table(self) -> list[GraphRow]:
        """One row per key; a PIECEWISE row sums up its pieces."""
        pieces = [row for chain in self._chains.values() for row in chain.table()]
        return pieces + self._full.table()

    def forget_replays(self) -> None:
        """Count replays from here on."""
        self._full.forget_replays()
        for chain in self._chains.values():
            chain.forget_replays()

    def clear(self) -> None:
        self._captured.clear()
        self._full.clear()
        for chain in self._chains.values():
            chain.clear()
        # It holds on to the adapters' weights.
        self._chains.pop(True, None)

    def _chain(self, has_lora: bool) -> "Chain | PartitionedModel":
        """The model in pieces, compiled when first asked for."""
        if has_lora not in self._chains:
            self._chains[has_lora] = self._make_chain(has_lora)
        return self._chains[has_lora]

    def _make_chain(self, has_lora: bool) -> "Chain | PartitionedModel":
        # No other model can be cut: PIECEWISE graphs and compilation are refused for it.
        assert isinstance(self.model, CausalLM)
        compilation = self._compilation
        if compilation.use_inductor_graph_partition:
            from specdec.verifier.partitioned import PartitionedModel

            return PartitionedModel(
                self.model,
                compilation,
                has_lora,
                self.kv_cache,
                self.pool,
                self.role,
                self._debug,
                self._state,
            )
        split, functions = compile_pieces(self.model, compilation, has_lora)
        return Chain(split, functions, self.pool, self.role, self._debug, self._state)

    def _straight(self, input_ids: Tensor, positions: Tensor, attn: AttentionMetadata) -> Tensor:
        """Without graphs of this object: through compiled pieces where there are any."""
        if not self._compilation.is_compiled:
            return self.model.forward(input_ids, positions, self.kv_cache, attn)
        attend = PagedAttention(self.model.attention_backend, self.kv_cache, attn)
        # Direct attention makes tensors of its own.
        inputs = [input_ids, positions, self._attention_out[:0]]
        slots = attn.adapter_slots
        if slots is not None:
            num_groups = max_groups(attn.context_lens.shape[0], self._num_adapter_slots)
            inputs += [slots, slot_tiles(slots, num_groups, self.model.dtype)]
        return self._chain(slots is not None).run(inputs, attend)

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
        assert (attn.adapter_slots is not None) == descriptor.has_lora
        if attn.adapter_slots is not None:
            _stage(self._adapter_slots[:padded], attn.adapter_slots, -1)
            attn = replace(attn, adapter_slots=self._adapter_slots[:padded])
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
            hidden = self._full(
                self._ids[:padded], self._positions[:padded], static, attn.adapter_slots
            )
        return hidden[:live]

    def _run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn: AttentionMetadata | None,
        adapter_slots: Tensor | None,
    ) -> Tensor:
        if attn is not None:
            return self._straight(input_ids, positions, attn)
        num_tokens = input_ids.shape[0]
        inputs = [input_ids, positions, self._attention_out[:num_tokens]]
        if adapter_slots is not None:
            tiles = self._adapter_tiles[: self._tiles_size(num_tokens)]
            num_groups = self._num_groups(num_tokens)
            slot_tiles(adapter_slots, num_groups, self.model.dtype, out=tiles)
            inputs += [adapter_slots, tiles]
        return self._chain(adapter_slots is not None).run(inputs, None)

    def _num_groups(self, num_tokens: int) -> int:
        """Of adapters in a batch of so many tokens, at most."""
        num_reqs = min(num_tokens, self._seq_lens.shape[0])
        return max_groups(num_reqs, self._num_adapter_slots)

    def _tiles_size(self, num_tokens: int) -> int:
        return packed_size(num_tokens, self._num_groups(num_tokens), self.model.dtype)

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
            adapter_slots=attn.adapter_slots,
        )


def _stage(target: Tensor, values: Tensor, padding: int) -> None:
    """Copy ``values`` to the head of a static tensor, and fill the rest."""
    live = values.shape[0]
    target[:live].copy_(values)
    if live < target.shape[0]:
        target[live:].fill_(padding)


def _key_of(mode: CUDAGraphMode, key: BatchDescriptor) -> BatchDescriptor:
    return key.relaxed() if mode is PIECEWISE else key
