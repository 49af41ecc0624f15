"""The step on the device: draft, verify, accept, advance. Written to be captured as one graph.

Shape letters: R requests of the batch, Q = 1 + k query length, V vocabulary.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.drafters.base import Draft, Drafter, as_draft
from specdec.verifier.acceptance import accept
from specdec.verifier.attention.base import AttentionMetadata, concatenate
from specdec.verifier.batch import PassResult, PrefillBatch, VerifyBatch
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.passes import accept_and_commit, commit, verify_pass
from specdec.verifier.sampling import MAX_LOGPROBS, token_logprobs
from specdec.verifier.simulated import rates_by_position, simulated_agreement
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
        model: LanguageModel,
        kv_cache: KVCache,
        state: DecodeState,
        drafter: Drafter | None,
        vocab_size: int,
        max_k: int,
        forward: Callable[[Tensor, Tensor, KVCache, AttentionMetadata], Tensor] | None = None,
        simulated_acceptance: float | Sequence[float] | None = None,
    ) -> None:
        """
        forward: stands in for the model's own, to put it on graphs.
        simulated_acceptance: rates to draw acceptance from, instead of comparing.
        """
        self.model = model
        self.forward = model.forward if forward is None else forward
        self.kv_cache = kv_cache
        self.state = state
        self.drafter = drafter
        self.vocab_size = vocab_size
        self._warned_of_probs = False
        self._rates = None
        if simulated_acceptance is not None:
            rates = rates_by_position(simulated_acceptance, max_k)
            self._rates = torch.tensor(rates, dtype=torch.float32, device=state.device)
        shape = (state.max_num_seqs,)
        self.slots = torch.full(shape, state.dump_row, dtype=torch.int64, device=state.device)
        # Drafts that the host brings (split step), and the distributions they came from.
        self.draft_ids = torch.full((*shape, max_k), -1, dtype=torch.int64, device=state.device)
        # What may stand at each verify row (split step): all bits set allow everything.
        words = -(-vocab_size // 32)
        self.allowed = torch.full(
            (*shape, 1 + max_k, words), -1, dtype=torch.int32, device=state.device
        )

    @property
    def changing_tensors(self) -> list[Tensor]:
        """What passes both read and write, so that a second run of one comes to something else."""
        recurrent = self.kv_cache.recurrent
        of_drafter = [] if self.drafter is None else self.drafter.state_tensors()
        of_target = [] if recurrent is None else recurrent.tensors
        return [self.state.tokens, self.state.ints, *of_target, *of_drafter]

    def decode(
        self, num_reqs: int, k: int, sampled: bool, has_lora: bool = False, rounds: int = 1
    ) -> PassResult:
        """Draft, verify, accept and advance a uniform batch, ``rounds`` times over.

        A row that ends in one of the rounds writes nothing in those after it.
        """
        return PassResult.of_rounds(
            [self._round(num_reqs, k, sampled, has_lora) for _ in range(rounds)]
        )

    def _round(self, num_reqs: int, k: int, sampled: bool, has_lora: bool) -> PassResult:
        rows = self.rows(num_reqs, sampled, has_lora)
        if self.drafter is None or k == 0:
            draft = Draft(self.draft_ids[:num_reqs, :0])
        else:
            draft = self.draft(num_reqs, k, sampled, has_lora)
        return self._verify(rows, draft)

    def verify(self, num_reqs: int, k: int, sampled: bool, has_lora: bool = False) -> PassResult:
        """The same with drafts and masks that the host has put where this reads them."""
        rows = self.rows(num_reqs, sampled, has_lora)
        allowed = self.allowed[:num_reqs, : 1 + k] if sampled else None
        return self._verify(rows, Draft(self.draft_ids[:num_reqs, :k]), allowed)

    def draft_on_host(self, num_reqs: int, k: int, sampled: bool) -> None:
        """Put a host drafter's proposal where ``verify`` reads it; padding rows draft nothing."""
        draft = self.draft(num_reqs, k, sampled)
        if draft.probs is not None and not self._warned_of_probs:
            # Each draft counts as one-hot, which is as exact and accepts a little less.
            name = self.drafter.name if self.drafter is not None else ""
            logger.warning("drafter %r: probabilities of host drafters are not used", name)
            self._warned_of_probs = True
        self.draft_ids[:num_reqs, :k] = draft.ids.to(self.draft_ids)
        self.draft_ids[num_reqs:, :k] = -1

    def catch_up(self, num_reqs: int, k: int, sampled: bool, has_lora: bool = False) -> Tensor:
        """Let the drafter read committed tokens that it lacks. Returns the valid draft lengths."""
        assert self.drafter is not None
        rows = self.rows(num_reqs, sampled, has_lora)
        self.drafter.catch_up(rows)
        return self.state.draft_len[rows.slots]

    def draft(self, num_reqs: int, k: int, sampled: bool, has_lora: bool = False) -> Draft:
        """Draft only. The drafter gets a view of its own, so that it cannot change the text."""
        assert self.drafter is not None
        proposal = self.drafter.propose(self.rows(num_reqs, sampled, has_lora), k)
        return as_draft(proposal, num_reqs, k, self.drafter.name, self.vocab_size)

    def mixed(
        self,
        prompts: PrefillBatch,
        rows: RowState | None,
        draft: Draft,
        first_allowed: Tensor | None = None,
    ) -> tuple[PassResult | None, PassResult | None]:
        """Read chunks of prompts, and verify the drafts of ``rows`` in the same pass.

        ``first_allowed``: masks of the first tokens. Returns the results of the verify rows, and
        those of the prompts that end here.
        """
        input_ids, positions, metadata = prompts.input_ids, prompts.positions, prompts.metadata
        verify = None
        if rows is not None:
            verify = self._verify_batch(rows, draft)
            input_ids = torch.cat([verify.input_ids, input_ids])
            positions = torch.cat([verify.positions, positions])
            metadata = concatenate(verify.metadata, metadata)
        hidden = self._read(input_ids, positions, metadata)
        if self.drafter is not None:
            self.drafter.prefill(prompts)

        verified = None
        if verify is not None:
            verified = self._accept(verify, hidden[: verify.input_ids.shape[0]])
            hidden = hidden[verify.input_ids.shape[0] :]
        if prompts.sampling_rows is None:
            return verified, None
        first = self._accept(
            self._first_tokens(prompts.sampling_rows, first_allowed),
            hidden[prompts.last_token_rows],
        )
        return verified, first

    def rows(self, num_reqs: int, sampled: bool, has_lora: bool = False) -> RowState:
        return RowState(self.state, self.slots[:num_reqs], sampled, has_lora)

    def _verify(self, rows: RowState, draft: Draft, allowed: Tensor | None = None) -> PassResult:
        batch = self._verify_batch(rows, draft, allowed)
        hidden = self._read(batch.input_ids, batch.positions, batch.metadata)
        return self._accept(batch, hidden)

    def _read(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """The target's hidden states; the drafter gets those that it asked for beside the last."""
        out = self.forward(input_ids, positions, self.kv_cache, metadata)
        if self.drafter is None or not self.drafter.feature_layers:
            return out
        # No other model is paired with such a drafter.
        assert isinstance(self.model, CausalLM)
        hidden, features = self.model.split_features(out)
        self.drafter.keep_features(features, metadata.slot_mapping)
        return hidden

    def _verify_batch(
        self, rows: RowState, draft: Draft, allowed: Tensor | None = None
    ) -> VerifyBatch:
        """Each row's last token and drafts; what a row may not take, or no token is, ends it."""
        ids = draft.ids
        if self._rates is not None:
            # A drafter of the simulated quality has something to propose at every position.
            ids = ids.clamp(0, self.vocab_size - 1)
        made = verify_pass(rows, ids, self.vocab_size)
        return VerifyBatch(
            rows=rows,
            draft_ids=made.draft_ids,
            draft_probs=draft.probs,
            num_drafted=made.num_drafted,
            num_from_first=draft.num_from_first,
            allowed=allowed,
            input_ids=made.input_ids,
            positions=made.positions,
            metadata=made.metadata,
        )

    def _first_tokens(self, rows: RowState, allowed: Tensor | None) -> VerifyBatch:
        """Prompts that end in this pass, as rows that drafted nothing."""
        return self._verify_batch(rows, Draft(rows.slots[:, None][:, :0]), allowed)

    def _accept(self, batch: VerifyBatch, hidden: Tensor) -> PassResult:
        """Accept the longest valid prefix of each row's drafts, and advance all state."""
        rows, num_drafted = batch.rows, batch.num_drafted
        if rows.sampled:
            result, num_accepted = self._accept_sampled(batch, hidden)
        else:
            adapter_slots = batch.metadata.adapter_slots
            choice = self.model.greedy_tokens(hidden, self.vocab_size, adapter_slots)
            targets, finite = (each.view(rows.slots.shape[0], -1) for each in choice)
            result, num_accepted = accept_and_commit(
                rows, targets, finite, batch.draft_ids, num_drafted, self._rates
            )
        if self.drafter is not None and batch.draft_ids.shape[1]:
            self.drafter.advance(rows, num_accepted)
        return replace(result, num_from_first=batch.num_from_first)

    def _accept_sampled(self, batch: VerifyBatch, hidden: Tensor) -> tuple[PassResult, Tensor]:
        """The same over all logits. Returns num_accepted [R] too."""
        rows, num_drafted = batch.rows, batch.num_drafted
        logits = self._logits(hidden, rows.slots.shape[0], batch.metadata.adapter_slots)
        simulated = None
        if self._rates is not None:
            simulated = simulated_agreement(rows, self._rates, batch.draft_ids.shape[1])
        accepted = accept(
            logits,
            batch.draft_ids,
            num_drafted,
            batch.draft_probs,
            rows.sampling,
            rows.rules,
            batch.allowed,
            simulated,
        )
        logprobs = token_logprobs(logits, accepted.tokens, MAX_LOGPROBS, rows.wants_logprobs)
        return commit(rows, accepted, num_drafted, logprobs), accepted.num_accepted

    def _logits(self, hidden: Tensor, num_reqs: int, adapter_slots: Tensor | None) -> Tensor:
        """[R, Q, V] float32 over the ids that may be emitted: a view without the padding."""
        logits = self.model.compute_logits(hidden, adapter_slots)
        return logits.view(num_reqs, -1, logits.shape[-1])[..., : self.vocab_size]
