"""Latent attention in Triton: 1 + k rows of every head over one cached row per key.

The arithmetic is that of ``attention_tree``: leaves and nodes at fixed absolute positions, so that
a row's bits depend on nothing beside it. The keys of a request are shared out among programs as in
``attention_uniform``, and a key is read once for all rows of a tile.

Shape letters: R requests, Q query rows per request, H query heads, C latent size, P rotated
features, M rows of a tile.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.attention_parts import fold_parts
from specdec.kernels.attention_tree import (
    NODE,
    empty_part,
    fold,
    normalise,
    request_block,
    scalar_at,
)
from specdec.kernels.attention_triton import MAX_SCRATCH_BYTES, Scratch, num_programs
from specdec.kernels.launch import pdl_options, wait_for_inputs


def leaf_size(itemsize: int) -> int:
    """Keys of a leaf. With NODE, this is the tree: changing it changes bits."""
    return 16 if itemsize == 4 else 64


@triton.jit
def _attend_leaf(
    q,  # [BLOCK_C, M], zero past the latent size
    q_rotated,  # [BLOCK_P, M]
    last,  # [M] int32: the last key each row sees; -1 for none
    leaf,
    num_keys,
    cache,
    block_table,  # at the request's row
    scale_log2,
    C: tl.constexpr,
    P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LEAF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One leaf for a tile of query rows: (top [M], mass [M], acc [C, M]) in float32."""
    keys = leaf * LEAF + tl.arange(0, LEAF)
    held = keys < num_keys
    block = tl.load(block_table + keys // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
    row = cache + ((block * BLOCK_SIZE + keys % BLOCK_SIZE) * (C + P))[:, None]
    features = tl.arange(0, BLOCK_C)[None, :]
    latent = tl.load(row + features, mask=held[:, None] & (features < C), other=0.0)
    tail = tl.arange(0, BLOCK_P)[None, :]
    rotated = tl.load(row + C + tail, mask=held[:, None] & (tail < P), other=0.0)

    scores = tl.dot(latent, q, input_precision=PRECISION)  # [LEAF, M]
    scores = tl.dot(rotated, q_rotated, scores, input_precision=PRECISION)
    scores = tl.where(keys[:, None] <= last[None, :], scores, float("-inf"))
    top = tl.max(scores, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top) * scale_log2
    weights = tl.exp2(tl.fma(scores, scale_log2, -base[None, :])).to(latent.dtype)
    acc = tl.dot(tl.trans(latent), weights, input_precision=PRECISION)
    ones = tl.full([64 if latent.dtype.primitive_bitwidth == 16 else 16, LEAF], 1.0, latent.dtype)
    mass = tl.max(tl.dot(ones, weights, input_precision=PRECISION), axis=0)
    return top, mass, acc


@triton.jit(do_not_specialize=["num_reqs", "table_stride", "max_items"])
def latent_kernel(
    query,
    cache,
    block_table,
    table_rows,  # [R] int64: the row of the block table of each request; read where INDIRECT
    context_lens,
    seq_lens,
    out,
    parts,
    counters,
    num_reqs,
    query_stride,
    table_stride,
    max_items,
    scale_log2,
    Q: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PART: tl.constexpr,
    PART_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LEAF: tl.constexpr,
    NODE: tl.constexpr,
    STAGES: tl.constexpr,
    INDIRECT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """An item is (node of keys, tile of rows), or (all keys, tile) where there are too many."""
    wait_for_inputs(PDL)
    requests = tl.arange(0, BLOCK_R)
    present = requests < num_reqs
    lens = tl.load(context_lens + requests, mask=present, other=0) + Q
    lens = tl.minimum(lens, tl.load(seq_lens + requests, mask=present, other=0))
    leaves = (tl.maximum(lens, 0) + LEAF - 1) // LEAF
    # A request without keys still has an item, which writes its zeros.
    least = present.to(tl.int32)
    unit = NODE
    units = tl.maximum((leaves + NODE - 1) // NODE, least)
    if tl.sum(units) * TILES > max_items:
        unit = 1 << 30
        units = least
    ends = tl.cumsum(units, 0)
    num_items = tl.sum(units) * TILES

    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tile = item % TILES
        flat = item // TILES
        req = tl.sum((ends <= flat).to(tl.int32))
        num_units = scalar_at(units, req, BLOCK_R)
        first_item = scalar_at(ends, req, BLOCK_R) - num_units
        context_len = tl.load(context_lens + req)
        seq_len = tl.load(seq_lens + req)
        num_keys = tl.maximum(tl.minimum(context_len + Q, seq_len), 0)
        num_leaves = (num_keys + LEAF - 1) // LEAF
        table_row = req.to(tl.int64)
        if INDIRECT:
            table_row = tl.load(table_rows + req)

        rows = tl.arange(0, BLOCK_M)
        index = tile * TILE_ROWS + rows
        row_mask = (rows < TILE_ROWS) & (index < Q * H)
        last = tl.minimum(context_len + index // H, seq_len - 1)
        last = tl.where(row_mask, last, -1)
        token = (req * Q + index // H).to(tl.int64)
        features = tl.arange(0, BLOCK_C)
        tail = tl.arange(0, BLOCK_P)
        q_row = query + (token * query_stride + (index % H) * (C + P))[:, None]
        q_mask = row_mask[:, None] & (features < C)[None, :]
        q = tl.trans(tl.load(q_row + features[None, :], mask=q_mask, other=0.0))
        tail_mask = row_mask[:, None] & (tail < P)[None, :]
        q_rotated = tl.trans(tl.load(q_row + C + tail[None, :], mask=tail_mask, other=0.0))

        first_leaf = (flat - first_item) * unit
        top, mass, acc = empty_part(BLOCK_M, BLOCK_C)
        node_top, node_mass, node_acc = empty_part(BLOCK_M, BLOCK_C)
        end_leaf = tl.minimum(num_leaves - first_leaf, unit) + first_leaf
        for leaf in tl.range(first_leaf, end_leaf, num_stages=STAGES):
            leaf_top, leaf_mass, leaf_acc = _attend_leaf(
                q,
                q_rotated,
                last,
                leaf,
                num_keys,
                cache,
                block_table + table_row * table_stride,
                scale_log2,
                C,
                P,
                BLOCK_C,
                BLOCK_P,
                BLOCK_SIZE,
                LEAF,
                PRECISION,
            )
            node_top, node_mass, node_acc = fold(
                node_top, node_mass, node_acc, leaf_top, leaf_mass, leaf_acc, scale_log2
            )
            if leaf % NODE == NODE - 1:
                top, mass, acc = fold(top, mass, acc, node_top, node_mass, node_acc, scale_log2)
                node_top, node_mass, node_acc = empty_part(BLOCK_M, BLOCK_C)
        top, mass, acc = fold(top, mass, acc, node_top, node_mass, node_acc, scale_log2)

        is_last = num_units == 1
        if num_units > 1:
            part = parts + tl.cast(item, tl.int64) * PART
            offsets = features[:, None] * PART_ROWS + rows[None, :]
            tl.store(part + offsets, acc, mask=(features < C)[:, None] & row_mask[None, :])
            tl.store(part + PART_ROWS * C + rows, top, mask=row_mask)
            tl.store(part + PART_ROWS * (C + 1) + rows, mass, mask=row_mask)
            # All threads have stored before one of them announces it.
            tl.debug_barrier()
            counter = counters + req * TILES + tile
            is_last = tl.atomic_add(counter, 1, sem="acq_rel") == num_units - 1
            if is_last:
                tl.store(counter, 0)
                top, mass, acc = fold_parts(
                    parts,
                    first_item * TILES + tile,
                    num_units,
                    TILES,
                    0,
                    NODE,
                    rows,
                    row_mask,
                    scale_log2,
                    PART,
                    PART_ROWS,
                    C,
                    BLOCK_M,
                    BLOCK_C,
                    NODE,
                    False,
                )
        if is_last:
            target = out + (token * (H * C) + (index % H) * C)[:, None] + features[None, :]
            result = tl.trans(normalise(mass, acc).to(out.dtype.element_ty))
            tl.store(target, result, mask=q_mask)


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
    *,
    scratch: Scratch | None = None,
) -> Tensor:
    """Triton side of ``specdec.kernels.latent_attention.latent_attention``.

    ``scratch`` is kept between calls by whoever captures graphs; without it a call makes its own.
    """
    query = query if query.stride()[1:] == (query.shape[2], 1) else query.contiguous()
    table_rows = query_start_loc
    if not uniform:
        # Every row as a request of its own: the tree gives it the same bits.
        table_rows, context_lens, seq_lens = _rows_as_requests(
            query.shape[0], query_start_loc, context_lens, seq_lens
        )
        max_query_len = 1
    num_rows, heads, width = query.shape
    num_reqs = context_lens.shape[0]
    block_c = max(16, triton.next_power_of_2(latent_size))
    leaf = leaf_size(query.itemsize)
    rows = max_query_len * heads
    tiles = triton.cdiv(rows, 16)
    tile_rows = triton.cdiv(rows, tiles)
    part_rows = 4 * triton.cdiv(tile_rows, 4)
    part_size = 32 * triton.cdiv(part_rows * (latent_size + 2), 32)
    max_nodes = triton.cdiv(block_table.shape[1] * cache.shape[1], leaf * NODE)
    tiles_of_batch = num_reqs * tiles
    programs = num_programs(query.device, 1)
    max_items = min(tiles_of_batch * max_nodes, MAX_SCRATCH_BYTES // (4 * part_size))
    scratch = scratch or Scratch()
    out = torch.empty(num_rows, heads, latent_size, dtype=query.dtype, device=query.device)
    options: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False, **pdl_options(query)}
    latent_kernel[(min(programs, tiles_of_batch * max_nodes),)](
        query,
        cache,
        block_table,
        table_rows,
        context_lens,
        seq_lens,
        out,
        scratch.parts(max_items * part_size, query),
        scratch.counters(tiles_of_batch, query),
        num_reqs,
        query.stride(0),
        block_table.stride(0),
        max_items,
        scale * math.log2(math.e),
        Q=max_query_len,
        H=heads,
        C=latent_size,
        P=width - latent_size,
        BLOCK_C=block_c,
        BLOCK_P=max(16, triton.next_power_of_2(width - latent_size)),
        BLOCK_SIZE=cache.shape[1],
        TILES=tiles,
        TILE_ROWS=tile_rows,
        PART=part_size,
        PART_ROWS=part_rows,
        BLOCK_M=16,
        BLOCK_R=request_block(num_reqs),
        LEAF=leaf,
        NODE=NODE,
        STAGES=2 if query.itemsize == 2 else 1,
        INDIRECT=not uniform,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        **options,
    )
    return out


def _rows_as_requests(
    num_rows: int, query_start_loc: Tensor, context_lens: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The table row [T] int64, position and number of keys [T] int32 of every query row."""
    row = torch.arange(num_rows, device=query_start_loc.device, dtype=torch.int32)
    request = torch.searchsorted(query_start_loc[1:], row, right=True)
    inside = request < context_lens.shape[0]
    request = request.clamp_max(context_lens.shape[0] - 1)
    position = context_lens[request] + row - query_start_loc[request]
    num_keys = torch.where(inside, seq_lens[request].minimum(position + 1), 0)
    return request, position, num_keys.clamp_min(0)
