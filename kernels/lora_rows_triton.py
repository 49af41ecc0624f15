"""Triton side of ``specdec.kernels.lora_rows``. Letters: T rows, S slots, G tiles."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.lora_rows import SlotTiles, packed_size

NO_SLOT = tl.constexpr(2**31 - 1)
# Views of one tensor: how they are aligned changes with the number of rows, and must not compile
# the kernels that read them anew.
TILES = ["order", "tile_slot", "tile_first", "tile_end"]
# Rows and tiles that a program looks at together. Two sizes, so that two kernels are all there is.
_SMALL, _LARGE = (64, 64), (1024, 256)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"], do_not_specialize_on_alignment=TILES)
def _slot_tiles_kernel(
    slot_of_token,  # [T]
    order,  # [T] int32
    tile_slot,  # [G] int32
    tile_first,  # [G] int32
    tile_end,  # [G] int32
    num_rows,
    num_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
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
        for start in tl.range(0, count, BLOCK_G):
            each = start + steps
            begin = first + each * BLOCK_M
            inside = each < count
            tl.store(tile_slot + tile + each, tl.zeros_like(each) + slot, mask=inside)
            tl.store(tile_first + tile + each, begin, mask=inside)
            tl.store(tile_end + tile + each, tl.minimum(begin + BLOCK_M, placed), mask=inside)
        tile += count
        slot = following
    for start in tl.range(tile, num_tiles, BLOCK_G):
        each = start + steps
        tl.store(tile_slot + each, tl.zeros_like(each) - 2, mask=each < num_tiles)


def slot_tiles(
    slot_of_token: Tensor,
    num_groups: int,
    dtype: torch.dtype,
    out: Tensor | None = None,
    block_m: int | None = None,
) -> Tensor:
    """``specdec.kernels.lora_rows.slot_tiles``; tiles of ``block_m`` rows where given."""
    num_rows = slot_of_token.shape[0]
    size = packed_size(num_rows, num_groups, dtype, block_m)
    if out is None:
        out = torch.empty(size, dtype=torch.int32, device=slot_of_token.device)
    assert out.shape == (size,)
    tiles = SlotTiles.of(out, num_rows, dtype, block_m)
    block_t, block_g = _SMALL if num_rows <= _SMALL[0] else _LARGE
    _slot_tiles_kernel[(1,)](
        slot_of_token,
        tiles.order,
        tiles.slot,
        tiles.first,
        tiles.end,
        num_rows,
        tiles.num_tiles,
        BLOCK_M=tiles.block_m,
        BLOCK_T=block_t,
        BLOCK_G=block_g,
        num_warps=4,
        **pdl_options(slot_of_token),
    )
    return out
