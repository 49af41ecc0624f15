"""Acceptance of drafts by rows that sample, in Triton; the rows are cut by ``sampler_triton``.

The plain-PyTorch twin is ``specdec.verifier.acceptance.accept``. Shape letters: R requests, Q query
length, N = R * Q rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.argmax_triton import ranked
from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.sampler import SamplingRows
from specdec.kernels.sampler_triton import CHUNK, chunk_options, draw
from specdec.kernels.sampling import ACCEPT, RECOVER
from specdec.kernels.sampling_triton import (
    gumbel_from_bits,
    random_bits,
    row_key,
    uniform_from_key,
)
from specdec.kernels.weights_triton import (
    ANY_ALIGNMENT,
    NO_RANK,
    flat_rows,
    id_of,
    is_finite,
    kept_weights,
    row_stride_of,
)

_ACCEPT = tl.constexpr(ACCEPT)
_RECOVER = tl.constexpr(RECOVER)
_ANY_ALIGNMENT = [
    *ANY_ALIGNMENT,
    *("draft_ids", "num_drafted", "simulated", "tokens", "num_accepted", "failed"),
    *("recovered", "arrived"),
]


@triton.jit(do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _judge_kernel(
    logits,
    temperature,
    min_p,
    seed,
    coupled,
    output_index,
    peak,
    cut,
    mass,
    choice,
    draft_ids,  # [R, Q - 1] int64
    num_drafted,  # [R] int64
    draft_probs,  # [R, Q - 1, V] float32 or None
    simulated,  # [R, Q - 1] bool or None
    tokens,  # [R, Q] int64
    num_accepted,  # [R] int64
    failed,  # [R] bool
    recovered,  # [R, 2] int64
    arrived,  # [R] int32
    vocab_size,
    row_stride,
    Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    steps = tl.arange(0, BLOCK_Q)
    inside, drafts = steps < Q, steps < Q - 1
    rows = request * Q + steps
    largest = tl.load(peak + rows, mask=inside, other=0.0)
    # Rows by rejection have not chosen: any id will do until they recover a token.
    target = id_of(tl.load(choice + rows, mask=inside, other=0))
    target = tl.minimum(target, vocab_size - 1)
    sound = is_finite(largest)
    draft = tl.load(draft_ids + request * (Q - 1) + steps, mask=drafts, other=-2)
    agrees = draft == target
    heat = tl.load(temperature + request)
    if (heat != 0.0) & (tl.load(coupled + request) == 0):
        ids = tl.maximum(draft, 0)
        _, weights = kept_weights(
            logits + rows * row_stride,
            ids.to(tl.int32),
            drafts,
            largest,
            heat,
            tl.load(min_p + request),
            tl.load(cut + rows, mask=inside, other=0),
        )
        whole = tl.load(mass + rows, mask=inside, other=1)
        probs = tl.div_rn(weights.to(tl.float32), whole.to(tl.float32))
        index = tl.load(output_index + request) + steps
        key = row_key(tl.load(seed + request), index, tl.full([], _ACCEPT, tl.int64))
        ratio = uniform_from_key(key)
        if draft_probs is not None:
            place = (request * (Q - 1) + steps) * vocab_size + ids
            ratio = ratio * tl.load(draft_probs + place, mask=drafts, other=0.0)
        agrees = ratio < probs
    if simulated is not None:
        agrees = tl.load(simulated + request * (Q - 1) + steps, mask=drafts, other=0) != 0
    agrees = agrees & sound & drafts & (steps < tl.load(num_drafted + request))
    accepted = tl.min(tl.where(agrees, Q, steps), axis=0)
    own = tl.where(steps == accepted, target, -1)
    tl.store(tokens + rows, tl.where(steps < accepted, draft, own), mask=inside)
    tl.store(num_accepted + request, accepted.to(tl.int64))
    fails = tl.max(((steps == accepted) & (sound == 0)).to(tl.int32), axis=0)
    tl.store(failed + request, fails != 0)
    no_rank = tl.full([], NO_RANK, tl.int64)
    tl.store(recovered + 2 * request, no_rank)
    tl.store(recovered + 2 * request + 1, no_rank)
    tl.store(arrived + request, 0)


@triton.jit(do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _recover_kernel(
    logits,
    temperature,
    min_p,
    seed,
    coupled,
    output_index,
    peak,
    cut,
    mass,
    draft_ids,
    num_drafted,
    draft_probs,
    tokens,
    num_accepted,
    failed,
    recovered,  # [R, 2] int64: the choice of what is left of p, and that of p
    arrived,  # [R] int32: programs of a request that are done
    vocab_size,
    row_stride,
    Q: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + request)
    by_rejection = (heat != 0.0) & (tl.load(coupled + request) == 0)
    if by_rejection & (tl.load(failed + request) == 0):
        accepted = tl.load(num_accepted + request)
        row = request * Q + accepted
        ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = ids < vocab_size
        _, weights = kept_weights(
            logits + row * row_stride,
            ids,
            inside,
            tl.load(peak + row),
            heat,
            tl.load(min_p + request),
            tl.load(cut + row),
        )
        probs = tl.div_rn(weights.to(tl.float32), tl.load(mass + row).to(tl.float32))
        residual = probs
        if accepted < tl.load(num_drafted + request):
            place = request * (Q - 1) + accepted
            if draft_probs is None:
                residual = tl.where(ids == tl.load(draft_ids + place), 0.0, probs)
            else:
                proposal = tl.load(draft_probs + place * vocab_size + ids, mask=inside, other=0.0)
                residual = probs - tl.where(is_finite(proposal), proposal, 0.0)
        index = tl.load(output_index + request) + accepted
        key = row_key(tl.load(seed + request), index, tl.full([], _RECOVER, tl.int64))
        noise = gumbel_from_bits(random_bits(key, ids.to(tl.int64)))
        left = tl.where(residual > 0.0, ranked(tl.log(residual) + noise, ids), NO_RANK)
        plain = tl.where(probs > 0.0, ranked(tl.log(probs) + noise, ids), NO_RANK)
        tl.atomic_max(recovered + 2 * request, tl.max(left, axis=0), sem="relaxed")
        tl.atomic_max(recovered + 2 * request + 1, tl.max(plain, axis=0), sem="relaxed")
        if tl.atomic_add(arrived + request, 1) == tl.num_programs(1) - 1:
            none = tl.full([], NO_RANK, tl.int64)
            best = tl.atomic_max(recovered + 2 * request, none)
            # Rounding alone can leave nothing of p - q where the two are equal.
            if best == NO_RANK:
                best = tl.atomic_max(recovered + 2 * request + 1, none)
            tl.store(tokens + row, id_of(best))


def accept(
    logits: Tensor,
    draft_ids: Tensor,
    num_drafted: Tensor,
    draft_probs: Tensor | None,
    rows: SamplingRows,
    simulated: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``specdec.verifier.acceptance.accept`` behind rules and masks.

    Returns tokens [R, Q] int64, num_accepted [R] int64 and failed [R] bool.
    """
    logits = flat_rows(logits)
    num_reqs, query_len, vocab_size = logits.shape
    drawn = draw(logits, rows, drafts=False)
    tokens = torch.empty(num_reqs, query_len, dtype=torch.int64, device=logits.device)
    num_accepted = torch.empty_like(num_drafted)
    failed = torch.empty(num_reqs, dtype=torch.bool, device=logits.device)
    recovered = torch.empty(num_reqs, 2, dtype=torch.int64, device=logits.device)
    arrived = torch.empty(num_reqs, dtype=torch.int32, device=logits.device)
    if num_reqs == 0:
        return tokens, num_accepted, failed
    row_stride = row_stride_of(logits)
    # As the kernels read them.
    draft_ids = draft_ids.contiguous()
    if draft_probs is not None:
        draft_probs = draft_probs.contiguous()
    row_arguments = (rows.temperature, rows.min_p, rows.seed, rows.coupled, rows.output_index)
    _judge_kernel[(num_reqs,)](
        logits, *row_arguments, *drawn, draft_ids, num_drafted, draft_probs, simulated,
        tokens, num_accepted, failed, recovered, arrived, vocab_size, row_stride, Q=query_len,
        BLOCK_Q=triton.next_power_of_2(query_len), num_warps=1, **pdl_options(logits),
    )  # fmt: skip
    _recover_kernel[(num_reqs, triton.cdiv(vocab_size, CHUNK))](
        logits, *row_arguments, drawn.peak, drawn.cut, drawn.mass, draft_ids, num_drafted,
        draft_probs, tokens, num_accepted, failed, recovered, arrived, vocab_size, row_stride,
        Q=query_len, **chunk_options(logits),
    )  # fmt: skip
    return tokens, num_accepted, failed
