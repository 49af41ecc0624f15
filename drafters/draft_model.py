"""A smaller causal LM as the drafter: k passes over its own paged KV cache."""

import torch
from torch import Tensor

from specdec.drafters.base import Draft, Drafter
from specdec.verifier.batch import PrefillBatch
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.sampling import draft_tokens
from specdec.verifier.state import DecodeState, RowState

# The first pass of a step feeds the last two committed tokens: after a fully accepted draft the
# newest draft has no KV yet, so two tokens are missing instead of one.
FIRST_PASS_LEN = 2


def sample_draft(
    state: RowState, logits: Tensor, offset: int, vocab_size: int
) -> tuple[Tensor, Tensor | None]:
    """A token for the output ``offset`` places after the next one, and its distribution.

    ``logits`` [R, V of the draft] may be wider or narrower than the target's ``vocab_size``.
    """
    rows = state.sampling.at(offset) if state.sampling is not None else None
    token, probs = draft_tokens(logits[:, :vocab_size], rows)
    if probs is not None and probs.shape[1] < vocab_size:
        probs = torch.nn.functional.pad(probs, (0, vocab_size - probs.shape[1]))
    return token, probs


class DraftModelDrafter(Drafter):
    """Runs ``model`` over the request's text.

    Its KV cache mirrors the target's block ids in memory of its own. How much of a row's KV is
    valid is data (``DecodeState.draft_len``), so a rejected draft, a step without drafting or a
    text that outgrew the draft's context costs acceptance at most, never text.
    """

    name = "draft_model"
    capturable = True
    catchup_width = 16

    def __init__(self, model: CausalLM, *, vocab_size: int) -> None:
        """``vocab_size``: ids of the target that may be emitted; higher ones are never drafted."""
        self.model = model
        self.vocab_size = vocab_size
        self.max_model_len = model.config.max_position_embeddings
        self.kv_cache: KVCache | None = None

    def bytes_per_block(self, block_size: int) -> int:
        return self.model.kv_bytes_per_block(block_size)

    def attach(self, state: DecodeState, num_blocks: int, draft_width: int) -> None:
        self.kv_cache = self.model.make_kv_cache(num_blocks, state.block_size)

    def propose(self, state: RowState, k: int) -> Draft:
        first = state.seq_lens - FIRST_PASS_LEN
        ready = self._ready(state)
        num_valid = torch.where(ready, FIRST_PASS_LEN, 0)
        ids = state.tokens_at(first[:, None] + torch.arange(FIRST_PASS_LEN, device=first.device))
        tokens, probs = [], []
        for step in range(k):
            logits = self._forward(state, ids, first, num_valid)
            token, prob = sample_draft(state, logits, step, self.vocab_size)
            tokens.append(token)
            probs.append(prob)
            ids = token[:, None]
            first = state.seq_lens + step
            num_valid = (ready & (step + 1 < state.max_drafts)).long()
        drafted = torch.stack(tokens, dim=1).where(ready[:, None], -1)
        if state.sampling is None:
            return Draft(drafted)
        return Draft(drafted, torch.stack([prob for prob in probs if prob is not None], dim=1))

    def advance(self, state: RowState, num_accepted: Tensor) -> None:
        # The last draft is proposed but never fed, so it has no KV even if it was accepted.
        fed = (state.max_drafts - 1).clamp_min(0)
        valid = state.seq_lens + torch.minimum(num_accepted, fed)
        draft_len = state.state.draft_len
        draft_len[state.slots] = torch.where(self._ready(state), valid, draft_len[state.slots])

    def prefill(self, batch: PrefillBatch) -> None:
        assert self.kv_cache is not None
        assert self.max_model_len is not None
        positions = batch.positions.clamp_max(self.max_model_len - 1)
        ids = self._known(batch.input_ids)
        self.model.forward(ids, positions, self.kv_cache, batch.metadata)
        batch.rows.state.draft_len[batch.rows.slots] = batch.ends

    def catch_up(self, state: RowState) -> None:
        assert self.max_model_len is not None
        width = self.catchup_width
        first = state.state.draft_len[state.slots]
        goal = (state.seq_lens - 1).clamp_max(self.max_model_len)
        num_valid = (goal - first).clamp(0, width).where(state.active, 0)
        ids = state.tokens_at(first[:, None] + torch.arange(width, device=first.device))
        self._hidden(state, ids, first, num_valid)
        state.state.draft_len[state.slots] = first + num_valid

    def _ready(self, state: RowState) -> Tensor:
        """Rows whose KV is valid up to the first pass and whose drafts fit the context, [R]."""
        assert self.max_model_len is not None
        draft_len = state.state.draft_len[state.slots]
        current = draft_len >= state.seq_lens - FIRST_PASS_LEN
        fits = state.seq_lens + state.max_drafts <= self.max_model_len
        return current & fits & state.active

    def _forward(self, state: RowState, ids: Tensor, first: Tensor, num_valid: Tensor) -> Tensor:
        """Logits after the last of ``ids`` [R, n], as [R, V]."""
        hidden = self._hidden(state, ids, first, num_valid)
        last = hidden.view(*ids.shape, -1)[:, -1]
        return self.model.compute_logits(last)

    def _hidden(self, state: RowState, ids: Tensor, first: Tensor, num_valid: Tensor) -> Tensor:
        assert self.kv_cache is not None
        assert self.max_model_len is not None
        positions, metadata = state.uniform_metadata(first, ids.shape[1], num_valid)
        positions = positions.clamp_max(self.max_model_len - 1)
        ids = self._known(ids.flatten())
        return self.model.forward(ids, positions, self.kv_cache, metadata)

    def _known(self, ids: Tensor) -> Tensor:
        """Ids past a narrower vocabulary read as its last one; what follows is a poor draft."""
        return ids.clamp_max(self.model.config.vocab_size - 1)
