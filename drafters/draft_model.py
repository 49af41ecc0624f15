"""A smaller causal LM as the drafter: k passes over its own paged KV cache."""

from dataclasses import replace

import torch
from torch import Tensor

from specdec.drafters.base import Draft, Drafter
from specdec.verifier.attention.base import AttentionMetadata
from specdec.verifier.batch import PrefillBatch
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.models.support import model_state_bytes
from specdec.verifier.passes import advance_draft_len, draft_pass
from specdec.verifier.sampling import draft_tokens
from specdec.verifier.state import DecodeState, RowState

# The first pass of a step feeds the last two committed tokens: after a fully accepted draft the
# newest draft has no KV yet, so two tokens are missing instead of one.
FIRST_PASS_LEN = 2


def sample_draft(
    state: RowState,
    model: LanguageModel,
    hidden: Tensor,
    adapter_slots: Tensor | None,
    offset: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor | None]:
    """A token for the output ``offset`` places after the next one, and its distribution.

    ``hidden`` [R, hidden] of the draft ``model``, whose vocabulary may be wider or narrower than
    the target's ``vocab_size``.
    """
    if state.sampling is None:
        return model.greedy_tokens(hidden, vocab_size, adapter_slots)[0], None
    logits = model.compute_logits(hidden, adapter_slots)
    token, probs = draft_tokens(logits[:, :vocab_size], state.sampling.at(offset))
    if probs is not None and probs.shape[1] < vocab_size:
        probs = torch.nn.functional.pad(probs, (0, vocab_size - probs.shape[1]))
    return token, probs


def given_or(given: Tensor, token: Tensor) -> Tensor:
    """The draft that is fed next: a given one ([R] int64, -1 for none), else ``token`` [R]."""
    return given.where(given >= 0, token)


class DraftModelDrafter(Drafter):
    """Runs ``model`` over the request's text.

    Its KV cache mirrors the target's block ids in memory of its own. How much of a row's KV is
    valid is data (``DecodeState.draft_len``), so a rejected draft, a step without drafting or a
    text that outgrew the draft's context costs acceptance at most, never text. The states of a
    hybrid take in no token that may be rejected, and stay where its valid KV ends.

    Rows with an adapter are drafted by the base model, or with ``uses_adapters`` by an adapter of
    the draft's own, which lies in the slot of the same number.
    """

    name = "draft_model"
    capturable = True
    catchup_width = 16
    kv_lag = 1

    def __init__(self, model: LanguageModel, *, vocab_size: int) -> None:
        """``vocab_size``: ids of the target that may be emitted; higher ones are never drafted."""
        self.model = model
        self.vocab_size = vocab_size
        self.max_model_len = model.config.max_position_embeddings
        self.is_recurrent = model.config.num_recurrent_layers > 0
        self.kv_cache: KVCache | None = None

    def bytes_per_block(self, block_size: int) -> int:
        return self.model.kv_bytes_per_block(block_size)

    def state_bytes(self, max_num_seqs: int, draft_width: int) -> int:
        return model_state_bytes(self.model, max_num_seqs, 1 + draft_width)

    def state_tensors(self) -> list[Tensor]:
        assert self.kv_cache is not None
        return [] if self.kv_cache.recurrent is None else self.kv_cache.recurrent.tensors

    def attach(self, state: DecodeState, num_blocks: int, draft_width: int) -> None:
        # From the first of two committed tokens on, what a step feeds may be fed anew.
        self.kv_cache = self.model.make_kv_cache(
            num_blocks,
            state.block_size,
            max_num_seqs=state.max_num_seqs,
            run_length=1 + draft_width,
        )

    def propose(self, state: RowState, k: int) -> Draft:
        return self._propose(state, k, None)

    def propose_after(self, state: RowState, k: int, given: Tensor) -> Draft:
        return self._propose(state, k, given)

    def _propose(self, state: RowState, k: int, given: Tensor | None) -> Draft:
        assert self.max_model_len is not None
        num_reqs, ready = state.slots.shape[0], state.slots
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(k):
            # The first pass feeds committed tokens, each other one the token just drafted.
            is_first = step == 0
            fed = draft_pass(
                state,
                None if is_first else tokens[-1][:, None],
                FIRST_PASS_LEN if is_first else 1,
                offset=-FIRST_PASS_LEN if is_first else step - 1,
                min_drafts=0 if is_first else step + 1,
                needs_kv=True,
                # Ids past a narrower vocabulary read as its last one; what follows is a poor draft.
                vocab_size=self.model.config.vocab_size,
                max_len=self.max_model_len,
            )
            ready = fed.ready if is_first else ready
            hidden = self._forward(fed.input_ids, fed.positions, fed.metadata)
            last = hidden.view(num_reqs, -1, hidden.shape[1])[:, -1]
            adapter_slots = state.adapter_slots if self.uses_adapters else None
            token, prob = sample_draft(
                state, self.model, last, adapter_slots, step, self.vocab_size
            )
            tokens.append(token if given is None else given_or(given[:, step], token))
            probs += [] if prob is None else [prob]
        drafted = torch.stack(tokens, dim=1).where(ready[:, None] > 0, -1)
        return Draft(drafted, torch.stack(probs, dim=1) if probs else None)

    def advance(self, state: RowState, num_accepted: Tensor) -> None:
        assert self.max_model_len is not None
        advance_draft_len(state, num_accepted, self.max_model_len)

    def prefill(self, batch: PrefillBatch) -> None:
        assert self.max_model_len is not None
        positions = batch.positions.clamp_max(self.max_model_len - 1)
        self._forward(self._known(batch.input_ids), positions, batch.metadata)
        batch.rows.state.draft_len[batch.rows.slots] = batch.ends

    def catch_up(self, state: RowState) -> None:
        assert self.max_model_len is not None
        width = self.catchup_width
        first = state.state.draft_len[state.slots]
        goal = (state.seq_lens - 1).clamp_max(self.max_model_len)
        num_valid = (goal - first).clamp(0, width).where(state.active, 0)
        ids = state.tokens_at(first[:, None] + torch.arange(width, device=first.device))
        positions, metadata = state.uniform_metadata(first, width, num_valid)
        positions = positions.clamp_max(self.max_model_len - 1)
        self._forward(self._known(ids.flatten()), positions, metadata)
        state.state.draft_len[state.slots] = first + num_valid

    def _forward(self, ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        assert self.kv_cache is not None
        if not self.uses_adapters:
            metadata = replace(metadata, adapter_slots=None)
        return self.model.forward(ids, positions, self.kv_cache, metadata)

    def _known(self, ids: Tensor) -> Tensor:
        """Ids past a narrower vocabulary read as its last one; what follows is a poor draft."""
        return ids.clamp_max(self.model.config.vocab_size - 1)
