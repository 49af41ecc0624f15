"""Small layers of few rows: a norm, a projection and what follows in one kernel.

Shape letters: T token rows, K input features, N output features.

Where a model's layers are small, a step of few rows is a chain of kernels that each wait longer for
their weights than they compute. These read their weights while the kernel before them still runs,
and norm their inputs themselves, so that no kernel is launched for a norm. The bits are those of
``rms_norm``, ``linear_add``, ``linear_silu_mul`` and ``qkv_rope_write_kv`` one after another.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from specdec.kernels.linear import linear_add_reference, linear_silu_mul_reference
from specdec.kernels.norm import rms_norm_reference

# A norm in front of a projection: its weight [K] and eps.
Norm = tuple[Tensor, float]

MAX_ROWS = 16
# A program holds all inputs of its outputs in registers.
MAX_DEPTH = 2048
# Depths are read in pieces of the largest power of two that divides them.
_MIN_PIECE = 32


def is_ready(x: Tensor, depths: Collection[int]) -> bool:
    """Whether these kernels are the fast way for rows like x [T, K] through layers so deep.

    Set ``MAX_ROWS`` to 0 to do without them: no bit of a result depends on it.
    """
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and x.shape[0] <= MAX_ROWS
        and all(depth <= MAX_DEPTH and depth % _MIN_PIECE == 0 for depth in depths)
    )


def norm_linear_silu_mul(x: Tensor, norm: Norm, weight: Tensor) -> Tensor:
    """``linear_silu_mul(rms_norm(x), weight)``. x [T, K], weight [2F, K] -> [T, F]."""
    if x.is_cuda:
        from specdec.kernels import ready_linear_triton as triton_side

        config = triton_side.GATE_UP
        return triton_side.ready_linear(x, weight, norm=norm, silu=True, config=config)
    return linear_silu_mul_reference(rms_norm_reference(x, *norm), weight)


def ready_linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """``linear_add``. x [T, K], weight [N, K], residual [T, N] -> [T, N]."""
    if x.is_cuda:
        from specdec.kernels import ready_linear_triton as triton_side

        return triton_side.ready_linear(x, weight, residual=residual, config=triton_side.OUTPUT)
    return linear_add_reference(x, weight, residual)
