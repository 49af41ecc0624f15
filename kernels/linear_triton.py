"""Triton side of ``specdec.kernels.linear``.

Shape letters: T token rows, K input features, N output features.

Each program owns a tile of the output and adds along K in order, so that tile sizes, like the row
count, move no bit. Few rows are bound by reading the weights: every weight is then read once.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.activation_triton import silu_mul, silu_product
from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.tuning import TileConfig, skinny_config

# More rows than this go to cuBLASLt, whose tiles are better where arithmetic is the limit.
MAX_SKINNY_ROWS = 64


@triton.jit
def accumulate(
    x,
    weight,
    rows,
    columns,
    row_mask,
    column_mask,
    K,
    x_stride,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``x[rows] @ weight[columns].T`` in float32, added along K in order. [rows, columns]"""
    depth = tl.arange(0, BLOCK_K)
    x_tile = x + rows[:, None].to(tl.int64) * x_stride + depth[None, :]
    weight_tile = weight + columns[:, None].to(tl.int64) * K + depth[None, :]
    if SWAP:
        acc = tl.zeros([columns.shape[0], rows.shape[0]], tl.float32)
    else:
        acc = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            a = tl.load(x_tile + start, mask=row_mask[:, None], other=0.0)
            b = tl.load(weight_tile + start, mask=column_mask[:, None], other=0.0)
        else:
            inside = (depth < K - start)[None, :]
            a = tl.load(x_tile + start, mask=row_mask[:, None] & inside, other=0.0)
            b = tl.load(weight_tile + start, mask=column_mask[:, None] & inside, other=0.0)
        if SWAP:
            acc = tl.dot(b, tl.trans(a), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    if SWAP:
        acc = tl.trans(acc)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x,  # [T, K], rows x_stride apart
    weight,  # [N, K]
    bias,  # [N], or anything without HAS_BIAS
    residual,  # [T, N], or anything without HAS_RESIDUAL
    out,  # [T, N]
    num_rows,
    N,
    K,
    x_stride,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # Row tiles of one column tile are neighbours, so that they share its weights in L2.
    tiles = (num_rows + BLOCK_M - 1) // BLOCK_M
    wait_for_inputs(PDL)
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
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
    mask = row_mask[:, None] & column_mask[None, :]
    if HAS_RESIDUAL:
        added = tl.load(residual + offsets, mask=mask, other=0.0)
        product = (product.to(tl.float32) + added.to(tl.float32)).to(product.dtype)
    tl.store(out + offsets, product, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_silu_mul_kernel(
    x,  # [T, K], rows x_stride apart
    weight,  # [2F, K], gate rows first
    out,  # [T, F]
    num_rows,
    F,
    K,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles = (num_rows + BLOCK_M - 1) // BLOCK_M
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(0) // tiles * (BLOCK_N // 2)
    wait_for_inputs(PDL)
    # Gate and up columns take turns, so that a pair lies side by side in the sums.
    turns = tl.arange(0, BLOCK_N)
    pairs = first + turns // 2
    row_mask = rows < num_rows
    acc = accumulate(
        x,
        weight,
        rows,
        pairs + turns % 2 * F,
        row_mask,
        pairs < F,
        K,
        x_stride,
        BLOCK_K,
        EVEN_K,
        STAGES,
        SWAP,
        PRECISION,
    )
    dtype: tl.constexpr = out.dtype.element_ty
    gate, up = tl.split(acc.to(dtype).reshape(BLOCK_M, BLOCK_N // 2, 2))
    columns = first + tl.arange(0, BLOCK_N // 2)
    offsets = rows[:, None].to(tl.int64) * F + columns[None, :]
    product = silu_product(gate, up, dtype)
    tl.store(out + offsets, product, mask=row_mask[:, None] & (columns < F)[None, :])


def tile_arguments(
    x: Tensor, num_features: int, depth: int, config: TileConfig | None
) -> dict[str, Any]:
    """Launch arguments that the kernels share."""
    num_rows = x.shape[0]
    limit = 16 if x.dtype == torch.float32 else MAX_SKINNY_ROWS
    block_m = max(16, min(limit, triton.next_power_of_2(num_rows)))
    config = config or skinny_config(num_features, depth, block_m, x)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "EVEN_K": depth % config.block_k == 0,
        "STAGES": config.stages,
        "SWAP": config.swap,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": config.num_warps,
        "enable_fp_fusion": False,
        **pdl_options(x),
    }


def unit_stride(x: Tensor) -> Tensor:
    """``x`` with its features side by side in memory; its rows may lie apart."""
    return x if x.stride(1) == 1 else x.contiguous()


def is_skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether a Triton kernel, rather than cuBLASLt, multiplies these rows.

    In float32 it always does: PyTorch has no switch that keeps cuBLASLt from splitting K there. So
    it does where rows of 16 bytes are not aligned, for which cuBLASLt has other kernels.
    """
    unaligned = x.shape[1] % 8 != 0 or weight.shape[0] % 8 != 0
    return x.shape[0] <= MAX_SKINNY_ROWS or x.dtype == torch.float32 or unaligned


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
    *,
    config: TileConfig | None = None,
) -> Tensor:
    """``specdec.kernels.linear.linear``, and ``linear_add`` where a residual is given."""
    out_dtype = out_dtype or x.dtype
    if config is None and not is_skinny(x, weight):
        if out_dtype == x.dtype:
            product = F.linear(x, weight)
        else:
            product = torch.mm(x, weight.t(), out_dtype=out_dtype)
        if bias is not None:
            product += bias
        return product if residual is None else residual + product
    x = unit_stride(x)
    num_rows, depth = x.shape
    num_features = weight.shape[0]
    out = torch.empty(num_rows, num_features, dtype=out_dtype, device=x.device)
    if num_rows == 0:
        return out
    tiles = tile_arguments(x, num_features, depth, config)
    grid = (triton.cdiv(num_rows, tiles["BLOCK_M"]) * triton.cdiv(num_features, tiles["BLOCK_N"]),)
    _linear_kernel[grid](
        x,
        weight,
        bias if bias is not None else weight,
        residual if residual is not None else weight,
        out,
        num_rows,
        num_features,
        depth,
        x.stride(0),
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        **tiles,
    )
    return out


def linear_silu_mul(x: Tensor, weight: Tensor, *, config: TileConfig | None = None) -> Tensor:
    """``specdec.kernels.linear.linear_silu_mul``."""
    if config is None and not is_skinny(x, weight):
        return silu_mul(F.linear(x, weight))
    x = unit_stride(x)
    num_rows, depth = x.shape
    num_features = weight.shape[0] // 2
    out = torch.empty(num_rows, num_features, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tiles = tile_arguments(x, 2 * num_features, depth, config)
    pairs = tiles["BLOCK_N"] // 2
    grid = (triton.cdiv(num_rows, tiles["BLOCK_M"]) * triton.cdiv(num_features, pairs),)
    _linear_silu_mul_kernel[grid](
        x, weight, out, num_rows, num_features, depth, x.stride(0), **tiles
    )
    return out
