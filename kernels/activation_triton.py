"""Triton side of ``specdec.kernels.activation``. Shape letters: T rows, F features."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import pdl_options, wait_for_inputs

_BLOCK = 1024


@triton.jit
def silu_product(gate, up, dtype: tl.constexpr):
    """``silu(gate) * up``, silu in float32 and rounded to ``dtype`` before the product."""
    gate = gate.to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(dtype)


@triton.jit
def gelu_tanh_product(gate, up, dtype: tl.constexpr):
    """``gelu(gate) * up`` by tanh: gate * (1 + tanh(u)) / 2, which is gate / (1 + exp(-2 u))."""
    gate = gate.to(tl.float32)
    # 2 * sqrt(2 / pi)
    double = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = (gate / (1.0 + tl.exp(-double))).to(dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["row_stride"])
def _gated_kernel(
    gate_up, out, F, row_stride, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < F
    gate = tl.load(gate_up + row * row_stride + columns, mask=mask, other=0.0)
    up = tl.load(gate_up + row * row_stride + F + columns, mask=mask, other=0.0)
    if GELU:
        product = gelu_tanh_product(gate, up, out.dtype.element_ty)
    else:
        product = silu_product(gate, up, out.dtype.element_ty)
    tl.store(out + row * F + columns, product, mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``specdec.kernels.activation.silu_mul``."""
    return _launch(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """``specdec.kernels.activation.gelu_tanh_mul``."""
    return _launch(gate_up, gelu=True)


def _launch(gate_up: Tensor, *, gelu: bool) -> Tensor:
    num_rows, width = gate_up.shape
    out = torch.empty(num_rows, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    _gated_kernel[(num_rows, triton.cdiv(width // 2, _BLOCK))](
        gate_up,
        out,
        width // 2,
        gate_up.stride(0),
        GELU=gelu,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
        **pdl_options(gate_up),
    )
    return out
