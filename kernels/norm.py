"""Root-mean-square norms. Shape letters: T rows, D features."""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain PyTorch twin of ``rms_norm``."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, next_weight: Tensor | None = None) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension. x [..., D] -> [..., D].

    The scaled row is rounded to x's dtype before it is multiplied with the weight. The sum has one
    order for every number of rows. ``next_weight``: a matrix that is read next, which a GPU may
    bring near meanwhile.
    """
    if x.is_cuda:
        from specdec.kernels import norm_triton

        return norm_triton.rms_norm(x, weight, eps, next_weight)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch twin of ``add_rms_norm``."""
    residual = residual + x
    return rms_norm_reference(residual, weight, eps), residual


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, next_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream, then norm it. All [T, D]. Returns (normed, new residual).

    The sum is rounded to x's dtype before the norm reads it. Neither input is changed.
    ``next_weight`` as in ``rms_norm``.
    """
    if x.is_cuda:
        from specdec.kernels import norm_triton

        return norm_triton.add_rms_norm(x, residual, weight, eps, next_weight)
    return add_rms_norm_reference(x, residual, weight, eps)
