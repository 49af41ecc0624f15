"""Adds what several ranks bring, always in the order of the ranks.

Shape letters: N ranks.
"""

from torch import Tensor


def sum_ranks_reference(parts: Tensor) -> Tensor:
    """Plain PyTorch twin of ``sum_ranks``."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


def sum_ranks(parts: Tensor) -> Tensor:
    """parts [N, ...] -> [...]: rank 0's and rank 1's, then rank 2's, and so on.

    The sum is kept in float32 and rounded once to the dtype of the parts, so that each element
    has the same bits on every rank and whatever else is added beside it.
    """
    if parts.is_cuda:
        from specdec.kernels import rank_sum_triton

        return rank_sum_triton.sum_ranks(parts)
    return sum_ranks_reference(parts)
