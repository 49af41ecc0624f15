"""Paged attention for uniform batches in one launch, the keys shared out among programs.

Shape letters: R requests, Q query rows per request, H query heads, G key/value heads, D head size,
N blocks of the pool, B block size, M rows of a tile.

A tile holds query rows of one request and one key/value head: row ``i`` is query ``i // group`` of
head ``i % group``, so that a key is read once for all of them and no tile crosses a head's border.
"""

import triton
import triton.language as tl

from specdec.kernels.attention_tree import (
    attend_leaves,
    empty_part,
    fold,
    normalise,
    scalar_at,
)
from specdec.kernels.launch import wait_for_inputs


@triton.jit
def _leaves_before_window(context_lens, leaves, LEAF: tl.constexpr, WINDOW: tl.constexpr):
    """Leaves of the first ones of ``leaves`` that not even a request's first row sees."""
    skipped = leaves * 0
    if WINDOW > 0:
        skipped = tl.minimum(tl.maximum(context_lens - (WINDOW - 1), 0) // LEAF, leaves)
    return skipped


@triton.jit
def _load_part(
    parts,
    index,
    num_units,
    first_item,
    item_stride,
    rows,
    row_mask,
    PART: tl.constexpr,
    PART_ROWS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The stored part of unit ``index``; the part of no key where there is no such unit."""
    row_mask = row_mask & (index >= 0) & (index < num_units)
    features = tl.arange(0, BLOCK_V)
    part = parts + tl.cast(first_item + index * item_stride, tl.int64) * PART
    offsets = features[:, None] * PART_ROWS + rows[None, :]
    mask = (features < DV)[:, None] & row_mask[None, :]
    # Written by other programs of this launch, so not to be looked up in this one's L1 cache.
    acc = tl.load(part + offsets, mask=mask, other=0.0, cache_modifier=".cg")
    sums = part + PART_ROWS * DV + rows
    top = tl.load(sums, mask=row_mask, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(sums + PART_ROWS, mask=row_mask, other=0.0, cache_modifier=".cg")
    return top, mass, acc


@triton.jit
def fold_parts(
    parts,
    first_item,
    num_units,
    item_stride,
    first_unit,
    unit,
    rows,
    row_mask,
    scale_log2,
    PART: tl.constexpr,
    PART_ROWS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NODE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Fold the stored parts of one tile in the order of the tree. Units are leaves or nodes, of
    which ``first_unit`` is the first that was stored.

    With AHEAD the parts of a node's worth of units are all asked for before the first is folded.
    """
    top, mass, acc = empty_part(BLOCK_M, BLOCK_V)
    node_top, node_mass, node_acc = empty_part(BLOCK_M, BLOCK_V)
    units_per_node = NODE // unit
    if AHEAD:
        tl.static_assert(NODE == 4)
        for index in range(-(first_unit % units_per_node), num_units, 4):
            # Written out: a list of tensors does not outlive an iteration.
            t0, m0, a0 = _load_part(
                parts, index, num_units, first_item, item_stride, rows, row_mask,
                PART, PART_ROWS, DV, BLOCK_V,
            )  # fmt: skip
            t1, m1, a1 = _load_part(
                parts, index + 1, num_units, first_item, item_stride, rows, row_mask,
                PART, PART_ROWS, DV, BLOCK_V,
            )  # fmt: skip
            t2, m2, a2 = _load_part(
                parts, index + 2, num_units, first_item, item_stride, rows, row_mask,
                PART, PART_ROWS, DV, BLOCK_V,
            )  # fmt: skip
            t3, m3, a3 = _load_part(
                parts, index + 3, num_units, first_item, item_stride, rows, row_mask,
                PART, PART_ROWS, DV, BLOCK_V,
            )  # fmt: skip
            if units_per_node == 1:
                top, mass, acc = fold(top, mass, acc, t0, m0, a0, scale_log2)
                top, mass, acc = fold(top, mass, acc, t1, m1, a1, scale_log2)
                top, mass, acc = fold(top, mass, acc, t2, m2, a2, scale_log2)
                top, mass, acc = fold(top, mass, acc, t3, m3, a3, scale_log2)
            else:
                t0, m0, a0 = fold(t0, m0, a0, t1, m1, a1, scale_log2)
                t0, m0, a0 = fold(t0, m0, a0, t2, m2, a2, scale_log2)
                t0, m0, a0 = fold(t0, m0, a0, t3, m3, a3, scale_log2)
                top, mass, acc = fold(top, mass, acc, t0, m0, a0, scale_log2)
    else:
        for index in tl.range(0, num_units, num_stages=3):
            part_top, part_mass, part_acc = _load_part(
                parts, index, num_units, first_item, item_stride, rows, row_mask,
                PART, PART_ROWS, DV, BLOCK_V,
            )  # fmt: skip
            node_top, node_mass, node_acc = fold(
                node_top, node_mass, node_acc, part_top, part_mass, part_acc, scale_log2
            )
            if (first_unit + index) % units_per_node == units_per_node - 1:
                top, mass, acc = fold(top, mass, acc, node_top, node_mass, node_acc, scale_log2)
                node_top, node_mass, node_acc = empty_part(BLOCK_M, BLOCK_V)
    return fold(top, mass, acc, node_top, node_mass, node_acc, scale_log2)


@triton.jit(do_not_specialize=["num_reqs", "table_stride", "max_leaf_items", "max_items"])
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
    PDL: tl.constexpr,
):
    """Q query rows for every request; the keys of a request are shared out among programs.

    An item is (unit of keys, head, tile, slice of the values' features). The unit, which no bit
    depends on, is a leaf where that still gives each multiprocessor at most an item, else a node.
    It is all keys where a tile is at most a third of a multiprocessor's share, so that whole tiles
    balance, or where there are more nodes than room for their parts. Whoever stores the last part
    of a slice folds them all. Slices share out values and folding; each computes the scores anew.
    """
    wait_for_inputs(PDL)
    heads_and_tiles = NUM_KV_HEADS * TILES * SLICES
    early: tl.constexpr = AHEAD and BLOCK_R == 1 and WINDOW == 0
    known = 0
    if early:
        # Blocks of this program's item where units are leaves, asked for beside the lengths.
        keys = tl.program_id(0) // heads_and_tiles * LEAF + tl.arange(0, LEAF)
        known = tl.load(block_table + tl.minimum(keys // BLOCK_SIZE, table_stride - 1))
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
    ends = tl.cumsum(units, 0)
    num_items = tl.sum(units) * heads_and_tiles

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
        features = tl.arange(0, BLOCK_D)
        token = (req * Q + index // GROUP).to(tl.int64)
        column = (head * GROUP + index % GROUP) * D
        mask = row_mask[:, None] & (features < D)[None, :]
        q_rows = query + (token * query_stride + column)[:, None]
        q = tl.load(q_rows + features[None, :], mask=mask, other=0.0)

        first_leaf = (first_unit + flat - first_item) * unit
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
            early,
        )

        values = tl.arange(0, BLOCK_V)
        is_last = num_units == 1
        if num_units > 1:
            part = parts + tl.cast(item, tl.int64) * PART
            offsets = values[:, None] * PART_ROWS + rows[None, :]
            tl.store(part + offsets, acc, mask=(values < DV)[:, None] & row_mask[None, :])
            tl.store(part + PART_ROWS * DV + rows, top, mask=row_mask)
            tl.store(part + PART_ROWS * (DV + 1) + rows, mass, mask=row_mask)
            # All threads have stored before one of them announces it.
            tl.debug_barrier()
            counter = counters + req * heads_and_tiles + place
            is_last = tl.atomic_add(counter, 1, sem="acq_rel") == num_units - 1
            if is_last:
                tl.store(counter, 0)
                top, mass, acc = fold_parts(
                    parts,
                    first_item * heads_and_tiles + place,
                    num_units,
                    heads_and_tiles,
                    first_unit,
                    tl.minimum(unit, NODE),
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
