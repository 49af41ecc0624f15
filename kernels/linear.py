"""Linear layers whose rows do not depend on how many rows run beside them.

Shape letters: T token rows, K input features, N output features.

Every path adds along K in order in float32 and never splits K, so that on a GPU a row has the same
bits whatever the number of rows: a Triton kernel for few rows, cuBLASLt without split-K for many.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.activation import silu_mul_reference
from specdec.kernels.argmax import argmax_reference, best_part_reference


def configure_exact_blas() -> None:
    """Make PyTorch's matrix products on CUDA free of split-K and of reduced-precision sums.

    Process-wide; the engine calls it once, before any graph is captured.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    # The pair is (reduced-precision sums, split-K); both off leaves one sum per output element.
    matmul.allow_bf16_reduced_precision_reduction = (False, False)  # type: ignore[assignment]
    matmul.allow_fp16_reduced_precision_reduction = (False, False)  # type: ignore[assignment]


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Plain PyTorch twin of ``linear``."""
    if out_dtype is None or out_dtype == x.dtype:
        product = F.linear(x, weight)
    else:
        product = F.linear(x.to(out_dtype), weight.to(out_dtype))
    return product if bias is None else product + bias.to(product.dtype)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x @ weight.T + bias``. x [T, K], weight [N, K], bias [N] -> [T, N].

    The product is rounded to ``out_dtype`` (x's dtype by default) before the bias is added:
    ``out_dtype=torch.float32`` gives the float32 sums themselves, never rounded to x's dtype.
    """
    if x.is_cuda:
        from specdec.kernels import linear_triton

        return linear_triton.linear(x, weight, bias, out_dtype)
    return linear_reference(x, weight, bias, out_dtype)


def linear_add_reference(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """Plain PyTorch twin of ``linear_add``."""
    return residual + F.linear(x, weight)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """``residual + linear(x, weight)``, the product rounded before the sum.

    x [T, K], weight [N, K], residual [T, N] -> [T, N], a new tensor.
    """
    if x.is_cuda:
        from specdec.kernels import linear_triton

        return linear_triton.linear(x, weight, residual=residual)
    return linear_add_reference(x, weight, residual)


def linear_silu_mul_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Plain PyTorch twin of ``linear_silu_mul``."""
    return silu_mul_reference(F.linear(x, weight))


def linear_silu_mul(x: Tensor, weight: Tensor) -> Tensor:
    """``silu_mul(linear(x, weight))`` with the same rounding points and bits.

    x [T, K], weight [2F, K] (gate rows, then up rows) -> [T, F].
    """
    if x.is_cuda:
        from specdec.kernels import linear_triton

        return linear_triton.linear_silu_mul(x, weight)
    return linear_silu_mul_reference(x, weight)


def linear_argmax_reference(
    x: Tensor, weight: Tensor, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch twin of ``linear_argmax``."""
    return argmax_reference(linear_reference(x, weight, out_dtype=torch.float32), limit)


def linear_argmax(x: Tensor, weight: Tensor, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """``argmax`` of the float32 logits of each row, without writing the logits out.

    x [T, K], weight [N, K] -> ids [T] int64 and, [T] bool, whether the largest logit is finite. Ids
    at or past ``limit`` are not looked at; of equal logits the lowest id wins, and a NaN counts as
    the largest. Equal to ``argmax`` of the float32 output of ``linear``.
    """
    if x.is_cuda:
        from specdec.kernels import argmax_triton

        return argmax_triton.linear_argmax(x, weight, limit)
    return linear_argmax_reference(x, weight, limit)


def linear_best_part_reference(x: Tensor, weight: Tensor, limit: int, first: int) -> Tensor:
    """Plain PyTorch twin of ``linear_best_part``."""
    return best_part_reference(linear_reference(x, weight, out_dtype=torch.float32), limit, first)


def linear_best_part(x: Tensor, weight: Tensor, limit: int, first: int) -> Tensor:
    """``best_part`` of the float32 logits of each row, without writing the logits out.

    x [T, K], weight [N, K] -> [T] int64.
    """
    if x.is_cuda:
        from specdec.kernels import argmax_triton

        return argmax_triton.linear_best_part(x, weight, limit, first)
    return linear_best_part_reference(x, weight, limit, first)
