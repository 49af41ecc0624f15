"""Greedy choice of a token. Shape letters: T rows, V vocabulary, N parts of a vocabulary."""

import torch
from torch import Tensor

# A choice is one integer, the better the larger: its logit's place in the order of numbers in the
# upper half (a NaN above all), and below it the id, counted down from this.
TOP_ID = 0x7FFFFFFF
NO_CHOICE = -(1 << 63)


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


def best_part_reference(logits: Tensor, limit: int, first: int) -> Tensor:
    """Plain PyTorch twin of ``best_part``."""
    if limit == 0:
        return torch.full(logits.shape[:1], NO_CHOICE, device=logits.device)
    ids = logits[:, :limit].argmax(dim=-1)
    best = logits.gather(1, ids[:, None])[:, 0]
    # Minus zero equals zero.
    bits = torch.where(best == 0, 0.0, best).view(torch.int32)
    order = torch.where(bits < 0, bits ^ TOP_ID, bits)
    order = torch.where(best.isnan(), TOP_ID, order).long()
    return (order << 32) | (TOP_ID - first - ids)


def best_part(logits: Tensor, limit: int, first: int) -> Tensor:
    """The best choice of each row in one part of a vocabulary, for ``best_of_parts``.

    logits [T, V] float32, of which ``limit`` count; ``first``: the id of the part's first row.
    [T] int64: the logit and the id, packed so that the better choice is the larger.
    """
    if logits.is_cuda:
        from specdec.kernels import argmax_triton

        return argmax_triton.best_part(logits, limit, first)
    return best_part_reference(logits, limit, first)


def best_of_parts_reference(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch twin of ``best_of_parts``."""
    best = parts.amax(0)
    order = best >> 32
    infinity = 0x7F800000
    return TOP_ID - (best & 0xFFFFFFFF), (order < infinity) & (order > ~infinity)


def best_of_parts(parts: Tensor) -> tuple[Tensor, Tensor]:
    """``argmax`` of the whole vocabulary: parts [N, T] int64 -> [T] int64, [T] bool."""
    if parts.is_cuda:
        from specdec.kernels import argmax_triton

        return argmax_triton.best_of_parts(parts)
    return best_of_parts_reference(parts)
