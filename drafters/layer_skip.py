"""The target's own first layers, with its norm and head, as the drafter.

Source: self-speculation in the manner of Elhoushi et al., "LayerSkip", 2024 (without the trained
exit).
"""

import torch

from specdec.drafters.base import Draft, Drafter
from specdec.drafters.draft_model import sample_draft
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.state import RowState


class LayerSkipDrafter(Drafter):
    """Drafts with layers ``0 .. num_layers - 1`` of the target.

    It shares the target's KV: those layers compute the same keys and values for a token whether
    they draft or verify, so nothing has to catch up, and the verify pass overwrites what a
    rejected draft wrote.
    """

    capturable = True

    def __init__(
        self, model: CausalLM, kv_cache: KVCache, *, num_layers: int, vocab_size: int
    ) -> None:
        self.name = f"layer_skip:{num_layers}"
        self.model = model
        self.kv_cache = kv_cache
        self.num_layers = num_layers
        self.vocab_size = vocab_size

    def propose(self, state: RowState, k: int) -> Draft:
        token = state.last_token
        tokens, probs = [], []
        for step in range(k):
            fed = (state.active & (step < state.max_drafts)).long()
            positions, metadata = state.uniform_metadata(state.seq_lens - 1 + step, 1, fed)
            positions = positions.clamp_max(state.state.max_model_len - 1)
            hidden = self.model.forward(
                token, positions, self.kv_cache, metadata, num_layers=self.num_layers
            )
            logits = self.model.compute_logits(hidden)
            token, prob = sample_draft(state, logits, step, self.vocab_size)
            tokens.append(token)
            probs.append(prob)
        if state.sampling is None:
            return Draft(torch.stack(tokens, dim=1))
        return Draft(
            torch.stack(tokens, dim=1), torch.stack([p for p in probs if p is not None], dim=1)
        )


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
