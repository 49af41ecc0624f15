"""Paged attention for batches of any query lengths: prompts, chunks of them and decode rows mixed.

Shape letters: T query rows, R requests, H query heads, G key/value heads, D head size, M rows of a
tile. Tiles are laid out as in ``attention_uniform``.
"""

import triton
import triton.language as tl

from specdec.kernels.attention_tree import attend_leaves, normalise, scalar_at


@triton.jit(do_not_specialize=["num_reqs", "table_stride"])
def mixed_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    query_start_loc,
    context_lens,
    seq_lens,
    out,
    num_reqs,
    query_stride,
    table_stride,
    scale_log2,
    cap_scale,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LEAF: tl.constexpr,
    NODE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Any number of query rows per request; a program walks all keys of TILE_TOKENS of them."""
    head = tl.program_id(0)
    requests = tl.arange(0, BLOCK_R)
    present = requests < num_reqs
    starts = tl.load(query_start_loc + requests, mask=present, other=0)
    query_lens = tl.load(query_start_loc + requests + 1, mask=present, other=0) - starts
    tiles = (query_lens + TILE_TOKENS - 1) // TILE_TOKENS
    ends = tl.cumsum(tiles, 0)
    # The longest walks of a prompt are its last tiles: they start first.
    tile = tl.sum(tiles) - 1 - tl.program_id(1)
    if tile < 0:
        return
    req = tl.sum((ends <= tile).to(tl.int32))
    start = scalar_at(starts, req, BLOCK_R)
    query_len = scalar_at(query_lens, req, BLOCK_R)
    first = (tile - scalar_at(ends - tiles, req, BLOCK_R)) * TILE_TOKENS
    context_len = tl.load(context_lens + req)
    seq_len = tl.load(seq_lens + req)
    end = tl.minimum(first + TILE_TOKENS, query_len)
    num_keys = tl.maximum(tl.minimum(context_len + end, seq_len), 0)

    rows = tl.arange(0, BLOCK_M)
    index = first + rows // GROUP
    row_mask = (rows < TILE_TOKENS * GROUP) & (index < query_len)
    last = tl.where(row_mask, tl.minimum(context_len + index, seq_len - 1), -1)
    earliest = last
    first_leaf = 0
    if WINDOW > 0:
        earliest = context_len + index - (WINDOW - 1)
        first_leaf = tl.maximum(context_len + first - (WINDOW - 1), 0) // LEAF
    features = tl.arange(0, BLOCK_D)
    token = (start + index).to(tl.int64)
    column = (head * GROUP + rows % GROUP) * D
    mask = row_mask[:, None] & (features < D)[None, :]
    q_rows = query + (token * query_stride + column)[:, None]
    q = tl.load(q_rows + features[None, :], mask=mask, other=0.0)
    _top, mass, acc = attend_leaves(
        tl.trans(q),
        last,
        earliest,
        first_leaf,
        (num_keys + LEAF - 1) // LEAF,
        num_keys,
        key_cache + head * D,
        value_cache + head * D,
        block_table + req.to(tl.int64) * table_stride,
        0,
        False,
        scale_log2,
        cap_scale,
        D,
        BLOCK_M,
        BLOCK_D,
        BLOCK_D,
        BLOCK_SIZE,
        NUM_KV_HEADS * D,
        LEAF,
        NODE,
        STAGES,
        WINDOW > 0,
        CAPPED,
        PRECISION,
        False,
    )
    target = out + (token * (NUM_KV_HEADS * GROUP * D) + column)[:, None] + features[None, :]
    tl.store(target, tl.trans(normalise(mass, acc).to(out.dtype.element_ty)), mask=mask)
