"""Triton side of ``specdec.kernels.norm``. Shape letters: T rows, D features.

A program owns a row. How it shares the row among threads depends on D alone, so that the sum of
squares has one order whatever the number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import pdl_options, reads_early, wait_for_inputs, wait_unless_early

# Up to so many rows, a program each, leave most of the GPU to the next kernel's programs.
FEW_ROWS = 16
# Of a row of 16-bit features: 16 bytes for each thread.
FEATURES_PER_WARP = tl.constexpr(256)


def row_warps(block: int) -> int:
    """Warps for a row of ``block`` features (a power of two)."""
    return max(1, min(16, block // FEATURES_PER_WARP.value))


@triton.jit
def sum_of_squares(x, WARPS: tl.constexpr = 1):
    """Sum of squares of each row. x [rows, a power of two] float32 -> [rows].

    Neighbours are added in pairs, then neighbouring sums: an order that no layout changes, and in
    which rows with zeros after them have the sums of rows without. WARPS: how many share a row; the
    last sum of each goes to one, once.
    """
    x = x * x
    for _ in tl.static_range(32):
        if x.shape[1] > 1:
            pairs = x.reshape(x.shape[0], x.shape[1] // 2, 2)
            if x.shape[1] == WARPS:
                one, other = tl.split(pairs)
                x = one + other
            else:
                x = tl.sum(pairs, axis=2)
    return x.reshape(x.shape[0])


@triton.jit
def inverse_of_total(total, eps, D: tl.constexpr):
    """1 / sqrt(mean + eps) of D squares that sum up to ``total``."""
    return tl.rsqrt(total / D + eps)


@triton.jit
def inverse_rms(x, eps, D: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of one row. x [BLOCK] float32, zero past D -> [1]."""
    WARPS: tl.constexpr = x.shape[0] // FEATURES_PER_WARP
    return inverse_of_total(sum_of_squares(x.reshape(1, x.shape[0]), WARPS), eps, D)


@triton.jit
def scale_row(x, inverse, weight, dtype: tl.constexpr, UNIT_OFFSET: tl.constexpr = False):
    """``weight * (x * inverse)``, both products rounded to ``dtype``. x float32.

    With UNIT_OFFSET ``(1 + weight) * (x * inverse)``, rounded at the end alone.
    """
    weight = weight.to(tl.float32)
    if UNIT_OFFSET:
        scaled = x * inverse
        weight = 1.0 + weight
    else:
        scaled = (x * inverse).to(dtype).to(tl.float32)
    return (scaled * weight).to(dtype)


@triton.jit(do_not_specialize=["outer_stride", "inner_stride", "inner", "early"])
def _rms_norm_kernel(
    x,  # row r starts at (r // inner) * outer_stride + (r % inner) * inner_stride
    residual,  # [T, D], or anything without HAS_RESIDUAL
    weight,  # [D]
    out,  # [T, D]
    new_residual,  # [T, D], or anything without HAS_RESIDUAL
    outer_stride,
    inner_stride,
    inner,
    eps,
    early,
    HAS_RESIDUAL: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    wait_unless_early(early, PDL)
    scale = tl.load(weight + columns, mask=mask, other=0.0)
    wait_for_inputs(PDL)
    dtype: tl.constexpr = out.dtype.element_ty
    start = row // inner * outer_stride + row % inner * inner_stride
    values = tl.load(x + start + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * D + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(dtype)
        tl.store(new_residual + row * D + columns, rounded, mask=mask)
        values = rounded.to(tl.float32)
    normed = scale_row(values, inverse_rms(values, eps, D), scale, dtype, UNIT_OFFSET)
    tl.store(out + row * D + columns, normed, mask=mask)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    unit_offset: bool,
    strides: tuple[int, int, int],
    out: Tensor,
    new_residual: Tensor | None,
) -> None:
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    num_rows = x.numel() // size
    if num_rows == 0:
        return
    _rms_norm_kernel[(num_rows,)](
        x,
        residual if residual is not None else x,
        weight,
        out,
        new_residual if new_residual is not None else out,
        *strides,
        eps,
        reads_early(x),
        HAS_RESIDUAL=residual is not None,
        UNIT_OFFSET=unit_offset,
        D=size,
        BLOCK=block,
        num_warps=row_warps(block),
        enable_fp_fusion=False,
        **pdl_options(x, lets_in=num_rows <= FEW_ROWS),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """``specdec.kernels.norm.rms_norm``. Heads of a wider row need not be contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    if x.dim() == 3 and x.stride(2) == 1:
        strides = (x.stride(0), x.stride(1), x.shape[1])
    elif x.dim() == 2 and x.stride(1) == 1:
        strides = (x.stride(0), 0, 1)
    else:
        x, strides = x.contiguous(), (size, 0, 1)
    _launch(x, None, weight, eps, unit_offset, strides, out, None)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """``specdec.kernels.norm.add_rms_norm``."""
    out, new_residual = torch.empty_like(residual), torch.empty_like(residual)
    strides = (x.stride(0), 0, 1)
    _launch(x, residual, weight, eps, unit_offset, strides, out, new_residual)
    return out, new_residual
