"""Losses against the target's distribution.

Shape letters: B rows, T positions, C hidden size, V ids that can be proposed, N counted positions.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.distill import distill_rows
from specdec.train.rows import Batch

# Counted positions whose logits exist at the same time.
MAX_ROWS = 8192


class _SoftCrossEntropy(torch.autograd.Function):
    """The gradient is made in the forward pass, in place of the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target_logits: Tensor, target_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = target_logits.dtype
        matrix = weight.detach().to(dtype)
        share = 1 / max(hidden.shape[0], 1)
        total = hidden.new_zeros((), dtype=torch.float32)
        agreed = torch.zeros_like(total)
        grad_hidden = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
        grad_weight = (
            torch.zeros(weight.shape, device=weight.device) if weight.requires_grad else None
        )
        for first in range(0, hidden.shape[0], MAX_ROWS):
            x = hidden[first : first + MAX_ROWS].detach().to(dtype)
            logits = F.linear(x, matrix)
            rows = target_rows[first : first + MAX_ROWS]
            loss, hits = distill_rows(logits, target_logits, rows)
            total += share * loss.sum()
            agreed += share * hits.sum()
            grad_hidden[first : first + MAX_ROWS] = logits @ matrix
            if grad_weight is not None:
                grad_weight += (logits.mT @ x).float()
        ctx.save_for_backward(grad_hidden, *([] if grad_weight is None else [grad_weight]))
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.share = share
        ctx.mark_non_differentiable(agreed)
        return total, agreed

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, *grad_weight = ctx.saved_tensors
        scale = scale * ctx.share
        of_weight = (grad_weight[0] * scale).to(ctx.dtypes[1]) if grad_weight else None
        # The mean's share is small: it is taken in float32, before the result is rounded.
        return (grad_hidden.float() * scale).to(ctx.dtypes[0]), of_weight, None, None


def soft_cross_entropy(
    hidden: Tensor,  # [B, T, C]
    weight: Tensor,  # [V, C]
    target_logits: Tensor,  # [B, T, V], of any floating dtype, in which products are taken too
    counted: Tensor,  # [B, at most T] bool, of ``hidden``
    ahead: int = 0,  # the target's logits for position i are those at i + ahead
) -> tuple[Tensor, Tensor]:
    """Mean over the counted positions of the cross entropy between ``softmax(target_logits)`` and
    the logits ``hidden @ weight.T``, and the share of them where both have the same argmax.
    """
    row, position = counted.nonzero(as_tuple=True)
    flat = row * hidden.shape[1] + position
    with torch.autocast(hidden.device.type, enabled=False):
        total, agreed = _SoftCrossEntropy.apply(
            hidden.flatten(0, 1).index_select(0, flat),
            weight,
            target_logits.flatten(0, 1),
            flat + ahead,
        )
    return total, agreed


def drafted_positions(batch: Batch, step: int) -> Tensor:
    """Which positions draft an answer's token at this unrolled step, [B, T - 2 - step] bool.

    Position i reads the target's state there and the token after; at step j it drafts token
    i + 2 + j, which must belong to the same document and to an answer.
    """
    ahead = 2 + step
    same = batch.document[:, :-ahead] == batch.document[:, ahead:]
    return same & batch.answer[:, ahead:]


def next_tokens(tokens: Tensor, distance: int) -> Tensor:
    """The token ``distance`` places after each position, 0 past the end. [B, T]"""
    return F.pad(tokens[:, distance:], (0, distance))


def step_weights(num_steps: int, decay: float) -> list[float]:
    """Weights of the unrolled steps' losses; they add up to one."""
    raw = [decay**step for step in range(num_steps)]
    return [weight / sum(raw) for weight in raw]
