"""Triton side of ``specdec.kernels.ngram``. Shape letters: R requests, L context, k drafts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import pdl_options, wait_for_inputs


@triton.jit
def _ngram_kernel(
    tokens,
    seq_len_column,
    slots,
    out,  # [R, K]
    token_stride,
    column_stride,
    L: tl.constexpr,
    K: tl.constexpr,
    MAX_N: tl.constexpr,
    MIN_N: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One request. A place and the length of its run are one integer, the better the larger."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    text = tokens + slot * token_stride
    seq_len = tl.load(seq_len_column + slot * column_stride).to(tl.int32)
    last = seq_len - 1
    best = tl.full([BLOCK], -1, tl.int64)
    for start in range(0, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        run = tl.zeros([BLOCK], tl.int32)
        matches = at < last
        for n in tl.static_range(MAX_N):
            wanted = tl.load(text + tl.maximum(last - n, 0))
            token = tl.load(text + at - n, mask=matches & (at >= n), other=-1)
            matches = matches & (token == wanted) & (at >= n) & (last >= n)
            run += matches.to(tl.int32)
        best = tl.maximum(best, tl.where(at < last, run.to(tl.int64) * L + at, -1))
    score = tl.max(best, axis=0)
    begin = tl.minimum((score % L).to(tl.int32) + 1, L - 1)
    period = tl.maximum(seq_len - begin, 1)
    steps = tl.arange(0, BLOCK_K)
    found = score >= MIN_N * L
    proposal = tl.load(text + begin + steps % period, mask=found & (steps < K), other=-1)
    tl.store(out + row * K + steps, proposal.to(tl.int64), mask=steps < K)


def propose_ngram(
    tokens: Tensor, seq_len: Tensor, slots: Tensor, k: int, max_n: int, min_n: int
) -> Tensor:
    """``specdec.kernels.ngram.propose_ngram``."""
    num_reqs = slots.shape[0]
    out = torch.empty(num_reqs, k, dtype=torch.int64, device=tokens.device)
    length = tokens.shape[1]
    _ngram_kernel[(num_reqs,)](
        tokens,
        seq_len,
        slots,
        out,
        tokens.stride(0),
        seq_len.stride(0),
        L=length,
        K=k,
        MAX_N=max_n,
        MIN_N=min_n,
        BLOCK=min(4096, max(32, triton.next_power_of_2(length))),
        BLOCK_K=triton.next_power_of_2(k),
        num_warps=8,
        **pdl_options(tokens),
    )
    return out
