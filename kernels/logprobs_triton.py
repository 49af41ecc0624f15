"""Triton side of ``specdec.verifier.sampling.token_logprobs``: the likeliest tokens without a sort.

Shape letters: R requests, Q query length, N = R * Q rows, V vocabulary, C candidates of a row. The
sum of exponentials is that of the integer weights of ``sampler``, at temperature 1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.argmax_triton import ranked
from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.sampler_triton import (
    chunk_options,
    gather,
    gather_options,
    peaks,
)
from specdec.kernels.weights_triton import (
    ANY_ALIGNMENT,
    NO_RANK,
    UNIT,
    best_of,
    flat_rows,
    id_of,
    is_finite,
    logit_of,
    row_stride_of,
)

# Candidates that are looked over at once where there are no more.
_FEW = tl.constexpr(128)
_ANY_ALIGNMENT = [*ANY_ALIGNMENT, "wanted", "tokens", "chosen", "top_ids", "top"]


@triton.jit(do_not_specialize=["rows_each"], do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _gather_kernel(
    logits,
    wanted,  # [R] bool
    best,
    group_max,
    counts,
    total,
    found,
    vocab_size,
    row_stride,
    num_chunks,
    rows_each,
    COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(wanted + row // rows_each) != 0:
        one = tl.full([], 1.0, tl.float32)
        gather(
            logits + row * row_stride, row, one, tl.full([], COUNT, tl.int64), best, group_max,
            counts, total, found, vocab_size, num_chunks, CHUNK, GROUPS, BLOCK_PARTS, BLOCK_G, C,
        )  # fmt: skip


@triton.jit
def _store_top(top_ids, top, row, place, rank, peak, log_mass, COUNT: tl.constexpr):
    tl.store(top_ids + row * COUNT + place, id_of(rank))
    tl.store(top + row * COUNT + place, (logit_of(rank) - peak) - log_mass)


@triton.jit
def _take_top(
    found, number, top_ids, top, row, peak, log_mass, SIZE: tl.constexpr, COUNT: tl.constexpr
):
    """Store the best COUNT of a row's candidates, which are at most SIZE."""
    index = tl.arange(0, SIZE)
    ranks = tl.load(found + index, mask=index < number, other=NO_RANK)
    for place in range(COUNT):
        rank = tl.max(ranks, axis=0)
        _store_top(top_ids, top, row, place, rank, peak, log_mass, COUNT)
        ranks = tl.where(ranks == rank, NO_RANK, ranks)


@triton.jit(do_not_specialize=["rows_each"], do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _top_kernel(
    logits,
    wanted,
    tokens,  # [N] int64
    best,
    counts,
    total,
    found,
    chosen,  # [N] float32
    top_ids,  # [N, COUNT] int64
    top,  # [N, COUNT] float32
    vocab_size,
    row_stride,
    num_chunks,
    rows_each,
    COUNT: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    peak = logit_of(best_of(best, row, num_chunks, BLOCK_PARTS))
    if (tl.load(wanted + row // rows_each) == 0) | (is_finite(peak) == 0):
        index = tl.arange(0, BLOCK_COUNT)
        places = row * COUNT + index
        tl.store(top_ids + places, tl.zeros([BLOCK_COUNT], tl.int64), mask=index < COUNT)
        tl.store(top + places, tl.zeros([BLOCK_COUNT], tl.float32), mask=index < COUNT)
        tl.store(chosen + row, 0.0)
    else:
        logits += row * row_stride
        log_mass = tl.log(tl.load(total + row).to(tl.float32) / UNIT)
        token = tl.maximum(tl.load(tokens + row), 0)
        tl.store(chosen + row, (tl.load(logits + token) - peak) - log_mass)
        number = tl.load(counts + row)
        candidates = found + row * C
        if (number >= COUNT) & (number <= _FEW):
            _take_top(candidates, number, top_ids, top, row, peak, log_mass, _FEW, COUNT)
        elif (number >= COUNT) & (number <= C):
            _take_top(candidates, number, top_ids, top, row, peak, log_mass, C, COUNT)
        else:
            # Many equal logits, or few that weigh anything: the whole row for each.
            limit = tl.full([], (1 << 63) - 1, tl.int64)
            for place in range(COUNT):
                rank = tl.full([], NO_RANK, tl.int64)
                for start in range(0, vocab_size, BLOCK):
                    ids = start + tl.arange(0, BLOCK)
                    inside = ids < vocab_size
                    ranks = ranked(tl.load(logits + ids, mask=inside, other=float("-inf")), ids)
                    ranks = tl.where(inside & (ranks < limit), ranks, NO_RANK)
                    rank = tl.maximum(rank, tl.max(ranks, axis=0))
                _store_top(top_ids, top, row, place, rank, peak, log_mass, COUNT)
                limit = rank


def token_logprobs(
    logits: Tensor, tokens: Tensor, count: int, wanted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``specdec.verifier.sampling.token_logprobs``: chosen [R, Q], top_ids and top [R, Q, n]."""
    logits = flat_rows(logits)
    num_reqs, query_len, vocab_size = logits.shape
    count, num_rows = min(count, vocab_size), num_reqs * query_len
    shape = (num_reqs, query_len, count)
    chosen = torch.empty(shape[:2], dtype=torch.float32, device=logits.device)
    top_ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    top = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return chosen, top_ids, top
    gathered = peaks(logits)
    num_chunks = gathered.best.shape[1]
    row_stride, options = row_stride_of(logits), gather_options(gathered)
    _gather_kernel[(num_rows, num_chunks)](
        logits, wanted, *gathered, vocab_size, row_stride, num_chunks, query_len, COUNT=count,
        **options, **chunk_options(logits),
    )  # fmt: skip
    _top_kernel[(num_rows,)](
        logits, wanted, tokens.contiguous(), gathered.best, gathered.counts, gathered.total,
        gathered.found, chosen, top_ids, top, vocab_size, row_stride, num_chunks, query_len,
        COUNT=count, BLOCK_COUNT=triton.next_power_of_2(count),
        BLOCK_PARTS=options["BLOCK_PARTS"], BLOCK=2048, C=options["C"], **pdl_options(logits),
    )  # fmt: skip
    return chosen, top_ids, top
