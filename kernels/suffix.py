"""Lookup by the longest matching suffix, in a request's own text and in a sorted history.

Shape letters: S state rows, R requests, L context, P cells of the history's pool, N places in its
order, M longest match, V voters of one kind, C = 2 V candidates, k drafts.

Source: after Oliaro et al., "SuffixDecoding", 2024 (arXiv 2411.04975), with a chain for the tree
and a sorted array for the suffix tree.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Occurrences of a match that vote on how it goes on: the latest of the text itself, and of the
# history those nearest in its order.
VOTERS = 16
# What an occurrence in the request's own text counts for; one in the history counts for 1.
OWN_VOTES = 2
# Cells of a pool that hold no token. No key holds what stands before a text's first token.
SEPARATOR, BEFORE_TEXT = -1, -2


class SuffixRule(NamedTuple):
    """How a draft follows from its match."""

    max_match: int = 16  # longer matches count as this long
    min_match: int = 1  # shorter ones draft nothing
    drafts_per_match: int = 4  # drafts that each matched token is good for
    min_share: int = 5  # per cent of the votes that a draft and all before it must keep


class SuffixHistory(NamedTuple):
    """Earlier texts, and every place in them in the order of what stands before it, read backwards.

    Cells 0 and P - 1 of the pool and those between two texts are SEPARATOR. A place is the cell of
    a token with at least one token of its text before it.
    """

    pool: Tensor  # [P] int32
    order: Tensor  # [N] int32
    bounds: Tensor  # [S, 2] int32: the part of the order that each state row may read


def propose_suffix_reference(
    tokens: Tensor,
    seq_len: Tensor,
    slots: Tensor,
    history: SuffixHistory,
    k: int,
    rule: SuffixRule,
) -> Tensor:
    """Plain PyTorch twin of ``propose_suffix``."""
    tokens, seq_lens = tokens[slots], seq_len[slots]
    own_places, own_run = _own_places(tokens, seq_lens, rule.max_match)
    places, run = _history_places(tokens, seq_lens, history, slots, rule.max_match)
    match = torch.maximum(own_run, run.amax(1))
    found = torch.cat([own_places > 0, run > 0], dim=1)
    run = torch.cat([own_run[:, None].expand_as(own_places), run], dim=1)
    alive = found & (run == match[:, None])
    candidates = torch.arange(2 * VOTERS, device=tokens.device)
    weight = torch.where(candidates < VOTERS, OWN_VOTES, 1)
    total = (alive * weight).sum(1)
    going = (match > 0) & (match >= rule.min_match)
    period = (seq_lens[:, None] - own_places).clamp_min(1)
    drafts = []
    for step in range(k):
        own_next = tokens.gather(1, (own_places + step % period).clamp_max(tokens.shape[1] - 1))
        next_ = history.pool[(places + step).clamp_max(history.pool.shape[0] - 1)]
        following = torch.cat([own_next, next_], dim=1).long()  # [R, C]
        alive = alive & (following >= 0)
        same = (following[:, :, None] == following[:, None, :]) & alive[:, None, :]
        votes = (same * weight).sum(2)
        # The most votes win, then the first candidate.
        score = (votes * 2 * VOTERS + 2 * VOTERS - 1 - candidates).where(alive, -1)
        best, index = score.max(1)
        token = following.gather(1, index[:, None])
        kept = 100 * (best // (2 * VOTERS)) >= rule.min_share * total
        going = going & (best >= 0) & kept & (step < rule.drafts_per_match * match)
        drafts.append(token[:, 0].where(going, -1))
        alive = alive & (following == token)
    return torch.stack(drafts, dim=1)


def propose_suffix(
    tokens: Tensor,
    seq_len: Tensor,
    slots: Tensor,
    history: SuffixHistory,
    k: int,
    rule: SuffixRule,
) -> Tensor:
    """How each row's text went on where its end stood before, as most occurrences have it.

    Only the occurrences with the longest match vote, and after each draft those that agree with it;
    a text that repeats itself is continued as if the drafts were already part of it.

    Args:
        tokens: [S, L] int32, rows of any stride; entries at or past a row's length are ignored,
            whatever they hold.
        seq_len: [S] int64, of any stride.
        slots: [R] int64: the row of each request.

    Returns:
        [R, k] int64, -1 from where a row's draft ends.
    """
    if tokens.is_cuda:
        from specdec.kernels import suffix_triton

        return suffix_triton.propose_suffix(tokens, seq_len, slots, history, k, rule)
    return propose_suffix_reference(tokens, seq_len, slots, history, k, rule)


def _own_places(tokens: Tensor, seq_lens: Tensor, max_match: int) -> tuple[Tensor, Tensor]:
    """Places after the longest matches in the row's text, [R, V], the latest first and 0 for none.

    The second result is the length of those matches, [R].
    """
    length = tokens.shape[1]
    at = torch.arange(length, device=tokens.device)
    last = seq_lens[:, None] - 1
    matches = at < last
    run = torch.zeros_like(tokens)
    for n in range(max_match):
        wanted = tokens.gather(1, (last - n).clamp_min(0))
        shifted = torch.nn.functional.pad(tokens, (n, 0))[:, :length]
        matches = matches & (shifted == wanted) & (at >= n) & (last >= n)
        run = run + matches
    longest = run.amax(1)
    places = (at + 1).where((run > 0) & (run == longest[:, None]), 0)
    places = torch.nn.functional.pad(places, (0, max(0, VOTERS - length)))
    return places.topk(VOTERS).values, longest


def _history_places(
    tokens: Tensor, seq_lens: Tensor, history: SuffixHistory, slots: Tensor, max_match: int
) -> tuple[Tensor, Tensor]:
    """Places nearest to each row's text in the order, and their matches' lengths; [R, V] both."""
    back = torch.arange(max_match, device=tokens.device)
    ends = seq_lens[:, None] - 1 - back
    text = tokens.gather(1, ends.clamp_min(0)).where(ends >= 0, BEFORE_TEXT)  # [R, M]
    low, high = history.bounds[slots].long().unbind(1)
    at, end = low, high
    for _ in range(history.order.shape[0].bit_length()):
        middle = (at + end) // 2
        keys = _keys(history, middle[:, None], max_match)[:, 0]
        same = (keys == text).long().cumprod(1).sum(1, keepdim=True)
        # Where all M tokens are the same, the last ones are compared once more.
        differs = same.clamp_max(max_match - 1)
        less = (keys.gather(1, differs) < text.gather(1, differs))[:, 0]
        at, end = (
            torch.where((at < end) & less, middle + 1, at),
            torch.where((at < end) & ~less, middle, end),
        )
    near = at[:, None] - VOTERS // 2 + torch.arange(VOTERS, device=tokens.device)
    keys = _keys(history, near, max_match)
    run = (keys == text[:, None]).long().cumprod(2).sum(2)
    inside = (near >= low[:, None]) & (near < high[:, None])
    return _places(history, near), run.where(inside, 0)


def _places(history: SuffixHistory, index: Tensor) -> Tensor:
    return history.order[index.clamp(0, history.order.shape[0] - 1)].long()


def _keys(history: SuffixHistory, index: Tensor, max_match: int) -> Tensor:
    """What stands before the places at ``index`` [R, n] of the order, backwards: [R, n, M]."""
    back = torch.arange(1, max_match + 1, device=index.device)
    return history.pool[(_places(history, index)[..., None] - back).clamp_min(0)]
