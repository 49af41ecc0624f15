"""Triton side of ``specdec.kernels.head_linear``.

Shape letters: T token rows, H heads, K input features, N output features of a head.

A program owns a tile of one head's output and adds along K in order, so that neither the number of
rows nor the tile moves a bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import pdl_options, wait_for_inputs

_BLOCK_N, _BLOCK_K = 64, 64
# Rows of a tile, for few token rows and for many.
_FEW_ROWS, _SMALL_TILE, _LARGE_TILE = 64, 16, 64


@triton.jit(do_not_specialize=["num_rows"])
def _head_linear_kernel(
    x,  # [T, H, K]
    weight,  # [H, K, N]
    out,  # [T, H, N]
    num_rows,
    row_stride,
    x_head_stride,
    head_stride,
    k_stride,
    n_stride,
    NUM_HEADS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    row_mask, column_mask = rows < num_rows, columns < N
    x_tile = x + rows[:, None].to(tl.int64) * row_stride + head * x_head_stride + depth[None, :]
    weight_tile = weight + head * head_stride + depth[:, None] * k_stride
    weight_tile += columns[None, :] * n_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = depth < K - start
        a = tl.load(x_tile + start, mask=row_mask[:, None] & inside[None, :], other=0.0)
        b = tl.load(
            weight_tile + start * k_stride, mask=inside[:, None] & column_mask[None, :], other=0.0
        )
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    offsets = rows[:, None].to(tl.int64) * (NUM_HEADS * N) + head * N + columns[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``specdec.kernels.head_linear.head_linear``."""
    num_rows, num_heads, depth = x.shape
    num_features = weight.shape[2]
    out = torch.empty(num_rows, num_heads, num_features, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    x = x if x.stride(2) == 1 else x.contiguous()
    is_small = num_rows <= _FEW_ROWS or x.dtype == torch.float32
    block_m = _SMALL_TILE if is_small else _LARGE_TILE
    grid = (triton.cdiv(num_rows, block_m), num_heads, triton.cdiv(num_features, _BLOCK_N))
    _head_linear_kernel[grid](
        x,
        weight,
        out,
        num_rows,
        x.stride(0),
        x.stride(1),
        *weight.stride(),
        NUM_HEADS=num_heads,
        K=depth,
        N=num_features,
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K if x.itemsize == 2 else _BLOCK_K // 2,
        STAGES=3,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        enable_fp_fusion=False,
        **pdl_options(x),
    )
    return out
