"""Greedy choice of a token. Shape letters: T rows, V vocabulary."""

from torch import Tensor


def argmax_reference(logits: Tensor, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Plain PyTorch twin of ``argmax``."""
    ids = logits[:, :limit].argmax(dim=-1)
    return ids, logits.gather(1, ids[:, None])[:, 0].isfinite()


def argmax(logits: Tensor, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """The id of each row's largest logit, and whether that logit is finite.

    logits [T, V] float32 -> [T] int64, [T] bool. Ids at or past ``limit`` are not looked at. Of
    equal logits the lowest id wins, and a NaN counts as the largest, so the id always lies in the
    vocabulary and a NaN or +inf anywhere in the row is seen in the flag.
    """
    if logits.is_cuda:
        from specdec.kernels import argmax_triton

        return argmax_triton.argmax(logits, limit)
    return argmax_reference(logits, limit)
