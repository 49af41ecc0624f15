"""The inputs of a uniform pass in one Triton kernel, a program per request.

The plain-PyTorch twins are ``verify_pass`` and ``draft_pass`` of ``specdec.verifier.passes``. Shape
letters: S state rows, R requests of the batch, Q query length, k drafts, L context, W width of a
block table.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import pdl_options, wait_for_inputs


class StateTensors(NamedTuple):
    """The state of all requests. The columns are views with one stride."""

    slots: Tensor  # [R] int64: the state row of each request of the batch
    tokens: Tensor  # [S, L + 1] int32
    block_table: Tensor  # [S, W] int32
    seq_len: Tensor  # [S] int64
    end: Tensor  # [S] int64
    k: Tensor  # [S] int64
    draft_len: Tensor  # [S] int64
    seed: Tensor  # [S] int64
    adapter: Tensor  # [S] int64
    stop_ids: Tensor  # [S, a power of two] int64: tokens that end a text; -1 is none
    block_size: int


class PassTensors(NamedTuple):
    """What ``verify_inputs`` and ``draft_inputs`` write."""

    input_ids: Tensor  # [R * Q] int64
    positions: Tensor  # [R * Q] int64
    slot_mapping: Tensor  # [R * Q] int64
    query_start_loc: Tensor  # [R + 1] int32
    context_lens: Tensor  # [R] int32
    seq_lens: Tensor  # [R] int32
    adapter_slots: Tensor | None  # [R * Q] int64
    block_table: Tensor  # [R, W] int32
    # [4, R] int64: committed tokens, tokens still to commit, most drafts, drafts that count or
    # whether the row may be drafted
    rows: Tensor
    draft_ids: Tensor  # [R, k] int64; drafts that do not count are 0


# Rows of one tensor lie at any alignment, and strides follow the caller: a kernel for each case
# would be compiled in the middle of traffic, for loads of eight bytes a thread.
_ANY_ALIGNMENT = [
    *("slots", "tokens", "block_table", "seq_len_column", "end_column", "k_column"),
    *("draft_len_column", "adapter_column", "given", "input_ids", "positions", "slot_mapping"),
    *("query_start_loc", "context_lens", "seq_lens", "adapter_slots", "table_out", "row_out"),
    "draft_ids",
]
_ANY_VALUE = [
    *("num_reqs", "offset", "min_drafts", "id_limit", "max_len", "table_stride"),
    *("kv_lag", "id_shift"),
    *("token_stride", "column_stride", "given_stride"),
]


@triton.jit(do_not_specialize=_ANY_VALUE, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _inputs_kernel(
    slots,
    tokens,
    block_table,
    seq_len_column,
    end_column,
    k_column,
    draft_len_column,
    adapter_column,
    given,  # ids by row: all drafts to verify, or the token to feed; nothing with FROM_TEXT
    input_ids,
    positions,
    slot_mapping,
    query_start_loc,
    context_lens,
    seq_lens,
    adapter_slots,
    table_out,
    row_out,  # [4, R]
    draft_ids,
    num_reqs,
    offset,  # where the pass begins, relative to the committed length
    min_drafts,  # a row that takes fewer drafts is not drafted
    id_limit,  # ids at or past this end a draft; what is fed to a draft model stays below
    max_len,
    kv_lag,
    id_shift,
    token_stride,
    column_stride,
    table_stride,
    given_stride,
    width,
    VERIFY: tl.constexpr,
    FROM_TEXT: tl.constexpr,
    NEEDS_KV: tl.constexpr,
    HAS_LORA: tl.constexpr,
    WRITE_TABLE: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    seq_len = tl.load(seq_len_column + slot * column_stride)
    remaining = tl.load(end_column + slot * column_stride) - seq_len
    max_drafts = tl.minimum(tl.load(k_column + slot * column_stride), remaining - 1)
    max_drafts = tl.maximum(max_drafts, 0)
    active = remaining > 0
    steps = tl.arange(0, BLOCK_Q)
    inside = steps < Q
    first = seq_len + offset

    if VERIFY:
        # Column j holds draft j - 1; column 0 the newest token.
        ids = tl.load(given + row * given_stride + steps - 1, mask=inside & (steps > 0), other=-1)
        usable = (steps <= max_drafts) & (ids >= 0) & (ids < id_limit)
        stop = tl.min(tl.where(inside & (steps > 0) & (usable == 0), steps, Q), axis=0)
        count = (stop - 1).to(tl.int64)
        ids = tl.where(steps < stop, ids, 0)
        tl.store(draft_ids + row * (Q - 1) + steps - 1, ids, mask=inside & (steps > 0))
        newest = tl.load(tokens + slot * token_stride + tl.maximum(seq_len - 1, 0)).to(tl.int64)
        ids = tl.where(steps == 0, newest, ids)
        num_valid = tl.where(active, count + 1, 0)
    else:
        ready = active
        if NEEDS_KV:
            draft_len = tl.load(draft_len_column + slot * column_stride)
            ready = ready & (draft_len >= seq_len - 1 - kv_lag) & (seq_len + max_drafts <= max_len)
        if FROM_TEXT:
            at = tl.minimum(tl.maximum(first + id_shift + steps, 0), token_stride - 2)
            ids = tl.load(tokens + slot * token_stride + at, mask=inside, other=0).to(tl.int64)
        else:
            ids = tl.load(given + row * given_stride + steps, mask=inside, other=0)
        ids = tl.minimum(ids, id_limit - 1)
        count = ready.to(tl.int64)
        num_valid = tl.where(ready & (max_drafts >= min_drafts), Q, 0)

    base = row.to(tl.int64) * Q
    at = first + steps
    held = inside & (steps < num_valid) & (at >= 0)
    column = tl.minimum(tl.maximum(at, 0) // BLOCK_SIZE, width - 1)
    block = tl.load(block_table + slot * table_stride + column, mask=held, other=0).to(tl.int64)
    kv_slot = tl.where(held, block * BLOCK_SIZE + at % BLOCK_SIZE, -1)
    tl.store(input_ids + base + steps, ids, mask=inside)
    tl.store(positions + base + steps, tl.minimum(tl.maximum(at, 0), max_len - 1), mask=inside)
    tl.store(slot_mapping + base + steps, kv_slot, mask=inside)
    if HAS_LORA:
        adapter = tl.load(adapter_column + slot * column_stride)
        tl.store(adapter_slots + base + steps, tl.broadcast_to(adapter, [BLOCK_Q]), mask=inside)
    tl.store(query_start_loc + row, row * Q)
    if row == num_reqs - 1:
        tl.store(query_start_loc + num_reqs, num_reqs * Q)
    tl.store(context_lens + row, first.to(tl.int32))
    keys = tl.where(num_valid > 0, tl.maximum(first + num_valid, 0), 0)
    tl.store(seq_lens + row, keys.to(tl.int32))
    tl.store(row_out + row, seq_len)
    tl.store(row_out + num_reqs + row, remaining)
    tl.store(row_out + 2 * num_reqs + row, max_drafts)
    tl.store(row_out + 3 * num_reqs + row, count)
    if WRITE_TABLE:
        for start in range(0, width, BLOCK_W):
            columns = start + tl.arange(0, BLOCK_W)
            blocks = tl.load(block_table + slot * table_stride + columns, mask=columns < width)
            tl.store(table_out + row * width + columns, blocks, mask=columns < width)


def _inputs(
    state: StateTensors,
    given: Tensor | None,
    query_len: int,
    *,
    verify: bool,
    offset: int,
    min_drafts: int,
    needs_kv: bool,
    id_limit: int,
    max_len: int,
    has_lora: bool,
    block_table: Tensor | None,
    kv_lag: int = 1,
    id_shift: int = 0,
) -> PassTensors:
    num_reqs, width = state.slots.shape[0], state.block_table.shape[1]

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=state.slots.device)

    num_tokens = num_reqs * query_len
    out = PassTensors(
        input_ids=empty(num_tokens),
        positions=empty(num_tokens),
        slot_mapping=empty(num_tokens),
        query_start_loc=empty(num_reqs + 1, dtype=torch.int32),
        context_lens=empty(num_reqs, dtype=torch.int32),
        seq_lens=empty(num_reqs, dtype=torch.int32),
        adapter_slots=empty(num_tokens) if has_lora else None,
        block_table=empty(num_reqs, width, dtype=torch.int32)
        if block_table is None
        else block_table,
        rows=empty(4, num_reqs),
        draft_ids=empty(num_reqs, query_len - 1 if verify else 0),
    )
    if given is not None and given.numel() and given.stride(-1) != 1:
        given = given.contiguous()
    _inputs_kernel[(num_reqs,)](
        state.slots,
        state.tokens,
        state.block_table,
        state.seq_len,
        state.end,
        state.k,
        state.draft_len,
        state.adapter,
        given if given is not None else state.slots,
        out.input_ids,
        out.positions,
        out.slot_mapping,
        out.query_start_loc,
        out.context_lens,
        out.seq_lens,
        out.adapter_slots if out.adapter_slots is not None else state.slots,
        out.block_table,
        out.rows,
        out.draft_ids,
        num_reqs,
        offset,
        min_drafts,
        id_limit,
        max_len,
        kv_lag,
        id_shift,
        state.tokens.stride(0),
        state.seq_len.stride(0),
        state.block_table.stride(0),
        given.stride(0) if given is not None else 0,
        width,
        VERIFY=verify,
        FROM_TEXT=given is None,
        NEEDS_KV=needs_kv,
        HAS_LORA=has_lora,
        WRITE_TABLE=block_table is None,
        Q=query_len,
        BLOCK_Q=triton.next_power_of_2(query_len),
        BLOCK_SIZE=state.block_size,
        BLOCK_W=1024,
        num_warps=1 if query_len <= 32 else 4,
        **pdl_options(state.slots),
    )
    return out


def verify_inputs(
    state: StateTensors,
    draft_ids: Tensor,  # [R, k] int64
    *,
    vocab_size: int,
    max_len: int,
    has_lora: bool,
    block_table: Tensor | None,
) -> PassTensors:
    """``specdec.verifier.passes.verify_pass``. ``block_table`` [R, W] if it was gathered before."""
    return _inputs(
        state,
        draft_ids,
        1 + draft_ids.shape[1],
        verify=True,
        offset=-1,
        min_drafts=0,
        needs_kv=False,
        id_limit=vocab_size,
        max_len=max_len,
        has_lora=has_lora,
        block_table=block_table,
    )


def draft_inputs(
    state: StateTensors,
    ids: Tensor | None,  # [R, Q] int64, or None to feed committed tokens
    query_len: int,
    *,
    offset: int,
    min_drafts: int,
    needs_kv: bool,
    id_limit: int,
    max_len: int,
    has_lora: bool,
    block_table: Tensor | None,
    kv_lag: int = 1,
    id_shift: int = 0,
) -> PassTensors:
    """``specdec.verifier.passes.draft_pass``."""
    return _inputs(
        state,
        ids,
        query_len,
        verify=False,
        offset=offset,
        min_drafts=min_drafts,
        needs_kv=needs_kv,
        id_limit=id_limit,
        max_len=max_len,
        has_lora=has_lora,
        block_table=block_table,
        kv_lag=kv_lag,
        id_shift=id_shift,
    )
