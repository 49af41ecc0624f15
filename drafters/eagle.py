"""A trained EAGLE-3 head as the drafter: a chain of one-layer passes, or one pass for all drafts.

Source: Li et al., "EAGLE-3", 2025; parallel drafting in the manner of P-EAGLE and PARD.

Shape letters: R requests of the batch, T tokens, W tokens per row of the first pass.
"""

import torch
from torch import Tensor

from specdec.drafters.base import Draft, Drafter
from specdec.drafters.draft_model import given_or
from specdec.drafters.eagle_head import EagleHead
from specdec.drafters.mtp import MtpModule
from specdec.verifier.attention.base import PAD_SLOT_ID
from specdec.verifier.batch import PrefillBatch
from specdec.verifier.feature_cache import FeatureCache
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.passes import DraftPass, advance_draft_len, draft_pass
from specdec.verifier.sampling import draft_tokens
from specdec.verifier.state import DecodeState, RowState


class EagleDrafter(Drafter):
    """Runs ``head`` behind the target.

    The head's keys and values and the target's fused hidden states lie in pages that mirror the
    target's block ids. Hidden states are kept for every token that the target reads, in steps
    without drafts too, so a row that was not drafted catches up from them. A step's first pass
    reads the tokens that the step before committed, with the target's hidden states in place of
    the head's own; what the chain wrote for drafts is overwritten by that and never read again.
    Position i holds token i + 1 (``lookahead``), so that a cached block is reused only where the
    token after it is the same.

    Rows with an adapter are drafted by the same head, from their own hidden states.
    """

    name = "eagle"
    capturable = True
    catchup_width = 16
    lookahead = 1

    def __init__(self, head: EagleHead | MtpModule, target_ids: Tensor, *, vocab_size: int) -> None:
        """
        target_ids: [draft vocab] int64, increasing: the target's id of each draft id.
        vocab_size: ids of the target that may be emitted; higher ones are never drafted.
        """
        self.head = head
        self.vocab_size = vocab_size
        self.feature_layers = head.config.feature_layers
        self.max_model_len: int = head.config.layer.max_position_embeddings
        self.num_ids = int((target_ids < vocab_size).sum())
        if self.num_ids == 0:
            raise ValueError(f"the head drafts none of the {vocab_size} ids that may be emitted")
        # None where a draft id is the target's id.
        is_whole = target_ids.numel() == head.config.layer.vocab_size
        self.target_ids = None if is_whole else target_ids[: self.num_ids].contiguous()
        self.width = 1
        self.kv_cache: KVCache | None = None
        self.features: FeatureCache | None = None

    def bytes_per_block(self, block_size: int) -> int:
        layer = self.head.config.layer
        size = 2 * layer.kv_size + layer.hidden_size
        return block_size * size * self.head.dtype.itemsize

    def attach(self, state: DecodeState, num_blocks: int, draft_width: int) -> None:
        layer = self.head.config.layer
        # A step commits up to 1 + k tokens, and the next one's first pass reads them whatever its
        # own k is.
        self.width = self.kv_lag = 1 + draft_width
        self.kv_cache = KVCache(
            num_layers=1,
            num_blocks=num_blocks,
            block_size=state.block_size,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            dtype=self.head.dtype,
            device=self.head.device,
        )
        self.features = FeatureCache(
            num_blocks=num_blocks,
            block_size=state.block_size,
            num_features=layer.hidden_size,
            dtype=self.head.dtype,
            device=self.head.device,
        )

    def keep_features(self, features: Tensor, slot_mapping: Tensor) -> None:
        assert self.features is not None
        self.features.write(self.head.fuse(features), slot_mapping)

    def propose(self, state: RowState, k: int) -> Draft:
        if self.head.config.parallel:
            return self._propose_at_once(state, k)
        return self._propose_in_turn(state, k, None)

    def propose_after(self, state: RowState, k: int, given: Tensor) -> Draft:
        if self.head.config.parallel:
            # Its drafts hang on no earlier one, so those behind the given ones are as they are.
            return self._propose_at_once(state, k)
        return self._propose_in_turn(state, k, given)

    def _propose_in_turn(self, state: RowState, k: int, given: Tensor | None) -> Draft:
        """A pass per draft, each behind the last one or the one that is ``given`` in its place."""
        assert self.kv_cache is not None
        head = self.head
        text = self._fed(state, None, self.width, offset=-1 - self.width, min_drafts=0)
        query, stream = self._read(text.input_ids, text.positions, text.metadata.slot_mapping)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(k):
            drafted = tokens[-1][:, None] if step else None
            fed = self._fed(state, drafted, 1, offset=step - 2, min_drafts=step + 1)
            if step:
                x, stream = head.layer_input(head.embed(fed.input_ids), stream)
                slots = fed.metadata.slot_mapping
                query = head.project(x, fed.positions, self.kv_cache, slots)
            else:
                query, stream = (_last_of_each(rows, self.width, 1) for rows in (query, stream))
            hidden, stream = head.attend(query, stream, self.kv_cache, fed.metadata)
            token, prob = self._sample(state, hidden, step)
            tokens.append(token if given is None else given_or(given[:, step], token))
            probs += [] if prob is None else [prob]
        return self._draft(text, tokens, probs)

    def _propose_at_once(self, state: RowState, k: int) -> Draft:
        """All drafts from one pass: the tokens to read, then k - 1 masked ones."""
        assert self.kv_cache is not None
        head = self.head
        num_reqs, length = state.slots.shape[0], self.width + k - 1
        text = self._fed(state, None, length, offset=-1 - self.width, min_drafts=0)
        # Masked tokens of drafts that a row does not take have no place in its blocks.
        steps = torch.arange(1 - self.width, k, device=state.slots.device)
        is_masked = (steps > 0).expand(num_reqs, -1)
        lacks_place = is_masked & (steps >= state.max_drafts[:, None])
        slots = text.metadata.slot_mapping.where(~lacks_place.flatten(), PAD_SLOT_ID)
        query, stream = self._read(
            text.input_ids, text.positions, slots, is_masked.flatten()[:, None]
        )
        query, stream = (_last_of_each(rows, length, k) for rows in (query, stream))
        metadata = self._fed(state, None, k, offset=-2, min_drafts=1).metadata
        placed = (state.seq_lens - 1 + (state.max_drafts - 1).clamp_min(0)).int()
        metadata = metadata.with_seq_lens(torch.minimum(metadata.seq_lens, placed))
        hidden, _ = head.attend(query, stream, self.kv_cache, metadata)
        hidden = hidden.view(num_reqs, k, -1)
        drafted = [self._sample(state, hidden[:, step], step) for step in range(k)]
        probs = [prob for _, prob in drafted if prob is not None]
        return self._draft(text, [token for token, _ in drafted], probs)

    def advance(self, state: RowState, num_accepted: Tensor) -> None:
        advance_draft_len(
            state,
            num_accepted,
            self.max_model_len,
            kv_lag=self.width,
            keeps_drafts=False,
        )

    def prefill(self, batch: PrefillBatch) -> None:
        rows, metadata = batch.rows, batch.metadata
        # The token after a chunk; after a whole text there is none yet.
        after = rows.tokens_at(batch.ends[:, None])[:, 0]
        last = metadata.query_start_loc[1:].long() - 1
        ids = batch.input_ids.roll(-1).index_copy(0, last, after)
        slots = metadata.slot_mapping
        lacks_next = batch.ends >= rows.seq_lens
        slots = slots.index_copy(0, last, slots[last].where(~lacks_next, PAD_SLOT_ID))
        positions = batch.positions.clamp_max(self.max_model_len - 1)
        self._read(ids, positions, slots)
        rows.state.draft_len[rows.slots] = batch.ends - lacks_next.long()

    def catch_up(self, state: RowState) -> None:
        width = self.catchup_width
        first = state.state.draft_len[state.slots]
        goal = (state.seq_lens - 1).clamp_max(self.max_model_len)
        num_valid = (goal - first).clamp(0, width).where(state.active, 0)
        ids = state.tokens_at(first[:, None] + 1 + torch.arange(width, device=first.device))
        positions, metadata = state.uniform_metadata(first, width, num_valid)
        positions = positions.clamp_max(self.max_model_len - 1)
        self._read(ids.flatten(), positions, metadata.slot_mapping)
        state.state.draft_len[state.slots] = first + num_valid

    def _fed(
        self, state: RowState, ids: Tensor | None, query_len: int, *, offset: int, min_drafts: int
    ) -> DraftPass:
        return draft_pass(
            state,
            ids,
            query_len,
            offset=offset,
            min_drafts=min_drafts,
            needs_kv=True,
            vocab_size=self.head.config.layer.vocab_size,
            max_len=self.max_model_len,
            kv_lag=self.width,
            id_shift=1,
        )

    def _read(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        is_masked: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Put committed tokens' keys and values in the cache.

        ids, positions, slots: [T] int64. is_masked: [T, 1] bool, rows that stand for drafts of a
        parallel pass.

        Returns the layer's queries [T, H, D] and residual stream [T, hidden].
        """
        assert self.kv_cache is not None and self.features is not None
        head = self.head
        embeddings = head.embed(ids)
        features = self.features.read(slots)
        if is_masked is not None:
            assert isinstance(head, EagleHead)
            embeddings, features = head.masked(embeddings, features, is_masked)
        x, stream = head.layer_input(embeddings, features)
        return head.project(x, positions, self.kv_cache, slots), stream

    def _sample(self, state: RowState, hidden: Tensor, offset: int) -> tuple[Tensor, Tensor | None]:
        """A token of the target's vocabulary for each row of ``hidden`` [R, hidden].

        ``offset`` places after the next output; and unless all rows are greedy the distribution it
        came from, [R, V].
        """
        if state.sampling is None:
            ids = self.head.greedy_ids(hidden, self.num_ids)
            return ids if self.target_ids is None else self.target_ids[ids], None
        logits = self.head.compute_logits(hidden)[:, : self.num_ids]
        if self.target_ids is not None:
            # The noise of a token and the cuts of top_k and top_p go by the target's ids.
            whole = logits.new_full((logits.shape[0], self.vocab_size), -torch.inf)
            logits = whole.index_copy_(1, self.target_ids, logits)
        return draft_tokens(logits, state.sampling.at(offset))

    @staticmethod
    def _draft(fed: DraftPass, tokens: list[Tensor], probs: list[Tensor]) -> Draft:
        ids = torch.stack(tokens, dim=1).where(fed.ready[:, None] > 0, -1)
        return Draft(ids, torch.stack(probs, dim=1) if probs else None)


def _last_of_each(rows: Tensor, length: int, count: int) -> Tensor:
    """The last ``count`` of every ``length`` rows, [R * length, ...] -> [R * count, ...]."""
    return rows.unflatten(0, (-1, length))[:, length - count :].flatten(0, 1).contiguous()
