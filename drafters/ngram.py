"""Prompt lookup: continue the text as it went on after the last occurrence of its final n-gram.

Source: Saxena, "Prompt Lookup Decoding", 2023.
"""

import torch
from torch import Tensor

from specdec.drafters.base import Draft, Drafter
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
        return Draft(propose_ngram(state.tokens, state.seq_lens, k, self.max_n, self.min_n))


def propose_ngram(tokens: Tensor, seq_lens: Tensor, k: int, max_n: int, min_n: int) -> Tensor:
    """Continuations of the latest occurrence of each row's final n-gram, longest n first.

    Args:
        tokens: [R, L] int32; entries at or past ``seq_lens`` are ignored, whatever they hold.
        seq_lens: [R] int64.

    Returns:
        [R, k] int64, -1 where a row has no match.
    """
    length = tokens.shape[1]
    at = torch.arange(length, device=tokens.device)
    last = seq_lens[:, None] - 1
    # run[r, i] = how many tokens before and including i equal the row's own last ones, up to max_n
    matches = torch.ones_like(tokens, dtype=torch.bool)
    run = torch.zeros_like(tokens)
    for n in range(max_n):
        wanted = tokens.gather(1, (last - n).clamp_min(0))
        shifted = torch.nn.functional.pad(tokens, (n, 0))[:, :length]
        matches = matches & (shifted == wanted) & (at >= n) & (last >= n)
        run = run + matches
    run = run.where(at < last, 0)
    # The longest run wins, then the latest position.
    score, best = (run.long() * length + at).max(1)
    found = score >= min_n * length
    start = (best[:, None] + 1).clamp_max(length - 1)
    period = (seq_lens[:, None] - start).clamp_min(1)
    steps = torch.arange(k, device=tokens.device)
    proposal = tokens.gather(1, start + steps % period).long()
    return proposal.where(found[:, None], -1)
