"""Triton side of ``specdec.kernels.lora``.

Shape letters: T token rows, K input features, N output features, P fused projections, r rank of a
slot, S adapter slots, C chunks of K, G tiles of rows.

Two launches. The first shrinks: chunk c of the input features gives a partial sum, [C, T, P * r] in
float32. The second adds a row's partial sums in the order of the chunks, rounds, expands, and adds
to the output. Chunks lie at fixed input features, so that a row's sums have one order whatever the
number of rows; ``lora_linear_triton`` has the same ones. A tile's rows share an adapter
(``lora_rows``): a program that met several would wait for one after the other.
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
from specdec.kernels.lora_rows import FEW_ROWS, SlotTiles
from specdec.kernels.lora_rows_triton import TILES, slot_tiles
from specdec.kernels.lora_tiles import expand_tile, shrink_rows, shrunk_rows, tile_of_rows

# Chunks of the input features; each is one partial sum, which every tile of the second launch adds.
MAX_CHUNKS = 4
_MIN_CHUNK = 512


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=TILES)
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
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    slot = tl.load(tile_slot + tl.program_id(0))
    if slot >= 0:
        rows, row_mask = tile_of_rows(tl.program_id(0), order, tile_first, tile_end, BLOCK_M)
        ranks = tl.arange(0, BLOCK_R)
        shrink_rows(
            rows,
            row_mask,
            slot,
            tl.program_id(1) * RANK + ranks,
            ranks < RANK,
            tl.program_id(2),
            x,
            a_stack,
            partial,
            num_rows,
            K,
            x_stride,
            a_stride,
            NUM_PARTS * RANK,
            CHUNK,
            BLOCK_K,
            False,
            STAGES,
            PRECISION,
        )


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=TILES)
def _expand_kernel(
    partial,  # [C, T, P * r] float32
    b_stack,  # [S, N, r], slots b_stride apart
    order,  # of SlotTiles
    tile_slot,
    tile_first,
    tile_end,
    out,  # [T, N]
    num_rows,
    N,
    b_stride,
    WIDTH_0,  # output features of the first two parts; the third has the rest
    WIDTH_1,
    TILES_0,  # column tiles of the first two parts
    TILES_1,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    slot = tl.load(tile_slot + tl.program_id(0))
    if slot >= 0:
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
        operand: tl.constexpr = b_stack.dtype.element_ty
        offsets = rows[:, None].to(tl.int64) * N + columns[None, :]
        product = tl.load(out + offsets, mask=mask, other=0.0).to(tl.float32)
        shrunk = shrunk_rows(
            partial, rows, row_mask, part, num_rows, operand, RANK, NUM_PARTS, NUM_CHUNKS, BLOCK_R
        )
        product += expand_tile(
            shrunk, b_stack, slot, columns, column_mask, b_stride, dtype, RANK, BLOCK_R, PRECISION
        )
        tl.store(out + offsets, product.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=TILES)
def _expand_silu_mul_kernel(
    partial,  # [C, T, 2 * r] float32
    b_stack,  # [S, 2F, r], slots b_stride apart
    order,  # of SlotTiles
    tile_slot,
    tile_first,
    tile_end,
    gate_up,  # [T, 2F]
    out,  # [T, F]
    num_rows,
    F,
    b_stride,
    RANK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    slot = tl.load(tile_slot + tl.program_id(0))
    # Rows without an adapter are multiplied too; unused tiles have no rows.
    if slot >= -1:
        rows, row_mask = tile_of_rows(tl.program_id(0), order, tile_first, tile_end, BLOCK_M)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        column_mask = columns < F
        mask = row_mask[:, None] & column_mask[None, :]
        dtype: tl.constexpr = out.dtype.element_ty
        operand: tl.constexpr = b_stack.dtype.element_ty
        source = gate_up + rows[:, None].to(tl.int64) * (2 * F) + columns[None, :]
        gate = tl.load(source, mask=mask, other=0.0)
        up = tl.load(source + F, mask=mask, other=0.0)
        if slot >= 0:
            shrunk = shrunk_rows(
                partial, rows, row_mask, 0, num_rows, operand, RANK, 2, NUM_CHUNKS, BLOCK_R
            )
            delta = expand_tile(
                shrunk,
                b_stack,
                slot,
                columns,
                column_mask,
                b_stride,
                dtype,
                RANK,
                BLOCK_R,
                PRECISION,
            )
            gate = (gate.to(tl.float32) + delta).to(dtype)
            shrunk = shrunk_rows(
                partial, rows, row_mask, 1, num_rows, operand, RANK, 2, NUM_CHUNKS, BLOCK_R
            )
            up_b = b_stack + F.to(tl.int64) * RANK
            delta = expand_tile(
                shrunk, up_b, slot, columns, column_mask, b_stride, dtype, RANK, BLOCK_R, PRECISION
            )
            up = (up.to(tl.float32) + delta).to(dtype)
        target = out + rows[:, None].to(tl.int64) * F + columns[None, :]
        tl.store(target, silu_product(gate, up, dtype), mask=mask)


def chunk_size(depth: int) -> int:
    """Input features of a partial sum: the layer's own, whatever the batch and the kernel."""
    chunk = _MIN_CHUNK
    while depth > chunk * MAX_CHUNKS:
        chunk *= 2
    return chunk


@dataclass(frozen=True, slots=True)
class Shrink:
    """The first launch's shape. What it does to a row depends on the layer alone."""

    x: Tensor
    a_stack: Tensor
    tiles: SlotTiles
    num_parts: int
    rank: int
    chunk: int
    partial: Tensor  # [C, T, P * r] float32

    @classmethod
    def of(
        cls,
        x: Tensor,
        a_stack: Tensor,
        slot_of_token: Tensor,
        tiles: Tensor | None,
        num_parts: int,
    ) -> "Shrink":
        """``tiles`` are those of ``slot_of_token``, or None where nobody has made them."""
        assert a_stack.stride(2) == 1 and a_stack.stride(1) == x.shape[1]
        num_rows, depth = x.shape
        block_m = None
        if tiles is None:
            # Those of ``tile_rows`` are too high for few rows of many slots.
            block_m = 16 if num_rows <= FEW_ROWS else None
            tiles = slot_tiles(slot_of_token, a_stack.shape[0] + 1, x.dtype, block_m=block_m)
        chunk = chunk_size(depth)
        shape = (triton.cdiv(depth, chunk), num_rows, a_stack.shape[1])
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
        rank = a_stack.shape[1] // num_parts
        unpacked = SlotTiles.of(tiles, num_rows, x.dtype, block_m)
        return cls(unit_stride(x), a_stack, unpacked, num_parts, rank, chunk, partial)

    @property
    def num_chunks(self) -> int:
        return self.partial.shape[0]

    @property
    def is_float32(self) -> bool:
        return self.x.dtype == torch.float32

    @property
    def tile_tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tiles = self.tiles
        return tiles.order, tiles.slot, tiles.first, tiles.end

    @property
    def shared(self) -> dict[str, Any]:
        """Arguments of both launches."""
        return {
            "RANK": self.rank,
            "BLOCK_M": self.tiles.block_m,
            "BLOCK_R": max(16, triton.next_power_of_2(self.rank)),
            "PRECISION": "ieee" if self.is_float32 else "tf32",
        }

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": 4, "enable_fp_fusion": False, **pdl_options(self.x)}

    @property
    def block_k(self) -> int:
        return 32 if self.is_float32 else 128

    def block_n(self, num_features: int) -> int:
        # Without tensor cores a tile is kept in registers. Wide layers get wide tiles: fewer
        # programs repeat the sum over the chunks.
        return 32 if self.is_float32 else 128 if num_features >= 8192 else 64

    def launch(self) -> None:
        _shrink_kernel[(self.tiles.num_tiles, self.num_parts, self.num_chunks)](
            self.x,
            self.a_stack,
            *self.tile_tensors,
            self.partial,
            self.x.shape[0],
            self.x.shape[1],
            self.x.stride(0),
            self.a_stack.stride(0),
            NUM_PARTS=self.num_parts,
            CHUNK=self.chunk,
            BLOCK_K=self.block_k,
            STAGES=3,
            **self.shared,
            **self.options,
        )


def expand_(shrink: Shrink, out: Tensor, b_stack: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Add the deltas of rows that ``shrink`` has shrunk to ``out``."""
    assert len(widths) <= 3 and sum(widths) == out.shape[1] and out.is_contiguous()
    assert b_stack.stride(2) == 1 and b_stack.stride(1) == b_stack.shape[2]
    block_n = shrink.block_n(out.shape[1])
    tiles = [triton.cdiv(width, block_n) for width in widths]
    _expand_kernel[(shrink.tiles.num_tiles, sum(tiles))](
        shrink.partial,
        b_stack,
        *shrink.tile_tensors,
        out,
        out.shape[0],
        out.shape[1],
        b_stack.stride(0),
        widths[0],
        widths[1] if len(widths) > 1 else 0,
        tiles[0],
        tiles[1] if len(tiles) > 1 else 0,
        NUM_PARTS=shrink.num_parts,
        NUM_CHUNKS=shrink.num_chunks,
        BLOCK_N=block_n,
        **shrink.shared,
        **shrink.options,
    )
    return out


def expand_silu_mul(shrink: Shrink, gate_up: Tensor, b_stack: Tensor) -> Tensor:
    """``silu_mul`` of ``gate_up`` with the deltas of the rows that ``shrink`` has shrunk."""
    assert gate_up.is_contiguous()
    num_rows, features = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, features, dtype=gate_up.dtype, device=gate_up.device)
    block_n = min(shrink.block_n(features), 64)
    _expand_silu_mul_kernel[(shrink.tiles.num_tiles, triton.cdiv(features, block_n))](
        shrink.partial,
        b_stack,
        *shrink.tile_tensors,
        gate_up,
        out,
        num_rows,
        features,
        b_stack.stride(0),
        NUM_CHUNKS=shrink.num_chunks,
        BLOCK_N=block_n,
        **shrink.shared,
        **shrink.options,
    )
    return out


def lora_delta_(
    out: Tensor,
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    slot_of_token: Tensor,
    parts: Sequence[int] | None = None,
) -> Tensor:
    """``specdec.kernels.lora.lora_delta_``."""
    widths = tuple(parts or (out.shape[1],))
    if x.shape[0] == 0:
        return out
    shrink = Shrink.of(x, a_stack, slot_of_token, None, len(widths))
    shrink.launch()
    return expand_(shrink, out, b_stack, widths)
