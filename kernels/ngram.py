"""Prompt lookup over token histories. Shape letters: S rows, R requests, L context, k drafts."""

import torch
from torch import Tensor


def propose_ngram_reference(
    tokens: Tensor, seq_len: Tensor, slots: Tensor, k: int, max_n: int, min_n: int
) -> Tensor:
    """Plain PyTorch twin of ``propose_ngram``."""
    tokens, seq_lens = tokens[slots], seq_len[slots]
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


def propose_ngram(
    tokens: Tensor, seq_len: Tensor, slots: Tensor, k: int, max_n: int, min_n: int
) -> Tensor:
    """Continuations of the latest occurrence of each row's final n-gram, longest n first.

    Args:
        tokens: [S, L] int32, rows of any stride; entries at or past a row's length are ignored,
            whatever they hold.
        seq_len: [S] int64, of any stride.
        slots: [R] int64: the row of each request.

    Returns:
        [R, k] int64, -1 where a row has no match.
    """
    if tokens.is_cuda:
        from specdec.kernels import ngram_triton

        return ngram_triton.propose_ngram(tokens, seq_len, slots, k, max_n, min_n)
    return propose_ngram_reference(tokens, seq_len, slots, k, max_n, min_n)
