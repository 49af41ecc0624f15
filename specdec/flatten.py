"""Chunks of several prompts as one flattened batch on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.verifier.attention.base import PAD_SLOT_ID, AttentionMetadata
from specdec.verifier.batch import PrefillBatch
from specdec.verifier.state import DecodeState, RowState


class PromptChunk(NamedTuple):
    """Tokens of one prompt, plain values."""

    row: int
    start: int
    token_ids: list[int]
    samples: bool  # its first output comes from here

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


def upload(values: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host values on the device. The host does not wait for the copy."""
    host = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def flatten_chunks(
    chunks: Sequence[PromptChunk], state: DecodeState, sampled: bool, has_lora: bool = False
) -> PrefillBatch:
    """The tokens of all chunks one after the other, with where each stands and is written.

    ``has_lora``: some row of the batch, which may be larger, has an adapter.
    """
    ids: list[int] = []
    positions: list[int] = []
    request_of_token: list[int] = []
    starts = [0]
    for number, chunk in enumerate(chunks):
        ids += chunk.token_ids
        positions += range(chunk.start, chunk.end)
        request_of_token += [number] * len(chunk.token_ids)
        starts.append(len(ids))

    def on_device(values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return upload(values, dtype, state.device)

    rows = RowState(state, on_device([chunk.row for chunk in chunks]), sampled, has_lora)
    position = on_device(positions)
    owner = on_device(request_of_token)
    block = rows.block_table[owner, position // state.block_size].long()
    ends = on_device([chunk.end for chunk in chunks])
    metadata = AttentionMetadata(
        query_start_loc=on_device(starts, torch.int32),
        context_lens=on_device([chunk.start for chunk in chunks], torch.int32),
        seq_lens=ends.int(),
        block_table=rows.block_table,
        slot_mapping=block * state.block_size + position % state.block_size,
        max_query_len=max(len(chunk.token_ids) for chunk in chunks),
        uniform=False,
        adapter_slots=rows.adapter_slots[owner] if rows.adapter_slots is not None else None,
        state_rows=rows.slots,
    )
    sampling = [number for number, chunk in enumerate(chunks) if chunk.samples]
    sampling_rows = None
    if sampling:
        slots = on_device([chunks[number].row for number in sampling])
        sampling_rows = RowState(state, slots, sampled, has_lora)
    return PrefillBatch(
        rows=rows,
        input_ids=on_device(ids),
        positions=position,
        metadata=metadata,
        ends=ends,
        sampling_rows=sampling_rows,
        last_token_rows=on_device([starts[number + 1] - 1 for number in sampling]),
    )


def padding_prompts(state: DecodeState, num_reqs: int, num_tokens: int) -> PrefillBatch:
    """Prompts of padding, all of which end: they write nowhere and leave no trace.

    For the first use of everything that a batch with prompts runs.
    """
    device = state.device
    rows = RowState(state, torch.full((num_reqs,), state.dump_row, device=device))
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    starts = torch.full((num_reqs + 1,), num_tokens, dtype=torch.int32, device=device)
    starts[0] = 0
    empty = torch.zeros(num_reqs, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(
        query_start_loc=starts,
        context_lens=empty,
        seq_lens=empty,
        block_table=rows.block_table,
        slot_mapping=torch.full_like(tokens, PAD_SLOT_ID),
        max_query_len=num_tokens,
        uniform=False,
        state_rows=rows.slots,
    )
    return PrefillBatch(
        rows=rows,
        input_ids=tokens,
        positions=tokens,
        metadata=metadata,
        ends=empty.long(),
        sampling_rows=rows,
        last_token_rows=empty.long(),
    )
