"""The step on the device: draft, verify, accept, advance. Written to be captured as one graph.

Shape letters: R requests of the batch, Q = 1 + k query length, V vocabulary.
"""

import logging

import torch
from torch import Tensor

from specdec.drafters.base import Draft, Drafter, as_draft
from specdec.verifier.acceptance import accept
from specdec.verifier.batch import PassResult, PrefillBatch
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.sampling import MAX_LOGPROBS, token_logprobs
from specdec.verifier.state import DecodeState, RowState

logger = logging.getLogger(__name__)


class DecodeStep:
    """The passes of one engine over its static tensors. Nothing here waits for the device.

    ``slots`` names the state row of each batch row; rows of padding hold the dump row. Between two
    replays only its contents and the request state change.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        kv_cache: KVCache,
        state: DecodeState,
        drafter: Drafter | None,
        vocab_size: int,
        max_k: int,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.state = state
        self.drafter = drafter
        self.vocab_size = vocab_size
        shape = (state.max_num_seqs,)
        self.slots = torch.full(shape, state.dump_row, dtype=torch.int64, device=state.device)
        # Drafts that the host brings (split step), and the distributions they came from.
        self.draft_ids = torch.full((*shape, max_k), -1, dtype=torch.int64, device=state.device)

    def decode(self, num_reqs: int, k: int, sampled: bool) -> PassResult:
        """Draft, verify, accept and advance a uniform batch."""
        rows = self.rows(num_reqs, sampled)
        if self.drafter is None or k == 0:
            draft = Draft(self.draft_ids[:num_reqs, :0])
        else:
            draft = as_draft(self.drafter.propose(rows, k))
        return self._verify(rows, draft, k)

    def verify(self, num_reqs: int, k: int, sampled: bool) -> PassResult:
        """The same with drafts that the host has put into ``draft_ids``."""
        return self._verify(self.rows(num_reqs, sampled), Draft(self.draft_ids[:num_reqs, :k]), k)

    def set_host_draft(
        self, num_reqs: int, k: int, proposal: Draft | Tensor | tuple[Tensor, Tensor | None]
    ) -> None:
        """Put a host drafter's proposal where ``verify`` reads it; padding rows draft nothing."""
        draft = as_draft(proposal)
        name = getattr(self.drafter, "name", "drafter")
        if draft.ids.shape != (num_reqs, k):
            raise ValueError(
                f"drafter {name!r}: propose must return ids of shape {[num_reqs, k]}, "
                f"got {list(draft.ids.shape)}"
            )
        if draft.probs is not None:
            # Each draft counts as one-hot, which is as exact and accepts a little less.
            logger.warning("drafter %r: probabilities of host drafters are not used", name)
        self.draft_ids[:num_reqs, :k] = draft.ids.to(self.draft_ids)
        self.draft_ids[num_reqs:, :k] = -1

    def catch_up(self, num_reqs: int, k: int, sampled: bool) -> Tensor:
        """Let the drafter read committed tokens that it lacks. Returns the valid draft lengths."""
        assert self.drafter is not None
        rows = self.rows(num_reqs, sampled)
        self.drafter.catch_up(rows)
        return self.state.draft_len[rows.slots]

    def prefill(self, batch: PrefillBatch) -> PassResult | None:
        """Read chunks of prompts; sample the first token of those that end here."""
        hidden = self.model.forward(batch.input_ids, batch.positions, self.kv_cache, batch.metadata)
        if self.drafter is not None:
            self.drafter.prefill(batch)
        if batch.sampling_rows is None:
            return None
        rows = batch.sampling_rows
        logits = self._logits(hidden[batch.last_token_rows], rows.slots.shape[0])
        num_drafted = torch.zeros_like(rows.slots)
        return self._accept(rows, logits, Draft(num_drafted[:, None][:, :0]), num_drafted)

    def rows(self, num_reqs: int, sampled: bool) -> RowState:
        return RowState(self.state, self.slots[:num_reqs], sampled)

    def _verify(self, rows: RowState, draft: Draft, k: int) -> PassResult:
        steps = torch.arange(k, device=rows.slots.device)
        usable = (steps < rows.max_drafts[:, None]) & (draft.ids >= 0)
        usable = (usable & (draft.ids < self.vocab_size)).long().cumprod(1)
        num_drafted = usable.sum(1)
        draft = Draft(draft.ids.where(usable > 0, 0), draft.probs)

        input_ids = torch.cat([rows.last_token[:, None], draft.ids], dim=1).flatten()
        num_valid = (num_drafted + 1).where(rows.active, 0)
        positions, metadata = rows.uniform_metadata(rows.seq_lens - 1, 1 + k, num_valid)
        positions = positions.clamp_max(self.state.max_model_len - 1)
        hidden = self.model.forward(input_ids, positions, self.kv_cache, metadata)
        logits = self._logits(hidden, rows.slots.shape[0])
        return self._accept(rows, logits, draft, num_drafted)

    def _accept(
        self, rows: RowState, logits: Tensor, draft: Draft, num_drafted: Tensor
    ) -> PassResult:
        result = accept(logits, draft.ids, num_drafted, draft.probs, rows.sampling, rows.rules)
        num_new = (result.num_accepted + 1 - result.failed.long()).where(rows.active, 0)
        if self.drafter is not None and draft.ids.shape[1]:
            self.drafter.advance(rows, result.num_accepted)
        rows.commit(result.tokens, num_new)
        failed = result.failed & rows.active
        logprobs = token_logprobs(logits, result.tokens, MAX_LOGPROBS) if rows.sampled else None
        return PassResult.pack(
            result.tokens, num_new, num_drafted, result.num_accepted, failed, logprobs
        )

    def _logits(self, hidden: Tensor, num_reqs: int) -> Tensor:
        """[R, Q, V] float32 over the ids that may be emitted: a view without the padding."""
        logits = self.model.compute_logits(hidden)
        return logits.view(num_reqs, -1, logits.shape[-1])[..., : self.vocab_size]
