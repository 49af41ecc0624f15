"""Triton side of ``lora_linear`` and ``lora_linear_silu_mul``: a layer's product and its deltas.

Few rows leave most of the GPU's arithmetic idle while the weights stream in, so the launch of the
product also shrinks: its first programs are those of ``lora_tiles.shrink_tile``, the rest are the
tiles of ``linear_triton``, added in the same order. Letters as there.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import wait_for_inputs
from specdec.kernels.linear_triton import (
    accumulate,
    is_skinny,
    linear,
    tile_arguments,
)
from specdec.kernels.lora_rows_triton import TILES
from specdec.kernels.lora_tiles import shrink_tile
from specdec.kernels.lora_triton import Shrink, expand_, expand_silu_mul


@triton.jit(
    do_not_specialize=["num_rows", "num_shrink", "num_tiles"], do_not_specialize_on_alignment=TILES
)
def _linear_shrink_kernel(
    x,  # [T, K], rows x_stride apart
    weight,  # [N, K]
    bias,  # [N], or anything without HAS_BIAS
    out,  # [T, N]
    a_stack,  # [S, P * r, K], slots a_stride apart
    order,  # of SlotTiles
    tile_slot,
    tile_first,
    tile_end,
    partial,  # [C, T, P * r] float32
    num_shrink,  # programs that shrink
    num_tiles,  # of the rows that are shrunk
    num_rows,
    N,
    K,
    x_stride,
    a_stride,
    HAS_BIAS: tl.constexpr,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHRINK_M: tl.constexpr,
    SHRINK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    program = tl.program_id(0)
    tiles = (num_rows + BLOCK_M - 1) // BLOCK_M
    if program < num_shrink:
        others = program // num_tiles
        shrink_tile(
            program % num_tiles,
            others % NUM_PARTS,
            others // NUM_PARTS,
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
            RANK,
            NUM_PARTS,
            CHUNK,
            SHRINK_M,
            BLOCK_R,
            SHRINK_K,
            3,
            PRECISION,
        )
    else:
        program -= num_shrink
        rows = program % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = program // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask = rows < num_rows
        column_mask = columns < N
        acc = accumulate(
            x,
            weight,
            rows,
            columns,
            row_mask,
            column_mask,
            K,
            x_stride,
            BLOCK_K,
            EVEN_K,
            STAGES,
            SWAP,
            PRECISION,
        )
        product = acc.to(out.dtype.element_ty)
        if HAS_BIAS:
            added = tl.load(bias + columns, mask=column_mask, other=0.0)
            product = (product.to(tl.float32) + added.to(tl.float32)[None, :]).to(product.dtype)
        offsets = rows[:, None].to(tl.int64) * N + columns[None, :]
        tl.store(out + offsets, product, mask=row_mask[:, None] & column_mask[None, :])


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, shrink: Shrink) -> Tensor:
    """``linear``, and the shrunk rows beside it."""
    if not is_skinny(x, weight):
        shrink.launch()
        return linear(x, weight, bias)
    (num_rows, depth), num_features = x.shape, weight.shape[0]
    out = torch.empty(num_rows, num_features, dtype=x.dtype, device=x.device)
    tiles = tile_arguments(shrink.x, num_features, depth, None)
    num_shrink = shrink.num_programs
    num_tiles = triton.cdiv(num_rows, tiles["BLOCK_M"]) * triton.cdiv(
        num_features, tiles["BLOCK_N"]
    )
    _linear_shrink_kernel[(num_shrink + num_tiles,)](
        shrink.x,
        weight,
        bias if bias is not None else weight,
        out,
        shrink.a_stack,
        *shrink.tile_tensors,
        shrink.partial,
        num_shrink,
        shrink.tiles.num_tiles,
        num_rows,
        num_features,
        depth,
        shrink.x.stride(0),
        shrink.a_stack.stride(0),
        HAS_BIAS=bias is not None,
        RANK=shrink.rank,
        NUM_PARTS=shrink.num_parts,
        CHUNK=shrink.chunk,
        SHRINK_M=shrink.shared["BLOCK_M"],
        SHRINK_K=shrink.block_k,
        BLOCK_R=shrink.shared["BLOCK_R"],
        **tiles,
    )
    return out


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a_stack: Tensor,
    b_stack: Tensor,
    slot_of_token: Tensor,
    parts: Sequence[int] | None = None,
    tiles: Tensor | None = None,
) -> Tensor:
    """``specdec.kernels.lora.lora_linear``."""
    widths = tuple(parts or (weight.shape[0],))
    if x.shape[0] == 0:
        return linear(x, weight, bias)
    shrink = Shrink.of(x, a_stack, slot_of_token, tiles, len(widths))
    return expand_(shrink, _product(x, weight, bias, shrink), b_stack, widths)


def lora_linear_silu_mul(
    x: Tensor,
    weight: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    slot_of_token: Tensor,
    tiles: Tensor | None = None,
) -> Tensor:
    """``specdec.kernels.lora.lora_linear_silu_mul``."""
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[0] // 2)
    shrink = Shrink.of(x, a_stack, slot_of_token, tiles, 2)
    return expand_silu_mul(shrink, _product(x, weight, None, shrink), b_stack)
