"""Parts of an attention result, as the programs of one launch hand them to each other.

Shape letters: M rows of a tile, D head size. A part is (top, mass, acc) of ``attention_tree``.
"""

import triton
import triton.language as tl

from specdec.kernels.attention_tree import empty_part, fold


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


@triton.jit
def fold_if_last(
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
    PART: tl.constexpr,
    PART_ROWS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NODE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Store the part of an item, if it is not the whole; whoever stores the last one folds all.

    Returns whether this program has the whole, and that.
    """
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
    return is_last, mass, acc
