"""The protocol of an attention backend and the metadata that every backend reads.

Shape letters: T tokens, R requests, Q query length, H query heads, G key/value heads, D head size,
B block size, N blocks of the pool, W width of a block table.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.verifier.modes import AttentionCGSupport, BatchDescriptor

PAD_SLOT_ID = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """Where each request's queries stand and where its keys lie. All tensors are on the device.

    Query row ``j`` of request ``r`` stands at position ``context_lens[r] + j`` and sees the keys
    ``0 .. min(context_lens[r] + j, seq_lens[r] - 1)``; a row that sees no key gives exact zeros.
    ``context_lens`` may be -1 (a first row that stands before the text), and ``seq_lens`` may be
    less than ``context_lens + query_len`` (the tail of a row that drafted less than the batch):
    keys at or past ``seq_lens`` are never read, whatever they hold, and what the rows at such
    positions give is used by nobody and need only be finite.
    """

    query_start_loc: Tensor  # [R + 1] int32: request r owns token rows loc[r] .. loc[r + 1] - 1
    context_lens: Tensor  # [R] int32: tokens before the request's first query row
    seq_lens: Tensor  # [R] int32: valid keys of the request; 0 for a padding row
    block_table: Tensor  # [R, W] int32: the pool's block for each run of B positions
    slot_mapping: Tensor  # [T] int64: block * B + offset to write; PAD_SLOT_ID writes nowhere
    max_query_len: int  # longest query of the batch; frozen at capture
    uniform: bool  # every request has exactly max_query_len query rows (T = R * max_query_len)
    # [T] int64: adapter slot of each token row, -1 for none; None where no row has one. The linear
    # layers read it, attention does not.
    adapter_slots: Tensor | None = None
    # [R] int64: row of each request's recurrent state; None where no layer has one. A tentative
    # batch stands behind tokens that may be rejected yet, so no state takes them in.
    state_rows: Tensor | None = None
    tentative: bool = False
    # The kernel directly before attention writes no lengths, no block table and no keys before
    # ``context_lens``, so that a backend may read those while it still runs.
    older_keys_stand: bool = False
    # What a backend works out once for all layers of a pass, under its own name.
    prepared: dict[str, Any] = field(default_factory=dict, compare=False)

    def with_seq_lens(self, seq_lens: Tensor) -> "AttentionMetadata":
        """The same batch with other ends, for which nothing is prepared."""
        return replace(self, seq_lens=seq_lens, prepared={})


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionNeeds:
    """What the attention layers of a model ask of a backend."""

    head_size: int  # of keys; of a latent and its rotated part together where latent_size is given
    dtype: torch.dtype
    block_size: int
    device: torch.device
    sliding_window: int | None = None  # of the layers that have one
    soft_cap: float | None = None  # likewise
    latent_size: int | None = None  # latent attention: leading features of a key that are its value


def concatenate(first: AttentionMetadata, second: AttentionMetadata) -> AttentionMetadata:
    """The metadata of one flattened batch: the requests of ``first``, then those of ``second``."""
    offset = first.slot_mapping.shape[0]
    adapter_slots = None
    if first.adapter_slots is not None and second.adapter_slots is not None:
        adapter_slots = torch.cat([first.adapter_slots, second.adapter_slots])
    assert (first.adapter_slots is None) == (second.adapter_slots is None)
    state_rows = None
    if first.state_rows is not None and second.state_rows is not None:
        state_rows = torch.cat([first.state_rows, second.state_rows])
    return AttentionMetadata(
        query_start_loc=torch.cat([first.query_start_loc, second.query_start_loc[1:] + offset]),
        context_lens=torch.cat([first.context_lens, second.context_lens]),
        seq_lens=torch.cat([first.seq_lens, second.seq_lens]),
        block_table=torch.cat([first.block_table, second.block_table]),
        slot_mapping=torch.cat([first.slot_mapping, second.slot_mapping]),
        max_query_len=max(first.max_query_len, second.max_query_len),
        uniform=False,
        adapter_slots=adapter_slots,
        state_rows=state_rows,
    )


class AttentionBackend(Protocol):
    """Attention over a paged KV cache.

    Keys and values of the batch's own tokens are already in the cache when ``forward`` is called.
    """

    name: str
    cg_support: AttentionCGSupport
    batch_invariant: bool

    def unsupported(self, needs: AttentionNeeds) -> str | None:
        """Why this backend cannot serve such a model, or None if it can."""

    def forbids_full(self, batch: BatchDescriptor) -> str | None:
        """Why the attention of this batch cannot lie in a FULL graph, or None if it can.

        For what ``cg_support`` cannot say, as cascade attention over a prefix that rows share.
        """

    def forward(
        self,
        query: Tensor,  # [T, H, D]
        key_cache: Tensor,  # [N + 1, B, G, D]; the last block takes what padding rows write
        value_cache: Tensor,  # [N + 1, B, G, D]
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Attention of every query row over its request's keys: [T, H, D], query's dtype.

        With a ``sliding_window`` of w a row at position p sees none of the keys before p - w + 1.
        With a ``soft_cap`` of c a score s (product times scale) counts as c * tanh(s / c).
        """
