"""The cut of a row: top_k and top_p as one rank, by bisection. One program a row.

Shape letters: N rows, V vocabulary, C candidates of a row. Terms as in ``sampler_triton``.
"""

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.argmax_triton import ranked
from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.sampler import SamplingRows
from specdec.kernels.weights_triton import (
    ANY_ALIGNMENT,
    MIN_HEAT,
    NO_RANK,
    REACH,
    Drawn,
    best_of,
    choice_noise,
    id_of,
    is_finite,
    logit_of,
    min_weight_of,
    row_stride_of,
    scale_of,
    weight_of,
)

# Candidates of a row that one program takes in at once.
MAX_CANDIDATES = 2048
# No number of tokens, and no mass, comes near.
_NEVER = tl.constexpr(1 << 62)


@triton.jit
def _lowest_rank(logit):
    """The rank at or above which stand all tokens that have this logit or a larger one."""
    return ranked(logit, tl.full([], 0x7FFFFFFF, tl.int32))


@triton.jit
def _middle(low, high):
    """A rank between two: that of the number in the middle if it lies there, else by halving."""
    number = 0.5 * logit_of(low) + 0.5 * logit_of(high)
    rank = _lowest_rank(number)
    half = (low >> 1) + (high >> 1) + (low & high & 1)
    return tl.where((rank > low) & (rank < high), rank, half)


@triton.jit
def _border(ranks, weights, low, num_low, mass_low, high, num_high, mass_high, num, mass):
    """The highest cut above which stand ``num`` tokens or ``mass``, of those between two cuts.

    ``low`` is such a cut and ``high`` is none; with each go the number and mass of the tokens at
    or above it. ``ranks`` and ``weights``: all tokens from ``low`` up to ``high``.

    Returns the cut, and the number and mass of the tokens that it keeps.
    """
    num_above, mass_above = num_high, mass_high
    while (num_low - num_high > 1) & (num_low != num):
        middle = _middle(low, high)
        inside = ranks >= middle
        num_now = num_above + tl.sum(inside.to(tl.int32), axis=0).to(tl.int64)
        mass_now = mass_above + tl.sum(tl.where(inside, weights, 0), axis=0)
        if (num_now >= num) | (mass_now >= mass):
            low, num_low, mass_low = middle, num_now, mass_now
        else:
            high, num_high = middle, num_now
    return low, num_low, mass_low


@triton.jit
def _above(logits, cut, peak, scale, vocab_size, BLOCK: tl.constexpr):
    """Number and mass of a row's tokens at or above a cut."""
    number = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < vocab_size
        values = tl.load(logits + ids, mask=inside, other=float("-inf"))
        inside = inside & (ranked(values, ids) >= cut)
        number += inside.to(tl.int32)
        mass += tl.where(inside, weight_of((values - peak) * scale), 0)
    return tl.sum(number, axis=0).to(tl.int64), tl.sum(mass, axis=0)


@triton.jit
def _search(
    logits, found, peak, scale, vocab_size,
    low, num_low, mass_low, high, num_high, mass_high, num, mass,
    BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """``_border`` among all tokens of a row: over it until what is left fits in ``found`` [C]."""
    while (num_low - num_high > C) & (num_low != num):
        middle = _middle(low, high)
        num_now, mass_now = _above(logits, middle, peak, scale, vocab_size, BLOCK)
        if (num_now >= num) | (mass_now >= mass):
            low, num_low, mass_low = middle, num_now, mass_now
        else:
            high, num_high, mass_high = middle, num_now, mass_now
    if (num_low - num_high > 1) & (num_low != num):
        used = 0
        tl.debug_barrier()
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            inside = ids < vocab_size
            ranks = ranked(tl.load(logits + ids, mask=inside, other=float("-inf")), ids)
            take = (inside & (ranks >= low) & (ranks < high)).to(tl.int32)
            place = used + tl.cumsum(take, axis=0) - 1
            tl.store(found + place, ranks, mask=take > 0)
            used += tl.sum(take, axis=0)
        # What the other threads of this program have stored is read next.
        tl.debug_barrier()
        index = tl.arange(0, C)
        ranks = tl.load(found + index, mask=index < used, other=NO_RANK)
        weights = tl.where(index < used, weight_of((logit_of(ranks) - peak) * scale), 0)
        low, num_low, mass_low = _border(
            ranks, weights, low, num_low, mass_low, high, num_high, mass_high, num, mass
        )
    return low, num_low, mass_low


@triton.jit(do_not_specialize=["rows_each"], do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _cut_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    coupled,
    output_index,
    best,  # [N, chunks] int64
    counts,  # [N] int32
    total,  # [N] int64
    found,  # [N, C] int64
    peak,  # [N] float32
    cut,  # [N] int64
    mass,  # [N] int64
    choice,  # [N] int64
    is_open,  # [N] int32
    vocab_size,
    row_stride,
    num_chunks,
    rows_each,
    DRAFTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    request = row // rows_each
    heat = tl.load(temperature + request)
    top = best_of(best, row, num_chunks, BLOCK_PARTS)
    largest = logit_of(top)
    is_sampled = (heat != 0.0) & is_finite(largest)
    tl.store(peak + row, largest)
    tl.store(is_open + row, is_sampled.to(tl.int32))
    tl.store(cut + row, NO_RANK)
    tl.store(mass + row, tl.full([], 0, tl.int64))
    tl.store(choice + row, tl.where(is_sampled, NO_RANK, top))
    k = tl.load(top_k + request)
    k = tl.where((k > 0) & (k < vocab_size), k, _NEVER)
    share = tl.load(top_p + request)
    if is_sampled & ((k != _NEVER) | (share < 1.0)):
        logits += row * row_stride
        found += row * C
        scale = scale_of(heat)
        all_mass = tl.load(total + row)
        number = tl.load(counts + row).to(tl.int64)
        index = tl.arange(0, C)
        held = index < number
        ranks = tl.load(found + index, mask=held, other=NO_RANK)
        scaled = (logit_of(ranks) - largest) * scale
        weights = tl.where(held, weight_of(scaled), 0)
        held_mass = tl.sum(weights, axis=0)
        # The candidates stand for the row as long as the cut lies among them.
        fits = number <= C
        has_all = fits & (held_mass == all_mass)
        lowest = _lowest_rank(largest - REACH * tl.maximum(heat, MIN_HEAT))
        low = tl.where(fits, tl.min(tl.where(held, ranks, top), axis=0), lowest)
        none = tl.full([], 0, tl.int64)
        not_held = number < 0
        num_low, mass_low = number, all_mass
        if k != _NEVER:
            if fits & (number >= k):
                low, num_low, mass_low = _border(
                    ranks, weights, low, number, held_mass, top + 1, none, none, k, _NEVER
                )
            elif has_all == 0:
                fits, low = not_held, lowest
                num_low, mass_low = _above(logits, low, largest, scale, vocab_size, BLOCK)
                if num_low >= k:
                    low, num_low, mass_low = _search(
                        logits, found, largest, scale, vocab_size,
                        low, num_low, mass_low, top + 1, none, none, k, _NEVER, BLOCK, C,
                    )  # fmt: skip
        elif fits:
            mass_low = held_mass
        if share < 1.0:
            whole = tl.where(k != _NEVER, mass_low, all_mass)
            wanted = tl.ceil(share.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
            if fits & (mass_low >= wanted):
                low, num_low, mass_low = _border(
                    ranks, weights, low, num_low, mass_low, top + 1, none, none, _NEVER, wanted
                )
            else:
                if k == _NEVER:
                    low = lowest
                    num_low, mass_low = _above(logits, low, largest, scale, vocab_size, BLOCK)
                fits = not_held
                low, num_low, mass_low = _search(
                    logits, found, largest, scale, vocab_size,
                    low, num_low, mass_low, top + 1, none, none, _NEVER, wanted, BLOCK, C,
                )  # fmt: skip
        tl.store(cut + row, low)
        if fits:
            kept = held & (ranks >= low) & (weights > 0)
            kept = kept & (weights >= min_weight_of(tl.load(min_p + request)))
            tl.store(mass + row, tl.sum(tl.where(kept, weights, 0), axis=0))
            tl.store(is_open + row, 0)
            by_coupling = tl.load(coupled + request) != 0
            if by_coupling | DRAFTS:
                output = tl.load(output_index + request) + row % rows_each
                ids = id_of(ranks)
                noise = choice_noise(tl.load(seed + request), output, ids, by_coupling)
                scores = tl.where(kept, ranked(scaled + noise, ids.to(tl.int32)), NO_RANK)
                tl.store(choice + row, tl.max(scores, axis=0))


def cut_rows(
    logits: Tensor,
    rows: SamplingRows,
    best: Tensor,
    counts: Tensor,
    total: Tensor,
    found: Tensor,
    drawn: Drawn,
    is_open: Tensor,
    *,
    drafts: bool,
) -> None:
    """Fill ``drawn``; rows left to be gone over are marked in ``is_open`` [N] int32."""
    num_rows, num_chunks = best.shape
    _cut_kernel[(num_rows,)](
        logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.coupled,
        rows.output_index, best, counts, total, found, *drawn, is_open, logits.shape[2],
        row_stride_of(logits), num_chunks, logits.shape[1], DRAFTS=drafts,
        BLOCK_PARTS=triton.next_power_of_2(num_chunks), BLOCK=4096, C=MAX_CANDIDATES, num_warps=8,
        **pdl_options(logits),
    )  # fmt: skip
