"""Root-mean-square norms. Shape letters: T rows, D features."""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """Plain PyTorch twin of ``rms_norm``."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if unit_offset:
        return (wide * (1.0 + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension. x [..., D] -> [..., D].

    The scaled row is rounded to x's dtype before it is multiplied with the weight. The sum has one
    order for every number of rows. With ``unit_offset`` the row is multiplied by ``1 + weight`` in
    float32 and rounded once, as Gemma's norms are.
    """
    if x.is_cuda:
        from specdec.kernels import norm_triton

        return norm_triton.rms_norm(x, weight, eps, unit_offset)
    return rms_norm_reference(x, weight, eps, unit_offset)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch twin of ``add_rms_norm``."""
    residual = residual + x
    return rms_norm_reference(residual, weight, eps, unit_offset), residual


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream, then norm it. All [T, D]. Returns (normed, new residual).

    The sum is rounded to x's dtype before the norm reads it. Neither input is changed.
    """
    if x.is_cuda:
        from specdec.kernels import norm_triton

        return norm_triton.add_rms_norm(x, residual, weight, eps, unit_offset)
    return add_rms_norm_reference(x, residual, weight, eps, unit_offset)
