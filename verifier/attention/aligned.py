"""Rows laid out for kernels that align queries and keys at their ends.

Such a kernel takes one number of keys per request and lets row ``i`` of Q see the first
``keys - Q + 1 + i`` of them. That fits where the last query row is the last key; the rows of a
request that drafted less than its batch are moved to the end for the kernel, and back.

Shape letters: T query rows, R requests, Q rows of a request.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.verifier.attention.base import AttentionMetadata


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignedRows:
    """Where the kernel's rows come from and go to. Nothing here is read on the host."""

    num_keys: Tensor  # [R] int32
    sources: Tensor | None  # [T] int64: the query row that each of the kernel's rows takes
    targets: Tensor | None  # [T] int64: the kernel's row that each result is; None with sources
    blind: Tensor  # [T] bool: rows that see no key, and rows of no request

    def queries(self, query: Tensor) -> Tensor:
        return query if self.sources is None else query.index_select(0, self.sources)

    def results(self, out: Tensor) -> Tensor:
        if self.targets is not None:
            out = out.index_select(0, self.targets)
        return out.masked_fill(self.blind[:, None, None], 0)


def align_rows(metadata: AttentionMetadata) -> AlignedRows:
    """The layout of a batch, worked out once for all layers of a pass."""
    known = metadata.prepared.get("aligned")
    if known is None:
        known = metadata.prepared["aligned"] = _align_rows(metadata)
    assert isinstance(known, AlignedRows)
    return known


def _align_rows(metadata: AttentionMetadata) -> AlignedRows:
    starts = metadata.query_start_loc[:-1].long()
    query_lens = metadata.query_start_loc[1:].long() - starts
    context_lens = metadata.context_lens.long()
    ends = context_lens + query_lens
    num_keys = torch.minimum(ends, metadata.seq_lens).clamp_min(0)
    rows = torch.arange(metadata.slot_mapping.shape[0], device=starts.device)
    if metadata.uniform:
        request = rows // metadata.max_query_len
    else:
        request = torch.searchsorted(metadata.query_start_loc[1:].long(), rows, right=True)
        request = request.clamp_max(starts.shape[0] - 1)
    first, size = starts[request], query_lens[request]
    position = context_lens[request] + rows - first
    blind = (num_keys[request] == 0) | (position < 0) | (rows >= first + size)
    sources = targets = None
    if not (metadata.uniform and metadata.max_query_len == 1):
        shift = (ends - num_keys)[request].minimum(size).clamp_min(0)
        sources = (rows - shift).maximum(first)
        targets = (rows + shift).minimum((first + size - 1).maximum(first))
    return AlignedRows(num_keys=num_keys.int(), sources=sources, targets=targets, blind=blind)
