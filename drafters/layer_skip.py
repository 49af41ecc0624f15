"""The target's own first layers, with its norm and head, as the drafter.

Source: self-speculation in the manner of Elhoushi et al., "LayerSkip", 2024 (without the trained
exit).
"""

import torch
from torch import Tensor

from specdec.drafters.base import Draft, Drafter
from specdec.drafters.draft_model import given_or, sample_draft
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.passes import draft_pass
from specdec.verifier.state import RowState


class LayerSkipDrafter(Drafter):
    """Drafts with layers ``0 .. num_layers - 1`` of the target.

    It shares the target's KV: those layers compute the same keys and values for a token whether
    they draft or verify, so nothing has to catch up, and the verify pass overwrites what a
    rejected draft wrote.
    """

    capturable = True
    # Its keys and values are the target's, so a row's adapter must have its part in them.
    uses_adapters = True

    def __init__(
        self, model: LanguageModel, kv_cache: KVCache, *, num_layers: int, vocab_size: int
    ) -> None:
        self.name = f"layer_skip:{num_layers}"
        self.model = model
        self.kv_cache = kv_cache
        self.num_layers = num_layers
        self.vocab_size = vocab_size

    def propose(self, state: RowState, k: int) -> Draft:
        return self._propose(state, k, None)

    def propose_after(self, state: RowState, k: int, given: Tensor) -> Draft:
        return self._propose(state, k, given)

    def _propose(self, state: RowState, k: int, given: Tensor | None) -> Draft:
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(k):
            fed = draft_pass(
                state,
                tokens[-1][:, None] if step else None,
                1,
                offset=step - 1,
                min_drafts=step + 1,
                needs_kv=False,
                vocab_size=self.model.config.vocab_size,
                max_len=state.state.max_model_len,
            )
            hidden = self.model.forward(
                fed.input_ids,
                fed.positions,
                self.kv_cache,
                fed.metadata,
                num_layers=self.num_layers,
            )
            adapter_slots = fed.metadata.adapter_slots
            token, prob = sample_draft(
                state, self.model, hidden, adapter_slots, step, self.vocab_size
            )
            tokens.append(token if given is None else given_or(given[:, step], token))
            probs += [] if prob is None else [prob]
        return Draft(torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None)


def skipped_layers(text: str, target_layers: int) -> int:
    """The N of "layer_skip:N". Raises ValueError where the target has not more layers than N."""
    name, _, number = text.partition(":")
    if name != "layer_skip" or not number.isdecimal():
        raise ValueError(f"draft={text!r}: write layer_skip:N with N the number of layers")
    if not 1 <= int(number) < target_layers:
        raise ValueError(
            f"draft={text!r}: the target has {target_layers} layers, so N must be between 1 and "
            f"{target_layers - 1}"
        )
    return int(number)
