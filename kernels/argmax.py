"""Greedy choice of a token. Shape letters: T rows, V vocabulary."""

from torch import Tensor


def argmax_reference(logits: Tensor, limit: int | None = None) -> Tensor:
    """Plain PyTorch twin of ``argmax``."""
    return logits[:, :limit].argmax(dim=-1)


def argmax(logits: Tensor, limit: int | None = None) -> Tensor:
    """The id of each row's largest logit. logits [T, V] float32 -> [T] int64.

    Ids at or past ``limit`` are not looked at. Of equal logits the lowest id wins, and a NaN counts
    as the largest, so the id always lies in the vocabulary.
    """
    if logits.is_cuda:
        from specdec.kernels import argmax_triton

        return argmax_triton.argmax(logits, limit)
    return argmax_reference(logits, limit)
