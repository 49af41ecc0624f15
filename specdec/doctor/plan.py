"""What an engine of these fields would be, worked out from files alone.

``specdec.build`` decides the same with the weights at hand; tests hold the two against each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from specdec.build import DEFAULT_MAX_NUM_SEQS
from specdec.config import EngineConfig
from specdec.doctor.subject import Subject
from specdec.drafters.adaptive import widths_up_to
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.graph_setup import MAX_MIXED_TOKENS_OFF_GPU
from specdec.kv_blocks import GPU_RESERVED_BYTES, kv_blocks
from specdec.sources import Source, dtype_of
from specdec.verifier.attention.base import AttentionBackend
from specdec.verifier.attention.select import BackendChoice, choose_backend, default_block_size
from specdec.verifier.checkpoint import SafetensorsCheckpoint
from specdec.verifier.dispatcher import CudagraphDispatcher
from specdec.verifier.hub import resolve_model
from specdec.verifier.made import MadeModel
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.models.registry import model_class
from specdec.verifier.models.support import graph_support, model_state_bytes
from specdec.verifier.modes import (
    CUDAGraphMode,
    downgrade_reasons,
    resolve_uniform_query_lens,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The decisions. Sizes in bytes; ``num_blocks`` is None where memory does not hold one."""

    device: torch.device
    dtype: torch.dtype
    draft_dtype: torch.dtype | None  # of a draft model
    attention: BackendChoice
    draft_attention: BackendChoice | None
    asked_mode: CUDAGraphMode
    mode: CUDAGraphMode
    downgrades: tuple[str, ...]
    allowed_k: tuple[int, ...]
    full_k: tuple[int, ...]  # that have FULL graphs
    dispatcher: CudagraphDispatcher
    max_num_seqs: int
    max_model_len: int
    block_size: int
    vocab_size: int  # ids that may be emitted
    num_weights: int
    weight_bytes: int
    draft_weight_bytes: int  # 0 without a draft model
    block_bytes: int  # of one KV block, the draft model's included
    num_blocks: int | None
    state_bytes: int  # of recurrent layers, the draft model's included
    free_bytes: int | None  # of the GPU, before anything is loaded

    @property
    def max_k(self) -> int:
        return max(self.allowed_k)

    @property
    def kv_tokens(self) -> int:
        return (self.num_blocks or 0) * self.block_size


def make_plan(subject: Subject, config: EngineConfig, k: int | str) -> Plan:
    """Raises ValueError as ``Engine`` would, where files can tell."""
    device = config.torch_device
    target, draft = subject.target, subject.draft_model
    k = k if subject.draft is not None else 0
    widths = widths_up_to(config.k_max) if k == "auto" else [int(k)]
    extra = [each for each in config.extra_k if each <= max(widths)]
    allowed_k = tuple(sorted({0, *widths, *extra}))
    block_size = config.kv_block_size
    if not isinstance(block_size, int):
        block_size = default_block_size(_attention_name(config, target))

    dtype = dtype_of(config, target, device)
    attention = _attention(config, target, dtype, block_size)
    model = _sizes(target, dtype, attention.backend)
    supports = [graph_support(target.config, attention.backend)]
    draft_dtype = draft_attention = draft_model = None
    if draft is not None:
        # A draft keeps its own dtype on a GPU.
        own = replace(config, dtype="auto") if device.type == "cuda" else config
        draft_dtype = dtype_of(own, draft, device)
        draft_attention = _attention(own, draft, draft_dtype, block_size)
        draft_model = _sizes(draft, draft_dtype, draft_attention.backend)
        supports.append(graph_support(draft.config, draft_attention.backend))
    elif subject.head is not None:
        # It reads the target's hidden states, in the target's dtype.
        supports.append(_attention(config, subject.head, dtype, block_size).backend.cg_support)

    asked = config.graph_mode
    support, query_lens = min(supports), [1 + each for each in allowed_k]
    has_pieces = config.compilation.no_piecewise is None and config.model_impl == "specdec"
    mode, full_lens = resolve_uniform_query_lens(asked, support, query_lens, has_pieces)
    max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device.type]
    max_model_len = config.max_model_len or target.config.max_position_embeddings
    vocab_size = target.config.vocab_size
    if target.tokenizer is not None:
        vocab_size = min(vocab_size, target.tokenizer.vocab_size)
    weights, draft_weights = _num_bytes(model), _num_bytes(draft_model)
    num_blocks, block_bytes, free = _memory(
        config,
        model,
        draft_model,
        vocab_size,
        max_model_len,
        max_num_seqs,
        block_size,
        max(allowed_k),
    )
    return Plan(
        device=device,
        dtype=dtype,
        draft_dtype=draft_dtype,
        attention=attention,
        draft_attention=draft_attention,
        asked_mode=asked,
        mode=mode,
        downgrades=tuple(downgrade_reasons(asked, support, query_lens, has_pieces)),
        allowed_k=allowed_k,
        full_k=tuple(each - 1 for each in full_lens),
        dispatcher=_dispatcher(config, mode, full_lens or query_lens, max_num_seqs),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        vocab_size=vocab_size,
        num_weights=sum(each.numel() for each in model.parameters()),
        weight_bytes=weights,
        draft_weight_bytes=draft_weights,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        state_bytes=sum(
            model_state_bytes(each, max_num_seqs, 1 + max(allowed_k))
            for each in (model, draft_model)
            if each is not None
        ),
        free_bytes=free,
    )


def _attention_name(config: EngineConfig, target: Source) -> str:
    if isinstance(target.model, CausalLM):
        return target.model.attention_backend.name
    return config.attention_backend


def _attention(
    config: EngineConfig, source: Source, dtype: torch.dtype, block_size: int
) -> BackendChoice:
    if isinstance(source.model, CausalLM):
        backend = source.model.attention_backend
        return BackendChoice(backend=backend, asked=backend.name, reason="the model came with it")
    return choose_backend(
        config.attention_backend,
        head_size=source.config.head_size,
        dtype=dtype,
        block_size=block_size,
        device=config.torch_device,
        sliding_window=source.config.sliding_window,
        soft_cap=source.config.attention_soft_cap,
        latent_size=source.config.latent_size,
    )


class _Listed:
    """The sizes of a model of transformers, as its checkpoint lists them."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        assert not isinstance(source.model, CausalLM | MadeModel)
        shapes = SafetensorsCheckpoint(resolve_model(source.model, weights=True)).shapes()
        self.config, self.dtype = source.config, dtype
        self._weights = [torch.empty(s, dtype=dtype, device="meta") for s in shapes.values()]

    def parameters(self) -> list[Tensor]:
        return self._weights

    def kv_bytes_per_block(self, block_size: int) -> int:
        config = self.config
        positions = 2 * config.num_layers * block_size
        return positions * config.num_kv_heads * config.head_size * self.dtype.itemsize


def _sizes(source: Source, dtype: torch.dtype, backend: AttentionBackend) -> LanguageModel:
    """Something with the model's weights and KV in their sizes, without memory."""
    if isinstance(source.model, CausalLM):
        return source.model
    if source.config.implementation != "specdec":
        return cast(LanguageModel, _Listed(source, dtype))
    return model_class(source.config)(
        source.config, dtype=dtype, device="meta", attention_backend=backend
    )


def _num_bytes(model: LanguageModel | None) -> int:
    return 0 if model is None else sum(each.nbytes for each in model.parameters())


def _memory(
    config: EngineConfig,
    model: LanguageModel,
    draft_model: LanguageModel | None,
    vocab_size: int,
    max_model_len: int,
    max_num_seqs: int,
    block_size: int,
    max_k: int,
) -> tuple[int | None, int, int | None]:
    """Blocks of the pool (None: there is no room), bytes of one, and what the GPU has free."""
    drafter = None
    block_bytes = model.kv_bytes_per_block(block_size)
    if draft_model is not None:
        drafter = DraftModelDrafter(draft_model, vocab_size=vocab_size)
        block_bytes += drafter.bytes_per_block(block_size)
    if config.torch_device.type != "cuda":
        sizes = (max_model_len, max_num_seqs, block_size, max_k)
        return kv_blocks(config, model, drafter, *sizes), block_bytes, None
    free, total = torch.cuda.mem_get_info(config.torch_device)
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks, block_bytes, free
    # The weights are not there yet.
    budget = free - _num_bytes(model) - _num_bytes(draft_model) - GPU_RESERVED_BYTES
    budget -= int((1 - config.gpu_memory_utilization) * total)
    budget -= model_state_bytes(model, max_num_seqs, 1 + max_k)
    if drafter is not None:
        budget -= drafter.state_bytes(max_num_seqs, max_k)
    blocks = min(budget // max(block_bytes, 1), -(-max_model_len // block_size) * max_num_seqs)
    return (blocks if blocks > 0 else None), block_bytes, free


def _dispatcher(
    config: EngineConfig, mode: CUDAGraphMode, query_lens: Sequence[int], max_num_seqs: int
) -> CudagraphDispatcher:
    most = config.max_num_batched_tokens
    if config.torch_device.type != "cuda":
        most = min(most, max(max_num_seqs * max(query_lens), MAX_MIXED_TOKENS_OFF_GPU))
    dispatcher = CudagraphDispatcher(max_num_seqs=max_num_seqs)
    dispatcher.initialize_cudagraph_keys(
        mode,
        capture_sizes=config.capture_sizes,
        uniform_query_lens=tuple(query_lens),
        uniform_request_counts=config.uniform_request_counts,
        max_num_batched_tokens=most,
    )
    return dispatcher
