"""The protocol of a drafter.

Shape letters: R requests of the batch, V the target's vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.verifier.batch import PrefillBatch
from specdec.verifier.state import DecodeState, RowState


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens of one step."""

    ids: Tensor  # [R, k] int64; -1 proposes nothing there and ends the row's draft
    probs: Tensor | None = None  # [R, k, V] float32: the distributions the ids were sampled from
    # [R] int64: leading drafts that come from the first of two drafters (``Drafter.sources``)
    num_from_first: Tensor | None = None


class Drafter:
    """Proposes up to k tokens for every row of a batch. Subclass it and write ``propose``.

    The text never depends on what a drafter proposes; only the speed does. ``propose`` reads
    ``state.tokens`` [R, L] and ``state.seq_lens`` [R] (prompt and output so far) and whatever the
    drafter keeps itself.

    Attributes:
        name: shown in tables and records.
        capturable: ``propose`` and ``advance`` only launch device work on tensors at fixed
            addresses, so they run inside the step's graph. Otherwise they run on the host between
            two graphs, and each step waits for them.
        catchup_width: tokens per row that one catch-up pass feeds; 0 for a drafter without KV.
        max_model_len: longest text that the drafter can read, or None for any.
        kv_lag: committed tokens at the end of a text that the drafter's KV may lack after a step in
            which it drafted.
        lookahead: tokens after a position that the drafter's KV of it depends on.
        feature_layers: hidden states of the target that ``keep_features`` is to be given: those
            after this many layers.
        uses_adapters: rows with an adapter are drafted with it, so that what drafts has LoRA graphs
            of its own; otherwise drafts come from the base model for every row.
        is_recurrent: what drafts keeps a state per request, which no block of its text holds.
        sources: what drafts are counted by: of two drafters the names of both, else none.
    """

    name: str = "custom"
    capturable: bool = False
    catchup_width: int = 0
    max_model_len: int | None = None
    kv_lag: int = 0
    lookahead: int = 0
    feature_layers: tuple[int, ...] = ()
    uses_adapters: bool = False
    is_recurrent: bool = False
    sources: tuple[str, ...] = ()

    def propose(self, state: RowState, k: int) -> Draft | Tensor | tuple[Tensor, Tensor | None]:
        """Draft ids [R, k] (int64, -1 = none) and, if sampled, their probabilities [R, k, V]."""
        raise NotImplementedError(f"{type(self).__name__}.propose")

    def propose_after(self, state: RowState, k: int, given: Tensor) -> Draft:
        """As ``propose``, going on from drafts that stand: ``given`` [R, k] int64, then -1.

        They count as this drafter's own in all that it keeps; what it returns there is ignored.
        """
        raise NotImplementedError(f"{type(self).__name__}.propose_after")

    def keep_features(self, features: Tensor, slot_mapping: Tensor) -> None:
        """Keep hidden states of the target for the tokens that it has just read.

        features: [T, len(feature_layers) * hidden] in the target's dtype. slot_mapping: [T] int64,
        where each token's KV lies, PAD_SLOT_ID for none.
        """

    def prefill(self, batch: PrefillBatch) -> None:
        """Read the chunks of prompts that the target just read."""

    def advance(self, state: RowState, num_accepted: Tensor) -> None:
        """Take note of how many drafts were accepted, [R] int64.

        The tokens are committed; the lengths of ``state`` are from before that.
        """

    def catch_up(self, state: RowState) -> None:
        """Read up to ``catchup_width`` committed tokens of each row that ``propose`` lacks."""

    def enter(self, row: int, group: str | None) -> None:
        """A request has taken a state row; after a preemption it takes one again.

        Args:
            group: tells apart adapters and their versions. None for a request whose text depends
                on where its steps begin (a seed under rejection sampling), so that its drafts must
                follow from its own text alone.
        """

    def learn(self, token_ids: Sequence[int], group: str) -> None:
        """A request of ``group`` has ended with this output."""

    def refresh(self) -> None:
        """Called between two steps: bring to the device what the host has changed."""

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of the drafter's own KV for one block of the target's."""
        return 0

    def state_bytes(self, max_num_seqs: int, draft_width: int) -> int:
        """Bytes of the drafter's own recurrent states."""
        return 0

    def state_tensors(self) -> list[Tensor]:
        """The drafter's own recurrent states: what its passes both read and write."""
        return []

    def attach(self, state: DecodeState, num_blocks: int, draft_width: int) -> None:
        """Allocate what depends on the engine. Called once, before anything else.

        Args:
            state: the engine's request state.
            num_blocks: blocks of the pool; a drafter's KV mirrors the same ids.
            draft_width: the largest k that ``propose`` will be called with.
        """


class DrafterLike(Drafter):
    """Any object with ``propose`` as a Drafter: what it does not have is the default."""

    def __init__(self, wrapped: object) -> None:
        self.name = type(wrapped).__name__
        own = ("name", "capturable", "catchup_width", "max_model_len", "uses_adapters")
        of_target = ("kv_lag", "lookahead", "feature_layers", "keep_features")
        calls = ("propose", "prefill", "advance", "catch_up", "bytes_per_block", "attach")
        of_host = ("enter", "learn", "refresh")
        for name in (*own, *of_target, *calls, *of_host):
            if hasattr(wrapped, name):
                setattr(self, name, getattr(wrapped, name))


def as_draft(proposal: object, num_reqs: int, k: int, name: str, vocab_size: int) -> Draft:
    """What ``propose`` returned, checked.

    Raises TypeError or ValueError naming the drafter for anything but ids [num_reqs, k] of an
    integer dtype, with or without probabilities [num_reqs, k, vocab_size].
    """
    if isinstance(proposal, Tensor):
        proposal = Draft(proposal)
    elif isinstance(proposal, tuple) and len(proposal) == 2:
        proposal = Draft(*proposal)
    if not isinstance(proposal, Draft) or not isinstance(proposal.ids, Tensor):
        raise TypeError(
            f"drafter {name!r}: propose must return a tensor of ids, a pair of ids and "
            f"probabilities, or a Draft; got {type(proposal).__name__}"
        )
    ids, probs = proposal.ids, proposal.probs
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"drafter {name!r}: ids must be integers, got {ids.dtype}")
    if tuple(ids.shape) != (num_reqs, k):
        raise ValueError(
            f"drafter {name!r}: propose must return ids of shape {[num_reqs, k]}, "
            f"got {list(ids.shape)}"
        )
    if probs is not None and (
        not isinstance(probs, Tensor) or tuple(probs.shape) != (num_reqs, k, vocab_size)
    ):
        got = list(probs.shape) if isinstance(probs, Tensor) else type(probs).__name__
        raise ValueError(
            f"drafter {name!r}: probabilities must have the shape {[num_reqs, k, vocab_size]}, "
            f"got {got}"
        )
    return Draft(ids.long(), probs, proposal.num_from_first)
