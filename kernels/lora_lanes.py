"""Deltas of several slots in one product: their ranks stand side by side in its lanes.

A row is zero in the lanes of slots that are not its own. A zero adds nothing, to the bit, as long
as the expanding weights are finite, which ``LoraSlots.pack`` sees to.

Shape letters: N output features, r rank of a slot, S adapter slots, G slots of the batch, J slots
in one product.
"""

import triton
import triton.language as tl


@triton.jit
def _slot_of_lane(tile_slot, first, num_groups, BLOCK_R: tl.constexpr, J: tl.constexpr):
    """The slot of each of J * BLOCK_R lanes, those of one slot together; negative of none."""
    groups = first + tl.arange(0, J * BLOCK_R) // BLOCK_R
    return tl.load(tile_slot + groups, mask=groups < num_groups, other=-2)


@triton.jit
def _load_expanding(
    b_stack,
    lane_slots,  # [J * BLOCK_R]
    columns,
    column_mask,
    b_stride,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    J: tl.constexpr,
):
    """The columns' expanding weights of J slots side by side. [columns, J * BLOCK_R]"""
    ranks = tl.arange(0, J * BLOCK_R) % BLOCK_R
    source = b_stack + lane_slots.to(tl.int64)[None, :] * b_stride
    source += columns[:, None] * RANK + ranks[None, :]
    mask = column_mask[:, None] & ((lane_slots >= 0) & (ranks < RANK))[None, :]
    return tl.load(source, mask=mask, other=0.0)


@triton.jit
def _spread(shrunk, slots, lane_slots, BLOCK_R: tl.constexpr, J: tl.constexpr):
    """Each row's shrunk values in the lanes of its own slot, zero in the others'."""
    wide = tl.broadcast_to(shrunk[:, None, :], [shrunk.shape[0], J, BLOCK_R])
    wide = wide.reshape(shrunk.shape[0], J * BLOCK_R)
    return tl.where(slots[:, None] == lane_slots[None, :], wide, tl.zeros_like(wide))


@triton.jit
def expand_lanes(
    shrunk,  # [rows, BLOCK_R], ``A x`` of each row
    slots,  # [rows]
    b_stack,  # [S, N, r], slots b_stride apart
    tile_slot,  # [G] int32: the slots of the batch, each once; negative where there is none
    first_group,  # the first of them that counts
    num_groups,
    columns,
    column_mask,
    b_stride,
    dtype: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    J: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The rows' deltas, rounded to ``dtype``, as float32. [rows, columns]"""
    lanes = _slot_of_lane(tile_slot, first_group, num_groups, BLOCK_R, J)
    b = _load_expanding(b_stack, lanes, columns, column_mask, b_stride, RANK, BLOCK_R, J)
    wide = _spread(shrunk, slots, lanes, BLOCK_R, J)
    delta = tl.dot(wide, tl.trans(b), input_precision=PRECISION)
    for first in range(first_group + J, num_groups, J):
        # Slots are counted from the front: after a negative one there are no more.
        if tl.load(tile_slot + first) >= 0:
            lanes = _slot_of_lane(tile_slot, first, num_groups, BLOCK_R, J)
            b = _load_expanding(b_stack, lanes, columns, column_mask, b_stride, RANK, BLOCK_R, J)
            wide = _spread(shrunk, slots, lanes, BLOCK_R, J)
            delta = tl.dot(wide, tl.trans(b), delta, input_precision=PRECISION)
    return delta.to(dtype).to(tl.float32)
