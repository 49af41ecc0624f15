"""Attention over a paged key/value cache.

Shape letters: T query rows, R requests, Q query rows per request, H query heads, G key/value heads,
D head size, N blocks of the pool, B block size, W width of a block table.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    context_lens: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    uniform: bool,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Plain PyTorch twin of ``paged_attention``, over the whole width of the block table.

    Reads nothing on the host, so that it can be captured; memory grows with R * Q * H * W * B.
    """
    num_rows, num_heads, head_size = query.shape
    num_reqs, table_width = block_table.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    num_keys = table_width * block_size
    device = query.device

    # Requests of different lengths are padded to max_query_len rows each.
    offsets = torch.arange(max_query_len, device=device)
    rows = query_start_loc[:-1, None] + offsets  # [R, Q]
    inside = rows < query_start_loc[1:, None]
    padded = query if uniform else query[rows.clamp(max=num_rows - 1)]
    padded = padded.view(num_reqs, max_query_len, num_kv_heads, -1, head_size)

    # Slots that are not keys of the request may hold anything, NaN included, and so may the table
    # past the request's blocks.
    positions = torch.arange(num_keys, device=device)
    valid = positions < seq_lens[:, None]  # [R, W * B]
    pages = torch.where(valid[:, ::block_size], block_table, 0)
    shape = (num_reqs, num_keys, num_kv_heads, head_size)
    held = valid[:, :, None, None]
    keys = torch.where(held, key_cache[pages].view(shape), 0).float()
    values = torch.where(held, value_cache[pages].view(shape), 0).float()

    last = context_lens[:, None] + offsets  # [R, Q]: the last key each row may see
    visible = valid[:, None] & (positions <= last[..., None]) & inside[..., None]  # [R, Q, W * B]
    if sliding_window is not None:
        visible &= positions > last[..., None] - sliding_window
    scores = torch.einsum("rqgpd,rngd->rgpqn", padded.float(), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    # A weight of zero does not silence a value that is not finite: such a value counts as zero for
    # the rows that do not see it, and makes the others NaN.
    unsound = ~values.isfinite().all(dim=-1)  # [R, W * B, G]
    values = torch.where(unsound[..., None], 0, values)
    broken = torch.einsum("rqn,rng->rqg", visible.float(), unsound.float()) > 0
    out = torch.einsum("rgpqn,rngd->rqgpd", weights, values)
    out = out.masked_fill(broken[..., None, None], torch.nan)
    out = torch.where(visible.any(dim=-1)[..., None, None, None], out, 0).to(query.dtype)
    out = out.reshape(num_reqs * max_query_len, num_heads, head_size)
    if uniform:
        return out
    # One dump row takes the padding of short requests; rows of no request stay zero.
    target = torch.where(inside, rows, num_rows).view(-1)
    return query.new_zeros(num_rows + 1, num_heads, head_size).index_copy_(0, target, out)[:-1]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    context_lens: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    uniform: bool,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Causal attention of every query row over its request's keys. query [T, H, D] -> [T, H, D].

    key_cache, value_cache [N + 1, B, G, D]; block_table [R, W] int32; query_start_loc [R + 1],
    context_lens and seq_lens [R] int32. Query row ``j`` of request ``r`` sees the keys
    ``0 .. min(context_lens[r] + j, seq_lens[r] - 1)``; a row that sees none gives zeros, and keys
    past ``seq_lens[r]`` are never read. ``uniform`` says that every request has exactly
    ``max_query_len`` rows. With a ``sliding_window`` a row at position p sees none of the keys
    before ``p - sliding_window + 1``; with a ``soft_cap`` a score s counts as
    ``soft_cap * tanh(s / soft_cap)`` (Gemma 2, arXiv:2408.00118).
    """
    run: Callable[..., Tensor] = paged_attention_reference
    if query.is_cuda:
        from specdec.kernels import attention_triton

        run = attention_triton.paged_attention
    return run(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        context_lens,
        seq_lens,
        max_query_len,
        scale,
        uniform,
        sliding_window,
        soft_cap,
    )
