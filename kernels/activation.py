"""Gated activations. Shape letters: T rows, F features of the feed-forward layer."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """Plain PyTorch twin of ``silu_mul``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``. gate_up [T, 2F], gate first -> [T, F].

    silu is computed in float32 and rounded to the dtype before the product.
    """
    if gate_up.is_cuda:
        from specdec.kernels import activation_triton

        return activation_triton.silu_mul(gate_up)
    return silu_mul_reference(gate_up)


def gelu_tanh_mul_reference(gate_up: Tensor) -> Tensor:
    """Plain PyTorch twin of ``gelu_tanh_mul``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` with gelu's approximation by tanh, otherwise as ``silu_mul``."""
    if gate_up.is_cuda:
        from specdec.kernels import activation_triton

        return activation_triton.gelu_tanh_mul(gate_up)
    return gelu_tanh_mul_reference(gate_up)
