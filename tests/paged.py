"""Running one sequence through a model and its paged KV cache, for tests of models."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdec.verifier.attention.base import AttentionBackend, AttentionMetadata
from specdec.verifier.attention.mla import MlaBackend
from specdec.verifier.attention.sdpa import SdpaBackend
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.loading import load_model, read_config
from specdec.verifier.models.llama import CausalLM

BLOCK_SIZE = 4


def load(path: str | Path | None, dtype: torch.dtype | None = torch.float32) -> CausalLM:
    """On the CPU, with the backend that an engine takes there."""
    latent_size = read_config(path).latent_size
    backend: AttentionBackend = SdpaBackend("cpu")
    if latent_size is not None:
        backend = MlaBackend(torch.device("cpu"), latent_size)
    return load_model(path, dtype=dtype, attention_backend=backend)


def cache_for(model: CausalLM, num_tokens: int) -> KVCache:
    """Enough blocks for ``num_tokens``, poisoned: a slot read before it is written gives NaN."""
    cache = model.make_kv_cache(-(-num_tokens // BLOCK_SIZE) + 1, BLOCK_SIZE)
    cache.data.fill_(torch.nan)
    if cache.recurrent is not None:
        for state in cache.recurrent.tensors:
            state.fill_(torch.nan if state.is_floating_point() else 7)
    return cache


@torch.inference_mode()
def logits_of(
    model: CausalLM,
    ids: Sequence[int],
    *,
    chunks: Sequence[int] | None = None,
    num_layers: int | None = None,
    adapter_slots: Tensor | None = None,
) -> Tensor:
    """Logits after each of ``ids``, [len(ids), vocab], fed in ``chunks`` (one by default).

    The sequence's blocks lie in the pool in reverse order.
    """
    with model.device:
        return _logits_of(model, ids, chunks or [len(ids)], num_layers, adapter_slots)


def _logits_of(
    model: CausalLM,
    ids: Sequence[int],
    chunks: Sequence[int],
    num_layers: int | None,
    adapter_slots: Tensor | None,
) -> Tensor:
    cache = cache_for(model, len(ids))
    table = torch.arange(cache.num_blocks - 1, -1, -1, dtype=torch.int32)[None]
    out, start = [], 0
    for length in chunks:
        positions = torch.arange(start, start + length)
        slots = table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, length], dtype=torch.int32),
            context_lens=torch.tensor([start], dtype=torch.int32),
            seq_lens=torch.tensor([start + length], dtype=torch.int32),
            block_table=table,
            slot_mapping=slots,
            max_query_len=length,
            uniform=True,
            adapter_slots=None if adapter_slots is None else adapter_slots[start : start + length],
            state_rows=torch.zeros(1, dtype=torch.int64),
        )
        token_ids = torch.tensor(ids[start : start + length])
        hidden = model.forward(token_ids, positions, cache, metadata, num_layers=num_layers)
        out.append(model.compute_logits(hidden))
        start += length
    assert start == len(ids)
    return torch.cat(out)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |a - b| / max |b|; NaN where either has one."""
    return float((actual - expected).abs().max() / expected.abs().max())
