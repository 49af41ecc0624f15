"""Triton side of ``distill_rows``: a row's logits are read twice and written once.

Shape letters: N rows, M rows, V ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _block(row, start, V, BLOCK: tl.constexpr):
    """Ids of a block, and its logits as float32 with minus infinity past the last id."""
    ids = start + tl.arange(0, BLOCK)
    return ids, tl.load(row + ids, mask=ids < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _best(values, ids, best_value, best_id):
    """The largest value so far and its lowest id."""
    value = tl.max(values, axis=0)
    at = tl.min(tl.where(values == value, ids, _NO_ID), axis=0)
    return tl.maximum(value, best_value), tl.where(value > best_value, at, best_id)


@triton.jit
def _distill_kernel(
    logits,  # [N, V]
    target_logits,  # [M, V], rows target_stride apart
    target_rows,  # [N]
    loss,  # [N]
    hits,  # [N]
    V,
    target_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * V
    target = target_logits + tl.load(target_rows + row) * target_stride
    top, target_top, top_id, target_id = float("-inf"), float("-inf"), 0, 0
    total, target_total, weighted = 0.0, 0.0, 0.0
    for start in range(0, V, BLOCK):
        ids, x = _block(own, start, V, BLOCK)
        _, t = _block(target, start, V, BLOCK)
        new_top, top_id = _best(x, ids, top, top_id)
        new_target_top, target_id = _best(t, ids, target_top, target_id)
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), axis=0)
        probs = tl.exp(t - new_target_top)
        shrunk = tl.exp(target_top - new_target_top)
        target_total = target_total * shrunk + tl.sum(probs, axis=0)
        # A probability of zero times a logit of minus infinity is zero here.
        weighted = weighted * shrunk + tl.sum(tl.where(ids < V, probs * x, 0.0), axis=0)
        top, target_top = new_top, new_target_top
    log_total = top + tl.log(total)
    target_log_total = target_top + tl.log(target_total)
    tl.store(loss + row, log_total - weighted / target_total)
    tl.store(hits + row, top_id == target_id)
    for start in range(0, V, BLOCK):
        ids, x = _block(own, start, V, BLOCK)
        _, t = _block(target, start, V, BLOCK)
        grad = tl.exp(x - log_total) - tl.exp(t - target_log_total)
        tl.store(own + ids, grad.to(logits.dtype.element_ty), mask=ids < V)


def distill_rows(
    logits: Tensor, target_logits: Tensor, target_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """``specdec.kernels.distill.distill_rows``."""
    assert logits.is_contiguous() and target_logits.stride(-1) == 1
    num_rows, vocab_size = logits.shape
    loss = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    hits = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows:
        block = min(_BLOCK, triton.next_power_of_2(vocab_size))
        _distill_kernel[(num_rows,)](
            logits,
            target_logits,
            target_rows,
            loss,
            hits,
            vocab_size,
            target_logits.stride(0),
            BLOCK=block,
            num_warps=8,
        )
    return loss, hits
