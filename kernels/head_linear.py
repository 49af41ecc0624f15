"""Linear layers of which every head has its own.

Shape letters: T token rows, H heads, K input features, N output features of a head.
"""

import torch
from torch import Tensor


def head_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Plain PyTorch twin of ``head_linear``."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x[:, h] @ weight[h]`` for every head h. x [T, H, K], weight [H, K, N] -> [T, H, N].

    Adds along K in order, in float32, and rounds to x's dtype once. The weight may be a view with
    its features in any order in memory.
    """
    if x.is_cuda:
        from specdec.kernels import head_linear_triton

        return head_linear_triton.head_linear(x, weight)
    return head_linear_reference(x, weight)
