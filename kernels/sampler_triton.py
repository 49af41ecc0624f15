"""Triton side of ``specdec.kernels.sampler``: cuts without a sort, in a few passes over a row.

Shape letters: R requests, Q rows of each, N = R * Q rows, V vocabulary, C candidates of a row.

A token's rank is one 64-bit integer (``argmax_triton.ranked``), the better the larger, and no two
of a row are equal, so the cuts of top_k and top_p together are one integer too: tokens at or above
it stay. Sums are of integers, so all bits depend on the row alone. ``draw`` finds it in four
kernels, of which rows that need no cut skip all but the first and the last:

1. each part of a row leaves its best token, and the largest logit of every group of 128;
2. tokens at or above a floor are gathered; the floor lies where enough groups reach it;
3. one program a row bisects among them (``cut_triton``), or over the row where they do not do;
4. rows whose tokens do not lie in the buffer are gone over for their mass and choice.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.argmax_triton import ranked
from specdec.kernels.cut_triton import MAX_CANDIDATES, cut_rows
from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.sampler import SamplingRows
from specdec.kernels.weights_triton import (
    ANY_ALIGNMENT,
    MIN_HEAT,
    NO_RANK,
    REACH,
    UNIT,
    Drawn,
    best_of,
    choice_noise,
    flat_rows,
    id_of,
    is_finite,
    kept_weights,
    logit_of,
    row_stride_of,
    scale_of,
    weight_of,
)

GROUP = 128
# Tokens that one program takes; no result depends on it.
CHUNK = 2048


@triton.jit(do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _peaks_kernel(
    logits,
    best,  # [N, chunks] int64
    group_max,  # [N, groups] float32
    counts,  # [N] int32
    total,  # [N] int64
    vocab_size,
    row_stride,
    num_chunks,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf"))
    tl.store(best + row * num_chunks + chunk, tl.max(ranked(values, ids), axis=0))
    largest = tl.max(tl.reshape(values, [GROUPS, WIDTH]), axis=1)
    tl.store(group_max + (row * num_chunks + chunk) * GROUPS + tl.arange(0, GROUPS), largest)
    if chunk == 0:
        tl.store(counts + row, 0)
        tl.store(total + row, tl.full([], 0, tl.int64))


@triton.jit
def _floor(group_max, peak, lowest, top_k, num_groups, BLOCK_G: tl.constexpr):
    """A logit that at least top_k tokens reach, and not many more of them; else ``lowest``."""
    index = tl.arange(0, BLOCK_G)
    largest = tl.load(group_max + index, mask=index < num_groups, other=float("-inf"))
    # As many groups as reach it, so many tokens do at least. Without top_k three in eight do: of
    # 128,256 tokens some 500, and a few times as many where the likely ones lie close together.
    share = (3 * num_groups + 7) // 8
    wanted = tl.where((top_k > 0) & (top_k < share), top_k, share)
    enough, short, step = lowest, peak, 0
    if tl.sum((largest >= peak).to(tl.int32), axis=0) >= wanted:
        enough, step = peak, 24
    while step < 24:
        middle = 0.5 * enough + 0.5 * short
        reached = tl.sum((largest >= middle).to(tl.int32), axis=0)
        step += 1
        if reached >= wanted:
            enough = middle
            if reached <= wanted + wanted // 4 + 8:
                step = 24
        else:
            short = middle
    return enough


@triton.jit
def gather(
    logits, row, heat, k, best, group_max, counts, total, found, vocab_size, num_chunks,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_G: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Gather a part's candidates of a row: more than ``k`` of them from all parts, if they weigh.

    And add the mass of all its tokens at the temperature ``heat`` to ``total``.
    """
    peak = logit_of(best_of(best, row, num_chunks, BLOCK_PARTS))
    if is_finite(peak):
        floor = peak - REACH * tl.maximum(heat, MIN_HEAT)
        if vocab_size > C:
            num_groups = num_chunks * GROUPS
            floor = _floor(group_max + row * num_groups, peak, floor, k, num_groups, BLOCK_G)
        ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = ids < vocab_size
        values = tl.load(logits + ids, mask=inside, other=float("-inf"))
        weights = weight_of((values - peak) * scale_of(heat))
        tl.atomic_add(total + row, tl.sum(weights, axis=0), sem="relaxed")
        take = (inside & (values >= floor)).to(tl.int32)
        number = tl.sum(take, axis=0)
        if number > 0:
            first = tl.atomic_add(counts + row, number, sem="relaxed")
            place = first + tl.cumsum(take, axis=0) - 1
            held = (take > 0) & (place < C)
            tl.store(found + row * C + place, ranked(values, ids), mask=held)


@triton.jit(do_not_specialize=["rows_each"], do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _gather_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    best,
    group_max,
    counts,
    total,
    found,  # [N, C] int64: ranks, in any order
    vocab_size,
    row_stride,
    num_chunks,
    rows_each,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    request = row // rows_each
    heat = tl.load(temperature + request)
    k = tl.load(top_k + request)
    k = tl.where(k < vocab_size, k, 0)
    if (heat != 0.0) & ((k > 0) | (tl.load(top_p + request) < 1.0)):
        gather(
            logits + row * row_stride, row, heat, k, best, group_max, counts, total, found,
            vocab_size, num_chunks, CHUNK, GROUPS, BLOCK_PARTS, BLOCK_G, C,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows_each"], do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _choose_kernel(
    logits,
    temperature,
    min_p,
    seed,
    coupled,
    output_index,
    peak,
    cut,
    is_open,  # [N] int32
    mass,
    choice,
    vocab_size,
    row_stride,
    rows_each,
    DRAFTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_open + row) != 0:
        request = row // rows_each
        ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = ids < vocab_size
        scaled, weights = kept_weights(
            logits + row * row_stride,
            ids,
            inside,
            tl.load(peak + row),
            tl.load(temperature + request),
            tl.load(min_p + request),
            tl.load(cut + row),
        )
        tl.atomic_add(mass + row, tl.sum(weights, axis=0), sem="relaxed")
        by_coupling = tl.load(coupled + request) != 0
        if by_coupling | DRAFTS:
            index = tl.load(output_index + request) + row % rows_each
            noise = choice_noise(tl.load(seed + request), index, ids, by_coupling)
            scores = tl.where(weights > 0, ranked(scaled + noise, ids), NO_RANK)
            tl.atomic_max(choice + row, tl.max(scores, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["rows_each"], do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _dense_kernel(
    logits,
    temperature,
    min_p,
    coupled,
    peak,
    cut,
    mass,
    choice,
    out,  # [N, V] float32
    tokens,  # [N] int64 or None
    vocab_size,
    row_stride,
    rows_each,
    LOG: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    request = row // rows_each
    if tokens is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if tl.program_id(1) == 0:
            tl.store(tokens + row, id_of(tl.load(choice + row)))
    heat = tl.load(temperature + request)
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab_size
    result = tl.zeros([CHUNK], tl.float32)
    # Of drafts only those by rejection are asked for the distribution that they came from.
    if (tl.load(coupled + request) == 0) & (heat != 0.0) | LOG:
        scaled, weights = kept_weights(
            logits + row * row_stride,
            ids,
            inside,
            tl.load(peak + row),
            heat,
            tl.load(min_p + request),
            tl.load(cut + row),
        )
        whole = tl.load(mass + row).to(tl.float32)
        if LOG:
            result = tl.where(weights > 0, scaled - tl.log(whole / UNIT), float("-inf"))
        else:
            result = tl.div_rn(weights.to(tl.float32), whole)
    tl.store(out + row * vocab_size + ids, result, mask=inside)


def chunk_options(like: Tensor) -> dict[str, Any]:
    """Launch options of a kernel whose programs take CHUNK tokens each."""
    return {"CHUNK": CHUNK, "num_warps": 8, **pdl_options(like)}


class Gathered(NamedTuple):
    """Scratch of N rows: what their parts leave for the program that takes in a row."""

    best: Tensor  # [N, chunks] int64: the rank of each part's best token
    group_max: Tensor  # [N, groups] float32
    counts: Tensor  # [N] int32: candidates, also those that do not lie in ``found``
    total: Tensor  # [N] int64: the mass of all tokens
    found: Tensor  # [N, C] int64: ranks, in any order


def peaks(logits: Tensor) -> Gathered:
    """Begin with rows [R, Q, V]: the first kernel."""
    num_rows, vocab_size = logits.shape[0] * logits.shape[1], logits.shape[2]
    num_chunks = triton.cdiv(vocab_size, CHUNK)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    gathered = Gathered(
        best=empty(num_rows, num_chunks),
        group_max=empty(num_rows, num_chunks * (CHUNK // GROUP), dtype=torch.float32),
        counts=empty(num_rows, dtype=torch.int32),
        total=empty(num_rows),
        found=empty(num_rows, MAX_CANDIDATES),
    )
    if num_rows:
        _peaks_kernel[(num_rows, num_chunks)](
            logits, *gathered[:4], vocab_size, row_stride_of(logits), num_chunks,
            GROUPS=CHUNK // GROUP, WIDTH=GROUP, **chunk_options(logits),
        )  # fmt: skip
    return gathered


def gather_options(gathered: Gathered) -> dict[str, int]:
    num_chunks, num_groups = gathered.best.shape[1], gathered.group_max.shape[1]
    return {
        "GROUPS": CHUNK // GROUP,
        "BLOCK_PARTS": triton.next_power_of_2(num_chunks),
        "BLOCK_G": triton.next_power_of_2(num_groups),
        "C": MAX_CANDIDATES,
    }


def draw(logits: Tensor, rows: SamplingRows, *, drafts: bool) -> Drawn:
    """Cut every row, and choose a token of those that are greedy or coupled, and of all drafts.

    Args:
        logits: [R, Q, V] float32, as ``flat_rows`` makes them.
        drafts: the rows draft; then those by rejection choose too, with noise of their own.
    """
    num_reqs, query_len, vocab_size = logits.shape
    num_rows = num_reqs * query_len
    gathered = peaks(logits)
    num_chunks = gathered.best.shape[1]
    drawn = Drawn(
        peak=torch.empty(num_rows, dtype=torch.float32, device=logits.device),
        cut=torch.empty_like(gathered.total),
        mass=torch.empty_like(gathered.total),
        choice=torch.empty_like(gathered.total),
    )
    is_open = torch.empty_like(gathered.counts)
    if num_rows == 0:
        return drawn
    grid, options, row_stride = (num_rows, num_chunks), chunk_options(logits), row_stride_of(logits)
    _gather_kernel[grid](
        logits, rows.temperature, rows.top_k, rows.top_p, *gathered, vocab_size, row_stride,
        num_chunks, query_len, **gather_options(gathered), **options,
    )  # fmt: skip
    cut_rows(
        logits, rows, gathered.best, gathered.counts, gathered.total, gathered.found, drawn,
        is_open, drafts=drafts,
    )  # fmt: skip
    _choose_kernel[grid](
        logits, rows.temperature, rows.min_p, rows.seed, rows.coupled, rows.output_index,
        drawn.peak, drawn.cut, is_open, drawn.mass, drawn.choice, vocab_size, row_stride, query_len,
        DRAFTS=drafts, **options,
    )  # fmt: skip
    return drawn


def _dense(
    logits: Tensor, rows: SamplingRows, drawn: Drawn, tokens: Tensor | None, *, log: bool
) -> Tensor:
    num_rows, vocab_size = drawn.peak.shape[0], logits.shape[2]
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if num_rows:
        _dense_kernel[(num_rows, triton.cdiv(vocab_size, CHUNK))](
            logits, rows.temperature, rows.min_p, rows.coupled, drawn.peak, drawn.cut, drawn.mass,
            drawn.choice, out, tokens, vocab_size, row_stride_of(logits), logits.shape[1],
            LOG=log, **chunk_options(logits),
        )  # fmt: skip
    return out


def log_probs(logits: Tensor, rows: SamplingRows) -> Tensor:
    """``specdec.kernels.sampler.log_probs``."""
    logits = flat_rows(logits)
    return _dense(logits, rows, draw(logits, rows, drafts=False), None, log=True)


def draft_tokens(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """``specdec.verifier.sampling.draft_tokens``: tokens [R] int64, probabilities [R, V] float32.

    The probabilities of greedy and of coupled rows are all 0.
    """
    logits = flat_rows(logits[:, None])
    drawn = draw(logits, rows, drafts=True)
    tokens = torch.empty_like(drawn.choice)
    return tokens, _dense(logits, rows, drawn, tokens, log=False)[:, 0]
