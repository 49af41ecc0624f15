"""Losses against the target's distribution.

Shape letters: B rows, T positions, C hidden size, V ids that can be proposed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.train.rows import Batch


class _SoftCrossEntropy(torch.autograd.Function):
    """The gradient is made in the forward pass, row by row: logits of all rows never exist."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target_logits: Tensor, row_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = target_logits.dtype
        matrix = weight.detach().to(dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        agreed = torch.zeros_like(total)
        grad_hidden = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
        grad_weight = (
            torch.zeros(weight.shape, device=weight.device) if weight.requires_grad else None
        )
        for i in range(hidden.shape[0]):
            x = hidden[i].detach().to(dtype)
            logits = F.linear(x, matrix).float()
            log_probs = logits.log_softmax(-1)
            target = target_logits[i].float().softmax(-1)
            total += (row_weight[i] * -(target * log_probs).sum(-1)).sum()
            hits = logits.argmax(-1) == target.argmax(-1)
            agreed += (row_weight[i] * hits).sum()
            grad = ((log_probs.exp() - target) * row_weight[i][:, None]).to(dtype)
            grad_hidden[i] = grad @ matrix
            if grad_weight is not None:
                grad_weight += (grad.mT @ x).float()
        ctx.save_for_backward(grad_hidden, *([] if grad_weight is None else [grad_weight]))
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(agreed)
        return total, agreed

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, *grad_weight = ctx.saved_tensors
        of_weight = (grad_weight[0] * scale).to(ctx.dtypes[1]) if grad_weight else None
        return (grad_hidden * scale).to(ctx.dtypes[0]), of_weight, None, None


def soft_cross_entropy(
    hidden: Tensor,  # [B, T, C]
    weight: Tensor,  # [V, C]
    target_logits: Tensor,  # [B, T, V], of any floating dtype, in which products are taken too
    row_weight: Tensor,  # [B, T] float32
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the cross entropies between ``softmax(target_logits)`` and the logits
    ``hidden @ weight.T``, and the weight of the positions where both have the same argmax.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        total, agreed = _SoftCrossEntropy.apply(hidden, weight, target_logits, row_weight)
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
