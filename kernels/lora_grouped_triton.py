"""Shrinking and expanding as launches of their own, for many rows: products by adapter.

A tile's rows share an adapter (``lora_rows``). The first launch shrinks chunk by chunk of the input
features, all parts at once; the second adds a row's partial sums in the order of the chunks,
rounds, expands, and adds to the output. Chunks lie at fixed input features, so that a row's sums
have one order whatever the number of rows.

Shape letters as in ``lora_blocks``, and G tiles of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.activation_triton import silu_product
from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.linear_triton import unit_stride
from specdec.kernels.lora_blocks import fold_chunks, shrink_block
from specdec.kernels.lora_fused_triton import chunk_size
from specdec.kernels.lora_rows import SlotTiles
from specdec.kernels.lora_rows_triton import TILES
from specdec.kernels.lora_tiles import expand_tile, tile_of_rows

_WHILE_RUNNING = {"do_not_specialize": ["num_rows"], "do_not_specialize_on_alignment": TILES}


@triton.jit(**_WHILE_RUNNING)
def _shrink_kernel(
    x,
    a_stack,
    order,
    tile_slot,
    tile_first,
    tile_end,
    partial,
    num_rows,
    K,
    x_stride,
    a_stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    slot = tl.load(tile_slot + tl.program_id(0))
    if slot >= 0:
        rows, row_mask = tile_of_rows(tl.program_id(0), order, tile_first, tile_end, BLOCK_M)
        shrink_block(
            rows,
            row_mask,
            slot,
            tl.program_id(1),
            tl.program_id(2),
            x,
            a_stack,
            partial,
            num_rows,
            K,
            x_stride,
            a_stride,
            WIDTH,
            CHUNK,
            BLOCK_W,
            BLOCK_K,
            EVEN_K,
            STAGES,
            PRECISION,
        )


@triton.jit
def _own_delta(
    partial,
    b_stack,
    rows,
    row_mask,
    slot,
    part,
    columns,
    column_mask,
    num_rows,
    b_stride,
    dtype: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    operand: tl.constexpr = b_stack.dtype.element_ty
    shrunk = fold_chunks(
        partial, rows, row_mask, part, num_rows, operand, RANK, WIDTH, NUM_CHUNKS, BLOCK_R
    )
    return expand_tile(
        shrunk, b_stack, slot, columns, column_mask, b_stride, dtype, RANK, BLOCK_R, PRECISION
    )


@triton.jit(**_WHILE_RUNNING)
def _expand_kernel(
    partial,  # [C, T, P * r] float32
    b_stack,  # [S, N, r], slots b_stride apart
    order,  # of SlotTiles
    tile_slot,
    tile_first,
    tile_end,
    product,  # [T, N]
    out,  # [T, N], the same as product; with SILU [T, N / 2]
    num_rows,
    N,
    b_stride,
    WIDTH_0,  # output features of the first two parts; the third has the rest
    WIDTH_1,
    TILES_0,  # column tiles of the first two parts
    TILES_1,
    SILU: tl.constexpr,
    EARLY: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # EARLY: an ordinary launch stands between the shrinking and this, so that its sums are there.
    if not EARLY:
        wait_for_inputs(PDL)
    slot = tl.load(tile_slot + tl.program_id(0))
    # With SILU rows without an adapter are multiplied too; unused tiles have no rows.
    if slot >= 0 or (SILU and slot == -1):
        rows, row_mask = tile_of_rows(tl.program_id(0), order, tile_first, tile_end, BLOCK_M)
        tile = tl.program_id(1)
        # A tile lies within one part, so that it needs one part's shrunk rows.
        in_1 = tile >= TILES_0
        in_2 = tile >= TILES_0 + TILES_1
        part = in_1.to(tl.int32) + in_2.to(tl.int32)
        first = tl.where(in_2, WIDTH_0 + WIDTH_1, tl.where(in_1, WIDTH_0, 0))
        end = tl.where(in_2, N, tl.where(in_1, WIDTH_0 + WIDTH_1, WIDTH_0))
        tile -= tl.where(in_2, TILES_0 + TILES_1, tl.where(in_1, TILES_0, 0))
        columns = first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        column_mask = columns < end
        mask = row_mask[:, None] & column_mask[None, :]
        dtype: tl.constexpr = out.dtype.element_ty
        source = product + rows[:, None].to(tl.int64) * N + columns[None, :]
        own = row_mask & (slot >= 0)
        own_slot = tl.maximum(slot, 0)
        own_columns = column_mask & (slot >= 0)
        if EARLY:
            delta = _own_delta(
                *(partial, b_stack, rows, own, own_slot, part, columns, own_columns),
                *(num_rows, b_stride, dtype, RANK, WIDTH, NUM_CHUNKS, BLOCK_R, PRECISION),
            )
            if SILU:
                up_delta = _own_delta(
                    *(partial, b_stack + end.to(tl.int64) * RANK, rows, own, own_slot, 1, columns),
                    *(own_columns, num_rows, b_stride, dtype, RANK, WIDTH, NUM_CHUNKS, BLOCK_R),
                    PRECISION,
                )
            wait_for_inputs(PDL)
            value = tl.load(source, mask=mask, other=0.0)
            if SILU:
                up = tl.load(source + end, mask=mask, other=0.0)
        else:
            value = tl.load(source, mask=mask, other=0.0)
            if SILU:
                up = tl.load(source + end, mask=mask, other=0.0)
            delta = _own_delta(
                *(partial, b_stack, rows, own, own_slot, part, columns, own_columns),
                *(num_rows, b_stride, dtype, RANK, WIDTH, NUM_CHUNKS, BLOCK_R, PRECISION),
            )
            if SILU:
                up_delta = _own_delta(
                    *(partial, b_stack + end.to(tl.int64) * RANK, rows, own, own_slot, 1, columns),
                    *(own_columns, num_rows, b_stride, dtype, RANK, WIDTH, NUM_CHUNKS, BLOCK_R),
                    PRECISION,
                )
        # Rows without an adapter keep their bits, a negative zero's sign too.
        value = tl.where(own[:, None], (value.to(tl.float32) + delta).to(dtype), value)
        if SILU:
            up = tl.where(own[:, None], (up.to(tl.float32) + up_delta).to(dtype), up)
            target = out + rows[:, None].to(tl.int64) * end + columns[None, :]
            tl.store(target, silu_product(value, up, dtype), mask=mask)
        else:
            target = out + rows[:, None].to(tl.int64) * N + columns[None, :]
            tl.store(target, value, mask=mask)


@dataclass(frozen=True, slots=True)
class Grouped:
    """One layer's rows, shrunk."""

    tiles: SlotTiles
    partial: Tensor  # [C, T, P * r] float32
    rank: int
    block_m: int
    precision: str
    options: dict[str, Any]

    @property
    def tile_tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tiles = self.tiles
        return tiles.order, tiles.slot, tiles.first, tiles.end


def shrink(
    x: Tensor, a_stack: Tensor, tiles: SlotTiles, num_parts: int, *, max_chunks: int = 8
) -> Grouped:
    assert a_stack.stride(2) == 1 and a_stack.stride(1) == x.shape[1]
    x = unit_stride(x)
    (num_rows, depth), width = x.shape, a_stack.shape[1]
    is_float32 = x.dtype == torch.float32
    chunk = chunk_size(depth, max_chunks)
    num_chunks = triton.cdiv(depth, chunk)
    partial = torch.empty(num_chunks, num_rows, width, dtype=torch.float32, device=x.device)
    options = {"num_warps": 4, "enable_fp_fusion": False, **pdl_options(x)}
    precision = "ieee" if is_float32 else "tf32"
    rank = width // num_parts
    grouped = Grouped(tiles, partial, rank, tiles.block_m, precision, options)
    block_w = max(16, min(64, triton.next_power_of_2(width)))
    block_k = 32 if is_float32 else 128
    _shrink_kernel[(tiles.num_tiles, triton.cdiv(width, block_w), num_chunks)](
        x,
        a_stack,
        *grouped.tile_tensors,
        partial,
        num_rows,
        depth,
        x.stride(0),
        a_stack.stride(0),
        WIDTH=width,
        CHUNK=chunk,
        BLOCK_M=tiles.block_m,
        BLOCK_W=block_w,
        BLOCK_K=block_k,
        EVEN_K=depth % block_k == 0,
        STAGES=3 if is_float32 else 4,
        PRECISION=precision,
        **options,
    )
    return grouped


def expand(
    grouped: Grouped,
    product: Tensor,
    b_stack: Tensor,
    widths: Sequence[int],
    *,
    silu: bool = False,
    early: bool = False,
    block_n: int | None = None,
) -> Tensor:
    """Add the deltas to ``product`` in place, or with ``silu`` give ``silu_mul`` of the sums.

    ``early`` where an ordinary launch stands between the shrinking and this.
    """
    assert len(widths) <= 3 and sum(widths) == product.shape[1] and product.is_contiguous()
    assert b_stack.stride(2) == 1 and b_stack.stride(1) == b_stack.shape[2]
    num_rows, num_features = product.shape
    out = product
    if silu:
        out = torch.empty(num_rows, widths[0], dtype=product.dtype, device=product.device)
    if block_n is None:
        block_n = 32 if product.dtype == torch.float32 else 64 if silu else 128
    columns = widths[:1] if silu else widths
    tiles = [triton.cdiv(width, block_n) for width in columns]
    _expand_kernel[(grouped.tiles.num_tiles, sum(tiles))](
        grouped.partial,
        b_stack,
        *grouped.tile_tensors,
        product,
        out,
        num_rows,
        num_features,
        b_stack.stride(0),
        columns[0],
        columns[1] if len(columns) > 1 else 0,
        tiles[0],
        tiles[1] if len(tiles) > 1 else num_features,
        SILU=silu,
        EARLY=early,
        RANK=grouped.rank,
        WIDTH=grouped.partial.shape[2],
        NUM_CHUNKS=grouped.partial.shape[0],
        BLOCK_M=grouped.block_m,
        BLOCK_N=block_n,
        BLOCK_R=max(16, triton.next_power_of_2(grouped.rank)),
        PRECISION=grouped.precision,
        **grouped.options,
    )
    return out
