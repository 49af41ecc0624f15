"""Attention over a paged cache of latents: one vector per token stands for keys and values alike.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in its absorbed form: a query carries
the key projection in it, so that every head reads the same cached row, whose leading features are
also its value, before the value projection.

Shape letters: T query rows, R requests, H query heads, C latent size, P rotated features, N blocks
of the pool, B block size, W width of a block table.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.kernels.attention import paged_attention_reference


def latent_attention_reference(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    context_lens: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    uniform: bool,
    latent_size: int,
) -> Tensor:
    """Plain PyTorch twin of ``latent_attention``: attention with one head of keys and values."""
    tables = (block_table, query_start_loc, context_lens, seq_lens)
    row = cache[:, :, None]
    out = paged_attention_reference(query, row, row, *tables, max_query_len, scale, uniform)
    return out[..., :latent_size]


def latent_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    context_lens: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    uniform: bool,
    latent_size: int,
) -> Tensor:
    """Causal attention of every query row and head over its request's latents: [T, H, C].

    query [T, H, C + P]: the absorbed part, then the rotated part; cache [N + 1, B, C + P] likewise.
    The other arguments, and which keys a row sees, are those of ``paged_attention``.
    """
    run: Callable[..., Tensor] = latent_attention_reference
    if query.is_cuda:
        from specdec.kernels import latent_triton

        run = latent_triton.latent_attention
    return run(
        query,
        cache,
        block_table,
        query_start_loc,
        context_lens,
        seq_lens,
        max_query_len,
        scale,
        uniform,
        latent_size,
    )


def write_latent(latent: Tensor, rotated: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the rows of a pass to the cache, in place. Rows at PAD_SLOT_ID go to the last block.

    latent [T, C], rotated [T, P], cache [N + 1, B, C + P], slot_mapping [T] int64. A row that is
    not finite is stored as zeros with a NaN rotated part: it is seen as NaN by whoever sees it, and
    adds exactly nothing for the others.
    """
    row = torch.cat([latent, rotated], dim=-1)
    broken = ~row.isfinite().all(dim=-1, keepdim=True)
    features = torch.arange(row.shape[-1], device=row.device)
    mark = torch.where(features < latent.shape[-1], 0.0, torch.nan).to(row.dtype)
    slots = cache.view(-1, cache.shape[-1])
    dump = slots.shape[0] - cache.shape[1]
    index = torch.where(slot_mapping < 0, dump, slot_mapping)
    slots.index_copy_(0, index, torch.where(broken, mark, row))
