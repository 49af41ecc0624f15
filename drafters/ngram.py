"""Prompt lookup: continue the text as it went on after the last occurrence of its final n-gram.

Source: Saxena, "Prompt Lookup Decoding", 2023.
"""

from specdec.drafters.base import Draft, Drafter
from specdec.kernels.ngram import propose_ngram
from specdec.verifier.state import RowState


class NgramDrafter(Drafter):
    """Looks up the longest n-gram between ``max_n`` and ``min_n`` that occurred before.

    The latest occurrence wins. Its continuation may run into the n-gram itself; the text is then
    continued as if the drafts were already part of it, so a loop of any period is drafted in full.
    """

    name = "ngram"
    capturable = True

    def __init__(self, max_n: int = 3, min_n: int = 1) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"ngram needs 1 <= min_n <= max_n, got min_n={min_n}, max_n={max_n}")
        self.max_n = max_n
        self.min_n = min_n

    def propose(self, state: RowState, k: int) -> Draft:
        text = state.state.tokens[:, : state.state.max_model_len]
        lengths = state.state.seq_len
        return Draft(propose_ngram(text, lengths, state.slots, k, self.max_n, self.min_n))
