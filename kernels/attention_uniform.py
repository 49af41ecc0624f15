"""Paged attention for uniform batches in one launch, the keys shared out among programs.

Shape letters: R requests, Q query rows per request, H query heads, G key/value heads, D head size,
N blocks of the pool, B block size, M rows of a tile.

A tile holds query rows of one request and one key/value head: row ``i`` is query ``i // group`` of
head ``i % group``, so that a key is read once for all of them and no tile crosses a head's border.
"""

import triton
import triton.language as tl

from specdec.kernels.attention_parts import fold_if_last
from specdec.kernels.attention_tree import (
    attend_leaf,
    attend_leaves,
    load_leaf,
    normalise,
    scalar_at,
)
from specdec.kernels.launch import wait_for_inputs, wait_unless_early


@triton.jit
def _leaves_before_window(context_lens, leaves, LEAF: tl.constexpr, WINDOW: tl.constexpr):
    """Leaves of the first ones of ``leaves`` that not even a request's first row sees."""
    skipped = leaves * 0
    if WINDOW > 0:
        skipped = tl.minimum(tl.maximum(context_lens - (WINDOW - 1), 0) // LEAF, leaves)
    return skipped


@triton.jit
def share_out(
    context_lens,
    seq_lens,
    num_reqs,
    heads_and_tiles,
    max_leaf_items,
    max_items,
    Q: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LEAF: tl.constexpr,
    NODE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Leaves of a unit, and the end of each request's units among all. [], [BLOCK_R], [BLOCK_R]

    The unit, which no bit depends on, is a leaf where that still gives each multiprocessor at most
    an item, else a node. It is all keys where a tile is at most a third of a multiprocessor's
    share, so that whole tiles balance, or where there are more nodes than room for their parts.
    """
    requests = tl.arange(0, BLOCK_R)
    present = requests < num_reqs
    contexts = tl.load(context_lens + requests, mask=present, other=0)
    lens = tl.minimum(contexts + Q, tl.load(seq_lens + requests, mask=present, other=0))
    leaves = (tl.maximum(lens, 0) + LEAF - 1) // LEAF
    skipped = _leaves_before_window(contexts, leaves, LEAF, WINDOW)
    # A request without keys still has an item, which writes its zeros.
    least = present.to(tl.int32)
    unit = 1
    units = tl.maximum(leaves - skipped, least)
    if tl.sum(units) * heads_and_tiles > max_leaf_items:
        unit = NODE
        share = tl.sum(leaves - skipped) * heads_and_tiles
        balanced = tl.max(leaves - skipped, axis=0) * max_leaf_items * 3 <= share
        units = tl.maximum((leaves + NODE - 1) // NODE - skipped // NODE, least)
        if balanced or tl.sum(units) * heads_and_tiles > max_items:
            unit = 1 << 30
            units = least
    return unit, units, tl.cumsum(units, 0)


@triton.jit
def _load_query(
    query,
    req,
    head,
    tile,
    query_stride,
    Q: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Query rows of a tile, zero past the head size. [BLOCK_M, BLOCK_D]"""
    rows = tl.arange(0, BLOCK_M)
    index = tile * TILE_ROWS + rows
    row_mask = (rows < TILE_ROWS) & (index < Q * GROUP)
    features = tl.arange(0, BLOCK_D)
    token = (req * Q + index // GROUP).to(tl.int64)
    column = (head * GROUP + index % GROUP) * D
    mask = row_mask[:, None] & (features < D)[None, :]
    q_rows = query + (token * query_stride + column)[:, None]
    return tl.load(q_rows + features[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_reqs", "table_stride", "max_leaf_items", "max_items", "early"])
def uniform_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    context_lens,
    seq_lens,
    out,
    parts,  # [items, PART] float32: acc [DV, PART_ROWS], top and mass [PART_ROWS] of each item
    counters,  # [R * G * TILES * SLICES] int32: parts that have arrived
    num_reqs,
    query_stride,
    table_stride,
    max_leaf_items,
    max_items,
    scale_log2,
    cap_scale,
    early,
    Q: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILES: tl.constexpr,
    SLICES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PART: tl.constexpr,
    PART_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LEAF: tl.constexpr,
    NODE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Q query rows for every request; the keys of a request are shared out among programs.

    An item is (unit of keys, head, tile, slice of the values' features). Whoever stores the last
    part of a slice folds them all. Slices share out values and folding; each computes the scores
    anew.

    With KEYS_FIRST a program reads what it needs of the keys before ``context_lens`` while the
    kernel before this one still runs. That one may write queries and newer keys, and nothing else
    that is read here.
    """
    if KEYS_FIRST:
        wait_unless_early(early, PDL)
    else:
        wait_for_inputs(PDL)
    heads_and_tiles = NUM_KV_HEADS * TILES * SLICES
    ask_early: tl.constexpr = AHEAD and BLOCK_R == 1 and WINDOW == 0 and not KEYS_FIRST
    known = 0
    if ask_early:
        # Blocks of this program's item where units are leaves, asked for beside the lengths.
        keys = tl.program_id(0) // heads_and_tiles * LEAF + tl.arange(0, LEAF)
        known = tl.load(block_table + tl.minimum(keys // BLOCK_SIZE, table_stride - 1))
    unit, units, ends = share_out(
        context_lens,
        seq_lens,
        num_reqs,
        heads_and_tiles,
        max_leaf_items,
        max_items,
        Q,
        BLOCK_R,
        LEAF,
        NODE,
        WINDOW,
    )
    num_items = tl.sum(units) * heads_and_tiles
    if KEYS_FIRST:
        # One leaf for each program, if leaves are that few.
        flat = tl.program_id(0) // heads_and_tiles
        req = tl.minimum(tl.sum((ends <= flat).to(tl.int32)), num_reqs - 1)
        has_leaf = (unit == 1) & (tl.program_id(0) < num_items) & (num_items <= tl.num_programs(0))
        leaf = flat - scalar_at(ends, req, BLOCK_R) + scalar_at(units, req, BLOCK_R)
        keys = leaf * LEAF + tl.arange(0, LEAF)
        context_len = tl.load(context_lens + req)
        num_keys = tl.minimum(context_len + Q, tl.load(seq_lens + req))
        held = has_leaf & (keys < num_keys)
        table = block_table + req.to(tl.int64) * table_stride
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=held, other=0)
        place = tl.program_id(0) % heads_and_tiles
        first_key = place // (TILES * SLICES) * D
        first_value = first_key + place % SLICES * BLOCK_V
        is_old = held & (keys < context_len)
        is_new = held & (keys >= context_len)
        old_k, old_v = load_leaf(
            keys, is_old, key_cache + first_key, value_cache + first_value, blocks,
            D, BLOCK_D, BLOCK_V, BLOCK_SIZE, NUM_KV_HEADS * D,
        )  # fmt: skip
        wait_for_inputs(PDL)
        q = tl.zeros([BLOCK_M, BLOCK_D], query.dtype.element_ty)
        if has_leaf:
            q = _load_query(
                query, req, place // (TILES * SLICES), place // SLICES % TILES, query_stride,
                Q, GROUP, TILE_ROWS, D, BLOCK_M, BLOCK_D,
            )  # fmt: skip
            new_k, new_v = load_leaf(
                keys, is_new, key_cache + first_key, value_cache + first_value, blocks,
                D, BLOCK_D, BLOCK_V, BLOCK_SIZE, NUM_KV_HEADS * D,
            )  # fmt: skip
            old_k = tl.where(is_new[:, None], new_k, old_k)
            old_v = tl.where(is_new[:, None], new_v, old_v)

    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        place = item % heads_and_tiles
        head = place // (TILES * SLICES)
        tile = place // SLICES % TILES
        first_value = place % SLICES * BLOCK_V
        flat = item // heads_and_tiles
        req = tl.sum((ends <= flat).to(tl.int32))
        num_units = scalar_at(units, req, BLOCK_R)
        first_item = scalar_at(ends, req, BLOCK_R) - num_units
        context_len = tl.load(context_lens + req)
        seq_len = tl.load(seq_lens + req)
        num_keys = tl.maximum(tl.minimum(context_len + Q, seq_len), 0)
        num_leaves = (num_keys + LEAF - 1) // LEAF
        before = _leaves_before_window(context_len, num_leaves, LEAF, WINDOW)
        first_unit = before // unit

        rows = tl.arange(0, BLOCK_M)
        index = tile * TILE_ROWS + rows
        row_mask = (rows < TILE_ROWS) & (index < Q * GROUP)
        last = tl.minimum(context_len + index // GROUP, seq_len - 1)
        last = tl.where(row_mask, last, -1)
        earliest = last
        if WINDOW > 0:
            earliest = context_len + index // GROUP - (WINDOW - 1)
        token = (req * Q + index // GROUP).to(tl.int64)
        column = (head * GROUP + index % GROUP) * D

        first_leaf = (first_unit + flat - first_item) * unit
        if KEYS_FIRST:
            if has_leaf:
                # A single leaf folds to itself.
                top, mass, acc = attend_leaf(
                    tl.trans(q), old_k, old_v, keys, last, earliest, scale_log2, cap_scale,
                    LEAF, WINDOW > 0, CAPPED, PRECISION,
                )  # fmt: skip
            else:
                q_again = _load_query(
                    query, req, head, tile, query_stride,
                    Q, GROUP, TILE_ROWS, D, BLOCK_M, BLOCK_D,
                )  # fmt: skip
                top, mass, acc = attend_leaves(
                    tl.trans(q_again),
                    last,
                    earliest,
                    tl.maximum(first_leaf, before),
                    tl.minimum(num_leaves - first_leaf, unit) + first_leaf,
                    num_keys,
                    key_cache + head * D,
                    value_cache + head * D + first_value,
                    block_table + req.to(tl.int64) * table_stride,
                    known,
                    unit == 1,
                    scale_log2,
                    cap_scale,
                    D,
                    BLOCK_M,
                    BLOCK_D,
                    BLOCK_V,
                    BLOCK_SIZE,
                    NUM_KV_HEADS * D,
                    LEAF,
                    NODE,
                    STAGES,
                    WINDOW > 0,
                    CAPPED,
                    PRECISION,
                    ask_early,
                )
        else:
            q = _load_query(
                query, req, head, tile, query_stride, Q, GROUP, TILE_ROWS, D, BLOCK_M, BLOCK_D
            )
            top, mass, acc = attend_leaves(
                tl.trans(q),
                last,
                earliest,
                tl.maximum(first_leaf, before),
                tl.minimum(num_leaves - first_leaf, unit) + first_leaf,
                num_keys,
                key_cache + head * D,
                value_cache + head * D + first_value,
                block_table + req.to(tl.int64) * table_stride,
                known,
                unit == 1,
                scale_log2,
                cap_scale,
                D,
                BLOCK_M,
                BLOCK_D,
                BLOCK_V,
                BLOCK_SIZE,
                NUM_KV_HEADS * D,
                LEAF,
                NODE,
                STAGES,
                WINDOW > 0,
                CAPPED,
                PRECISION,
                ask_early,
            )

        values = tl.arange(0, BLOCK_V)
        is_last, mass, acc = fold_if_last(
            top,
            mass,
            acc,
            parts,
            counters,
            item,
            place,
            req,
            first_item,
            num_units,
            heads_and_tiles,
            first_unit,
            unit,
            rows,
            row_mask,
            scale_log2,
            PART,
            PART_ROWS,
            DV,
            BLOCK_M,
            BLOCK_V,
            NODE,
            AHEAD,
        )
        if is_last:
            target = out + (token * (NUM_KV_HEADS * GROUP * D) + column + first_value)[:, None]
            result = tl.trans(normalise(mass, acc).to(out.dtype.element_ty))
            stored = row_mask[:, None] & (values < DV)[None, :]
            tl.store(target + values[None, :], result, mask=stored)
