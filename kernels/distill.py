"""Cross entropy with another model's distribution. Shape letters: N rows, M rows, V ids."""

import torch
from torch import Tensor


def distill_rows_reference(
    logits: Tensor, target_logits: Tensor, target_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch twin of ``distill_rows``."""
    log_probs = logits.float().log_softmax(-1)
    target = target_logits[target_rows].float()
    hits = log_probs.argmax(-1) == target.argmax(-1)
    target = target.softmax(-1)
    loss = -(target * log_probs).sum(-1)
    logits.copy_(log_probs.exp_() - target)
    return loss, hits


def distill_rows(
    logits: Tensor, target_logits: Tensor, target_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross entropy of each row of ``logits`` with ``softmax(target_logits[target_rows])``.

    logits [N, V], rows side by side: overwritten by the gradient of each row's loss with respect to
    it. target_logits [M, V], target_rows [N] int64.

    Returns the losses in nats, [N] float32, and where both have the same argmax, [N] bool. Of equal
    logits the lowest id is the argmax.
    """
    if logits.is_cuda:
        from specdec.kernels import distill_triton

        return distill_triton.distill_rows(logits, target_logits, target_rows)
    with torch.no_grad():
        return distill_rows_reference(logits, target_logits, target_rows)
