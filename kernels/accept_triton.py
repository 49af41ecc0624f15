"""Acceptance, and the advance of all state, in Triton: one program per request.

The plain-PyTorch twins are in ``specdec.verifier.passes`` and ``specdec.verifier.acceptance``.
Shape letters: S state rows, R requests of the batch, Q query length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.pass_triton import StateTensors
from specdec.kernels.sampling import SIMULATED
from specdec.kernels.sampling_triton import row_key, uniform_from_key

_SIMULATED = tl.constexpr(SIMULATED)


@triton.jit
def _commit(
    row, kept, accepted, failed, drafted, slot, seq_len, tokens, seq_len_column, end_column,
    stop_ids, packed, token_stride, column_stride,
    Q: tl.constexpr, BLOCK_Q: tl.constexpr, NUM_STOPS: tl.constexpr,
):  # fmt: skip
    """Append what is ``kept`` [BLOCK_Q] to a row that still writes, and pack the result."""
    steps = tl.arange(0, BLOCK_Q)
    active = tl.load(end_column + slot * column_stride) > seq_len
    failed = tl.where(active, failed, 0)
    num_new = tl.where(active, accepted.to(tl.int32) + 1 - failed, 0)
    # The first token that ends the text is its last.
    stops = tl.load(stop_ids + slot * NUM_STOPS + tl.arange(0, NUM_STOPS))
    is_stop = tl.max((kept[:, None] == stops[None, :]).to(tl.int32), axis=1) > 0
    before = tl.min(tl.where(is_stop & (steps < num_new), steps, BLOCK_Q), axis=0)
    num_new = tl.minimum(num_new, before + 1)
    text = tokens + slot * token_stride + seq_len
    tl.store(text + steps, kept.to(tl.int32), mask=steps < num_new)
    if num_new > 0:
        tl.store(seq_len_column + slot * column_stride, seq_len + num_new)
    if (before < BLOCK_Q) | (failed > 0):
        tl.store(end_column + slot * column_stride, seq_len + num_new)

    out = packed + row * (Q + 4)
    tl.store(out + steps, kept, mask=steps < Q)
    tl.store(out + Q, num_new.to(tl.int64))
    tl.store(out + Q + 1, drafted)
    tl.store(out + Q + 2, accepted.to(tl.int64))
    tl.store(out + Q + 3, failed.to(tl.int64))


# As for the inputs of a pass: rows of one tensor lie at any alignment.
@triton.jit(
    do_not_specialize=["token_stride", "column_stride"],
    do_not_specialize_on_alignment=[
        *("targets", "finite", "draft_ids", "num_drafted", "slots", "tokens"),
        *("seq_len_column", "end_column", "seed_column", "stop_ids", "packed", "num_accepted"),
    ],
)
def _accept_kernel(
    targets,  # [R, Q] int64
    finite,  # [R, Q] bool
    draft_ids,  # [R, Q - 1] int64
    num_drafted,  # [R] int64
    slots,
    tokens,
    seq_len_column,
    end_column,
    seed_column,
    stop_ids,  # [S, NUM_STOPS] int64
    packed,  # [R, Q + 4] int64
    num_accepted,  # [R] int64
    rates,  # [Q - 1] float32 or None: simulated acceptance
    token_stride,
    column_stride,
    Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    SIMULATES: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    steps = tl.arange(0, BLOCK_Q)
    inside = steps < Q
    target = tl.load(targets + row * Q + steps, mask=inside, other=-1)
    sound = tl.load(finite + row * Q + steps, mask=inside, other=0) != 0
    draft = tl.load(draft_ids + row * (Q - 1) + steps, mask=steps < Q - 1, other=-2)
    drafted = tl.load(num_drafted + row)
    slot = tl.load(slots + row)
    seq_len = tl.load(seq_len_column + slot * column_stride)
    agrees = draft == target
    if SIMULATES:
        seed = tl.load(seed_column + slot * column_stride) + slot
        key = row_key(seed, seq_len + steps, tl.full([], _SIMULATED, tl.int64))
        rate = tl.load(rates + steps, mask=steps < Q - 1, other=0.0)
        agrees = uniform_from_key(key) < rate
    agrees = agrees & sound & (steps < drafted) & (steps < Q - 1)
    accepted = tl.min(tl.where(agrees, Q, steps), axis=0)
    failed = tl.max(((steps == accepted) & (sound == 0)).to(tl.int32), axis=0)
    kept = tl.where(steps <= accepted, target, -1)
    _commit(
        row, kept, accepted, failed, drafted, slot, seq_len, tokens, seq_len_column, end_column,
        stop_ids, packed, token_stride, column_stride, Q, BLOCK_Q, NUM_STOPS,
    )  # fmt: skip
    tl.store(num_accepted + row, accepted.to(tl.int64))


# As for the inputs of a pass: rows of one tensor lie at any alignment.
@triton.jit(
    do_not_specialize=["token_stride", "column_stride"],
    do_not_specialize_on_alignment=[
        *("chosen", "num_accepted", "failed", "num_drafted", "slots", "tokens"),
        *("seq_len_column", "end_column", "stop_ids", "packed"),
    ],
)
def _commit_kernel(
    chosen,  # [R, Q] int64: -1 behind the tokens to commit
    num_accepted,  # [R] int64
    failed,  # [R] bool
    num_drafted,  # [R] int64
    slots,
    tokens,
    seq_len_column,
    end_column,
    stop_ids,  # [S, NUM_STOPS] int64
    packed,  # [R, Q + 4] int64
    token_stride,
    column_stride,
    Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    steps = tl.arange(0, BLOCK_Q)
    kept = tl.load(chosen + row * Q + steps, mask=steps < Q, other=-1)
    accepted = tl.load(num_accepted + row)
    fails = tl.load(failed + row).to(tl.int32)
    drafted = tl.load(num_drafted + row)
    slot = tl.load(slots + row)
    seq_len = tl.load(seq_len_column + slot * column_stride)
    _commit(
        row, kept, accepted, fails, drafted, slot, seq_len, tokens, seq_len_column, end_column,
        stop_ids, packed, token_stride, column_stride, Q, BLOCK_Q, NUM_STOPS,
    )  # fmt: skip


def commit(
    state: StateTensors, chosen: Tensor, num_accepted: Tensor, failed: Tensor, num_drafted: Tensor
) -> Tensor:
    """``specdec.verifier.passes.commit``: packed [R, Q + 4] int64."""
    num_reqs, query_len = chosen.shape
    packed = torch.empty(num_reqs, query_len + 4, dtype=torch.int64, device=chosen.device)
    _commit_kernel[(num_reqs,)](
        chosen,
        num_accepted,
        failed,
        num_drafted,
        state.slots,
        state.tokens,
        state.seq_len,
        state.end,
        state.stop_ids,
        packed,
        state.tokens.stride(0),
        state.seq_len.stride(0),
        Q=query_len,
        BLOCK_Q=triton.next_power_of_2(query_len),
        NUM_STOPS=state.stop_ids.shape[1],
        num_warps=1,
        **pdl_options(chosen),
    )
    return packed


def accept_and_commit(
    state: StateTensors,
    targets: Tensor,
    finite: Tensor,
    draft_ids: Tensor,
    num_drafted: Tensor,
    rates: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``accept_greedy``, ``RowState.commit`` and ``PassResult.pack``: packed and num_accepted.

    With ``rates`` the drafts pass as in ``specdec.verifier.simulated``.
    """
    num_reqs, query_len = targets.shape
    packed = torch.empty(num_reqs, query_len + 4, dtype=torch.int64, device=targets.device)
    num_accepted = torch.empty_like(num_drafted)
    _accept_kernel[(num_reqs,)](
        targets,
        finite,
        draft_ids,
        num_drafted,
        state.slots,
        state.tokens,
        state.seq_len,
        state.end,
        state.seed,
        state.stop_ids,
        packed,
        num_accepted,
        rates,
        state.tokens.stride(0),
        state.seq_len.stride(0),
        Q=query_len,
        BLOCK_Q=triton.next_power_of_2(query_len),
        SIMULATES=rates is not None,
        NUM_STOPS=state.stop_ids.shape[1],
        num_warps=1,
        **pdl_options(targets),
    )
    return packed, num_accepted


@triton.jit(
    do_not_specialize=["max_len", "kv_lag", "column_stride"],
    do_not_specialize_on_alignment=[
        *("slots", "seq_lens", "remaining", "max_drafts", "num_accepted", "draft_len_column"),
    ],
)
def _advance_kernel(
    slots,
    seq_lens,
    remaining,
    max_drafts,
    num_accepted,
    draft_len_column,
    max_len,
    kv_lag,
    column_stride,
    KEEPS_DRAFTS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    column = draft_len_column + tl.load(slots + row) * column_stride
    seq_len = tl.load(seq_lens + row)
    drafts = tl.load(max_drafts + row)
    fits = (tl.load(remaining + row) > 0) & (seq_len + drafts <= max_len)
    if fits & (tl.load(column) >= seq_len - 1 - kv_lag):
        if KEEPS_DRAFTS:
            fed = tl.maximum(drafts - 1, 0)
            tl.store(column, seq_len + tl.minimum(tl.load(num_accepted + row), fed))
        else:
            tl.store(column, seq_len - 1)


def advance_draft_len(
    slots: Tensor,
    seq_lens: Tensor,
    remaining: Tensor,
    max_drafts: Tensor,
    num_accepted: Tensor,
    draft_len: Tensor,
    max_len: int,
    *,
    kv_lag: int = 1,
    keeps_drafts: bool = True,
) -> None:
    """``specdec.verifier.passes.advance_draft_len``; all [R] but the column ``draft_len`` [S]."""
    _advance_kernel[slots.shape](
        slots,
        seq_lens,
        remaining,
        max_drafts,
        num_accepted,
        draft_len,
        max_len,
        kv_lag,
        draft_len.stride(0),
        KEEPS_DRAFTS=keeps_drafts,
        num_warps=1,
        **pdl_options(slots),
    )
