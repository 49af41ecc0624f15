"""Low-rank deltas of many adapters, added to the rows of one batch.

Shape letters: T token rows, K input features, N output features, P fused projections, r rank of a
slot, S adapter slots.

The delta of a row is ``B[slot] @ (A[slot] @ x)``. A x is rounded to x's dtype, as a layer's output
is, B (A x) to that of the finished product, and so is the sum of the two. Rows of slot -1 are not
touched. A row's bits depend on neither the number of rows nor their adapters.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels.activation import silu_mul_reference
from specdec.kernels.linear import linear_reference

# Rows whose adapters' weights are gathered at once, which bounds the memory that takes.
_ROWS_AT_ONCE = 64


def lora_delta_reference(
    out: Tensor,
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    slot_of_token: Tensor,
    parts: Sequence[int] | None = None,
) -> Tensor:
    """Plain PyTorch twin of ``lora_delta_``: each row is multiplied by its own weights."""
    parts = tuple(parts or (out.shape[1],))
    rank = a_stack.shape[1] // len(parts)
    for first in range(0, x.shape[0], _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        slots = slot_of_token[rows].long()
        index = slots.clamp_min(0)
        shrunk = torch.bmm(a_stack[index], x[rows].unsqueeze(2))  # [T, P * r, 1]
        b_rows = b_stack[index]
        deltas, start = [], 0
        for number, width in enumerate(parts):
            b = b_rows[:, start : start + width].to(out.dtype)
            part = shrunk[:, number * rank : (number + 1) * rank].to(out.dtype)
            deltas.append(torch.bmm(b, part))
            start += width
        product = out[rows]
        added = product + torch.cat(deltas, dim=1).squeeze(2)
        product.copy_(torch.where((slots >= 0)[:, None], added, product))
    return out


def lora_delta_(
    out: Tensor,
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    slot_of_token: Tensor,
    parts: Sequence[int] | None = None,
) -> Tensor:
    """Add each row's low-rank delta to ``out`` in place, and return it.

    Args:
        out: [T, N] contiguous, the rounded products of the base layer; the sum keeps its dtype.
        x: [T, K], what the layer was given.
        a_stack: [S, P * r, K] in x's dtype, the parts' shrinking weights one below the other. Slots
            may lie apart in memory; what follows a slot's own rank is zero.
        b_stack: [S, N, r] in x's dtype, the expanding weights with the adapter's scale in them.
        slot_of_token: [T] int32 or int64; -1 leaves the row as it is, bit for bit.
        parts: output features of each of the P projections that share ``x``; one of N by default.
    """
    if x.is_cuda:
        from specdec.kernels import lora_triton

        return lora_triton.lora_delta_(out, x, a_stack, b_stack, slot_of_token, parts)
    return lora_delta_reference(out, x, a_stack, b_stack, slot_of_token, parts)


def lora_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a_stack: Tensor,
    b_stack: Tensor,
    slot_of_token: Tensor,
    parts: Sequence[int] | None = None,
) -> Tensor:
    """Plain PyTorch twin of ``lora_linear``."""
    product = linear_reference(x, weight, bias)
    return lora_delta_reference(product, x, a_stack, b_stack, slot_of_token, parts)


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a_stack: Tensor,
    b_stack: Tensor,
    slot_of_token: Tensor,
    parts: Sequence[int] | None = None,
    tiles: Tensor | None = None,
) -> Tensor:
    """``linear(x, weight, bias)`` with each row's delta: the bits of the two one after the other.

    Arguments as of ``linear`` and ``lora_delta_``; ``tiles``, where layers share them, are the rows
    sorted by slot (``lora_rows.slot_tiles``). On a GPU all expanding weights of the batch's slots
    must be finite.
    """
    if x.is_cuda:
        from specdec.kernels import lora_linear_triton

        return lora_linear_triton.lora_linear(
            x, weight, bias, a_stack, b_stack, slot_of_token, parts, tiles
        )
    return lora_linear_reference(x, weight, bias, a_stack, b_stack, slot_of_token, parts)


def lora_linear_silu_mul_reference(
    x: Tensor, weight: Tensor, a_stack: Tensor, b_stack: Tensor, slot_of_token: Tensor
) -> Tensor:
    """Plain PyTorch twin of ``lora_linear_silu_mul``."""
    halves = (weight.shape[0] // 2,) * 2
    stacks = (a_stack, b_stack, slot_of_token)
    return silu_mul_reference(lora_linear_reference(x, weight, None, *stacks, halves))


def lora_linear_silu_mul(
    x: Tensor,
    weight: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    slot_of_token: Tensor,
    tiles: Tensor | None = None,
) -> Tensor:
    """``silu_mul(lora_linear(x, weight, ...))`` with the same bits.

    weight [2F, K] (gate rows, then up rows), a_stack [S, 2 * r, K], b_stack [S, 2F, r] -> [T, F].
    """
    if x.is_cuda:
        from specdec.kernels import lora_linear_triton

        return lora_linear_triton.lora_linear_silu_mul(
            x, weight, a_stack, b_stack, slot_of_token, tiles
        )
    return lora_linear_silu_mul_reference(x, weight, a_stack, b_stack, slot_of_token)


def lora_embedding_reference(
    out: Tensor, ids: Tensor, a_stack: Tensor, b_stack: Tensor, slot_of_token: Tensor
) -> Tensor:
    """Plain PyTorch twin of ``lora_embedding_``."""
    index = slot_of_token.long().clamp_min(0)
    shrunk = a_stack[index, ids]  # [T, r]
    delta = torch.bmm(b_stack[index], shrunk.unsqueeze(2)).squeeze(2)
    added = out + delta.to(out.dtype)
    return out.copy_(torch.where((slot_of_token >= 0)[:, None], added, out))


def lora_embedding_(
    out: Tensor, ids: Tensor, a_stack: Tensor, b_stack: Tensor, slot_of_token: Tensor
) -> Tensor:
    """Add each row's embedding delta to ``out`` [T, N] in place, and return it.

    ids [T] int64; a_stack [S, vocab, r], a token's row being its shrunk one-hot vector; b_stack
    [S, N, r] with the scale in it. Rows of slot -1 stay as they are.
    """
    if out.is_cuda:
        from specdec.kernels import lora_embedding_triton

        return lora_embedding_triton.lora_embedding_(out, ids, a_stack, b_stack, slot_of_token)
    return lora_embedding_reference(out, ids, a_stack, b_stack, slot_of_token)
