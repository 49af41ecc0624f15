"""From the request state to the inputs of a uniform pass, and back; one kernel each on a GPU.

Shape letters: R requests of the batch, Q query length, k drafts.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.verifier.acceptance import Acceptance, accept_greedy
from specdec.verifier.attention.base import AttentionMetadata
from specdec.verifier.batch import PassResult
from specdec.verifier.sampling import Logprobs
from specdec.verifier.simulated import simulated_agreement
from specdec.verifier.state import RowState

if TYPE_CHECKING:
    from specdec.kernels.pass_triton import PassTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyPass:
    """The newest token of every row and its drafts."""

    input_ids: Tensor  # [R * Q] int64
    positions: Tensor  # [R * Q] int64
    metadata: AttentionMetadata
    draft_ids: Tensor  # [R, k] int64: drafts that do not count are 0
    num_drafted: Tensor  # [R] int64: leading drafts that count


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftPass:
    """Tokens to be fed to a model that drafts."""

    input_ids: Tensor  # [R * Q] int64
    positions: Tensor  # [R * Q] int64
    metadata: AttentionMetadata
    ready: Tensor  # [R] int64: 1 for rows that may be drafted


def verify_pass(rows: RowState, draft_ids: Tensor, vocab_size: int) -> VerifyPass:
    """Feed each row's newest token and its drafts, [R, k] int64.

    A draft that a row may not take, or that is no id below ``vocab_size``, ends the row's drafts.
    """
    max_model_len = rows.state.max_model_len
    if rows.slots.is_cuda:
        from specdec.kernels import pass_triton

        made = pass_triton.verify_inputs(
            rows.tensors,
            draft_ids,
            vocab_size=vocab_size,
            max_len=max_model_len,
            has_lora=rows.has_lora,
            block_table=rows.known_block_table,
        )
        return VerifyPass(
            input_ids=made.input_ids,
            positions=made.positions,
            metadata=_metadata(rows, made, 1 + draft_ids.shape[1]),
            draft_ids=made.draft_ids,
            num_drafted=made.rows[3],
        )
    k = draft_ids.shape[1]
    steps = torch.arange(k, device=rows.slots.device)
    usable = (steps < rows.max_drafts[:, None]) & (draft_ids >= 0)
    usable = (usable & (draft_ids < vocab_size)).long().cumprod(1)
    num_drafted = usable.sum(1)
    draft_ids = draft_ids.where(usable > 0, 0)
    num_valid = (num_drafted + 1).where(rows.active, 0)
    positions, metadata = rows.uniform_metadata(rows.seq_lens - 1, 1 + k, num_valid)
    return VerifyPass(
        input_ids=torch.cat([rows.last_token[:, None], draft_ids], dim=1).flatten(),
        positions=positions.clamp_max(max_model_len - 1),
        metadata=metadata,
        draft_ids=draft_ids,
        num_drafted=num_drafted,
    )


def draft_pass(
    rows: RowState,
    ids: Tensor | None,
    query_len: int,
    *,
    offset: int,
    min_drafts: int,
    needs_kv: bool,
    vocab_size: int,
    max_len: int,
    kv_lag: int = 1,
    id_shift: int = 0,
) -> DraftPass:
    """Feed ``ids`` [R, Q] int64, or committed tokens for None, from ``offset`` past the text's end.

    Behind given ``ids`` stand other drafts, so a recurrent state must be able to go back.

    Args:
        min_drafts: a row that takes fewer drafts in this step feeds nothing.
        needs_kv: a row is ready only if its draft KV (``draft_len``) lacks ``kv_lag`` tokens at
            most before the newest, and its drafts end before ``max_len``; otherwise every active
            row is.
        vocab_size: ids at or past it read as its last one.
        max_len: positions at or past it read as its last one.
        id_shift: committed tokens are taken from this far behind the positions they are fed at.
    """
    is_tentative = ids is not None
    if rows.slots.is_cuda:
        from specdec.kernels import pass_triton

        made = pass_triton.draft_inputs(
            rows.tensors,
            ids,
            query_len,
            offset=offset,
            min_drafts=min_drafts,
            needs_kv=needs_kv,
            id_limit=vocab_size,
            max_len=max_len,
            has_lora=rows.has_lora,
            block_table=rows.known_block_table,
            kv_lag=kv_lag,
            id_shift=id_shift,
        )
        return DraftPass(
            input_ids=made.input_ids,
            positions=made.positions,
            metadata=_metadata(rows, made, query_len, tentative=is_tentative),
            ready=made.rows[3],
        )
    ready = _ready(rows, max_len, kv_lag) if needs_kv else rows.active
    first = rows.seq_lens + offset
    if ids is None:
        steps = torch.arange(query_len, device=first.device)
        ids = rows.tokens_at(first[:, None] + id_shift + steps)
    num_valid = torch.where(ready & (rows.max_drafts >= min_drafts), query_len, 0)
    positions, metadata = rows.uniform_metadata(first, query_len, num_valid)
    return DraftPass(
        input_ids=ids.flatten().clamp_max(vocab_size - 1),
        positions=positions.clamp_max(max_len - 1),
        metadata=replace(metadata, tentative=is_tentative),
        ready=ready.long(),
    )


def accept_and_commit(
    rows: RowState,
    targets: Tensor,
    finite: Tensor,
    draft_ids: Tensor,
    num_drafted: Tensor,
    rates: Tensor | None = None,
) -> tuple[PassResult, Tensor]:
    """``accept_greedy``, then commit what it keeps. Returns the result and num_accepted [R].

    With ``rates`` [at least k] float32 acceptance is simulated.
    """
    if rows.slots.is_cuda:
        from specdec.kernels import accept_triton

        packed, num_accepted = accept_triton.accept_and_commit(
            rows.tensors, targets, finite, draft_ids, num_drafted, rates
        )
        return PassResult(packed, None), num_accepted
    simulated = None
    if rates is not None:
        simulated = simulated_agreement(rows, rates, draft_ids.shape[1])
    accepted = accept_greedy(targets, finite, draft_ids, num_drafted, simulated)
    return commit(rows, accepted, num_drafted, None), accepted.num_accepted


def commit(
    rows: RowState, accepted: Acceptance, num_drafted: Tensor, logprobs: Logprobs | None
) -> PassResult:
    """Append the accepted tokens to the rows that still write, up to the first that ends a text.

    A row that has ended, or failed, has nothing left to write from then on.
    """
    if rows.slots.is_cuda:
        from specdec.kernels import accept_triton

        packed = accept_triton.commit(
            rows.tensors, accepted.tokens, accepted.num_accepted, accepted.failed, num_drafted
        )
        return PassResult(packed, logprobs)
    failed = accepted.failed & rows.active
    num_new = (accepted.num_accepted + 1 - failed.long()).where(rows.active, 0)
    num_new, stopped = rows.up_to_stop(accepted.tokens, num_new)
    rows.commit(accepted.tokens, num_new, stopped | failed)
    return PassResult.pack(
        accepted.tokens, num_new, num_drafted, accepted.num_accepted, failed, logprobs
    )


def advance_draft_len(
    rows: RowState,
    num_accepted: Tensor,
    max_len: int,
    *,
    kv_lag: int = 1,
    keeps_drafts: bool = True,
) -> None:
    """After a step: the draft KV of rows that were ready reaches over their accepted drafts.

    The last draft is proposed but never fed, so it has no KV even if it was accepted. Without
    ``keeps_drafts`` the KV of drafts is not kept, nor that of the newest token before them.
    """
    draft_len = rows.state.draft_len
    if rows.slots.is_cuda:
        from specdec.kernels import accept_triton

        known = (rows.seq_lens, rows.remaining, rows.max_drafts)
        accept_triton.advance_draft_len(
            rows.slots,
            *known,
            num_accepted,
            draft_len,
            max_len,
            kv_lag=kv_lag,
            keeps_drafts=keeps_drafts,
        )
        return
    fed = (rows.max_drafts - 1).clamp_min(0)
    valid = rows.seq_lens - 1
    if keeps_drafts:
        valid = rows.seq_lens + torch.minimum(num_accepted, fed)
    ready = _ready(rows, max_len, kv_lag)
    draft_len[rows.slots] = torch.where(ready, valid, draft_len[rows.slots])


def _ready(rows: RowState, max_len: int, kv_lag: int) -> Tensor:
    """[R] bool: rows whose draft KV lacks no more, and whose drafts end by max_len."""
    current = rows.state.draft_len[rows.slots] >= rows.seq_lens - 1 - kv_lag
    return rows.active & current & (rows.seq_lens + rows.max_drafts <= max_len)


def _metadata(
    rows: RowState, made: "PassTensors", query_len: int, tentative: bool = False
) -> AttentionMetadata:
    """Hands the values that the kernel read to ``rows`` too, so that nothing reads them anew."""
    rows.remember(made.block_table, *made.rows[:3])
    return AttentionMetadata(
        query_start_loc=made.query_start_loc,
        context_lens=made.context_lens,
        seq_lens=made.seq_lens,
        block_table=made.block_table,
        slot_mapping=made.slot_mapping,
        max_query_len=query_len,
        uniform=True,
        adapter_slots=made.adapter_slots,
        state_rows=rows.slots,
        tentative=tentative,
    )
