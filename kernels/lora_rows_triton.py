"""Triton side of ``specdec.kernels.lora_rows``. Letters: T rows, S slots, G tiles."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.lora_rows import SlotTiles, max_tiles, tile_rows

NO_SLOT = tl.constexpr(2**31 - 1)
_BLOCK_T = 1024


@triton.jit(do_not_specialize=["num_rows"])
def _slot_tiles_kernel(
    slot_of_token,  # [T]
    order,  # [T] int32
    tile_slot,  # [G] int32
    tile_first,  # [G] int32
    tile_end,  # [G] int32
    num_rows,
    NUM_TILES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a pass over the rows for each slot that is there, the lowest first."""
    wait_for_inputs(PDL)
    lanes = tl.arange(0, BLOCK_T)
    steps = tl.arange(0, BLOCK_G)
    placed = num_rows * 0
    tile = num_rows * 0
    # Before every slot, so that the first pass only looks for the lowest.
    slot = num_rows * 0 - 2
    while slot < NO_SLOT:
        first = placed
        following = num_rows * 0 + NO_SLOT
        for start in tl.range(0, num_rows, BLOCK_T):
            rows = start + lanes
            slots = tl.load(slot_of_token + rows, mask=rows < num_rows, other=NO_SLOT).to(tl.int32)
            own = slots == slot
            rank = tl.cumsum(own.to(tl.int32), axis=0) - 1
            tl.store(order + placed + rank, rows, mask=own)
            placed += tl.sum(own.to(tl.int32), axis=0)
            above = tl.where(slots > slot, slots, NO_SLOT)
            following = tl.minimum(following, tl.min(above, axis=0))
        count = (placed - first + BLOCK_M - 1) // BLOCK_M
        inside = steps < count
        tl.store(tile_slot + tile + steps, tl.zeros_like(steps) + slot, mask=inside)
        begin = first + steps * BLOCK_M
        tl.store(tile_first + tile + steps, begin, mask=inside)
        tl.store(tile_end + tile + steps, tl.minimum(begin + BLOCK_M, placed), mask=inside)
        tile += count
        slot = following
    unused = (steps >= tile) & (steps < NUM_TILES)
    tl.store(tile_slot + steps, tl.zeros_like(steps) - 2, mask=unused)


def slot_tiles(slot_of_token: Tensor, num_groups: int, dtype: torch.dtype) -> SlotTiles:
    """``specdec.kernels.lora_rows.slot_tiles``."""
    num_rows = slot_of_token.shape[0]
    block_m = tile_rows(dtype, num_rows)
    num_tiles = max_tiles(num_rows, num_groups, block_m)
    made = torch.empty(num_rows + 3 * num_tiles, dtype=torch.int32, device=slot_of_token.device)
    order, slot, first, end = made.split([num_rows, num_tiles, num_tiles, num_tiles])
    _slot_tiles_kernel[(1,)](
        slot_of_token,
        order,
        slot,
        first,
        end,
        num_rows,
        NUM_TILES=num_tiles,
        BLOCK_G=triton.next_power_of_2(num_tiles),
        BLOCK_M=block_m,
        BLOCK_T=min(_BLOCK_T, max(16, triton.next_power_of_2(num_rows))),
        num_warps=4,
        **pdl_options(slot_of_token),
    )
    return SlotTiles(order, slot, first, end, block_m)
