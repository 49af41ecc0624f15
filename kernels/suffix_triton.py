"""Triton side of ``specdec.kernels.suffix``, whose shape letters it shares.

One kernel finds the longest matches in each row's own text, a second one searches the history and
counts the votes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.suffix import (
    BEFORE_TEXT,
    OWN_VOTES,
    SEPARATOR,
    VOTERS,
    SuffixHistory,
    SuffixRule,
)

# Parts that one round of the search splits the order into.
WAYS = 32


@triton.jit
def _runs(text, at, last, MAX_MATCH: tl.constexpr):
    """How many tokens up to and including each of ``at`` equal the text's last ones."""
    matches = at < last
    run = tl.zeros_like(at)
    for n in tl.static_range(MAX_MATCH):
        # No load waits for the tokens before it, so that all are under way together.
        wanted = tl.load(text + tl.maximum(last - n, 0))
        token = tl.load(text + tl.maximum(at - n, 0), mask=at < last, other=-1)
        matches = matches & (token == wanted) & (at >= n) & (last >= n)
        run += matches.to(tl.int32)
    return run


@triton.jit
def _own_kernel(
    tokens,
    seq_len_column,
    slots,
    places,  # [R, V] int32
    runs,  # [R] int32
    token_stride,
    column_stride,
    MAX_MATCH: tl.constexpr,
    VOTERS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One request: the latest places after its longest matches in its own text."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    text = tokens + slot * token_stride
    last = tl.load(seq_len_column + slot * column_stride).to(tl.int32) - 1
    best = tl.zeros([BLOCK], tl.int32)
    for start in range(0, last, BLOCK):
        best = tl.maximum(best, _runs(text, start + tl.arange(0, BLOCK), last, MAX_MATCH))
    longest = tl.max(best, axis=0)
    found = 0
    start = (tl.maximum(last - 1, 0) // BLOCK) * BLOCK
    while (start >= 0) & (found < VOTERS) & (longest > 0):
        at = start + tl.arange(0, BLOCK)
        is_place = (_runs(text, at, last, MAX_MATCH) == longest).to(tl.int32)
        count = tl.sum(is_place, axis=0)
        rank = found + count - tl.cumsum(is_place, axis=0)
        tl.store(places + row * VOTERS + rank, at + 1, mask=(is_place > 0) & (rank < VOTERS))
        found += count
        start -= BLOCK
    voters = tl.arange(0, VOTERS)
    tl.store(places + row * VOTERS + voters, tl.zeros_like(voters), mask=voters >= found)
    tl.store(runs + row, longest)


@triton.jit
def _matched(keys, wanted, back, MAX_MATCH: tl.constexpr):
    """Leading tokens of each of ``keys`` [n, M] that are those of ``wanted`` [M]."""
    return tl.min(tl.where(keys == wanted[None, :], MAX_MATCH, back[None, :]), axis=1)


@triton.jit
def _vote_kernel(
    tokens,
    seq_len_column,
    slots,
    own_places,
    own_runs,
    pool,
    order,
    bounds,  # [S, 2]
    out,  # [R, K]
    token_stride,
    column_stride,
    pool_size,
    L: tl.constexpr,
    K: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MIN_MATCH: tl.constexpr,
    DRAFTS_PER_MATCH: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    VOTERS: tl.constexpr,
    OWN_VOTES: tl.constexpr,
    SEPARATOR: tl.constexpr,
    BEFORE_TEXT: tl.constexpr,
    WAYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One request: its place in the history's order, and the votes of what is found there."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    text = tokens + slot * token_stride
    seq_len = tl.load(seq_len_column + slot * column_stride).to(tl.int32)
    back = tl.arange(0, BLOCK_M)
    used = back < MAX_MATCH
    wanted = tl.load(text + seq_len - 1 - back, mask=used & (back < seq_len), other=BEFORE_TEXT)

    low = tl.load(bounds + slot * 2)
    high = tl.load(bounds + slot * 2 + 1)
    at, end = low, high
    ways = tl.arange(0, WAYS)
    while at < end:
        middle = at + (end - at) * (ways + 1) // (WAYS + 1)
        cell = tl.load(order + middle)
        keys = tl.load(pool + tl.maximum(cell[:, None] - 1 - back[None, :], 0))
        # Past MAX_MATCH all keys are alike.
        keys = tl.where(used[None, :], keys, BEFORE_TEXT)
        first = _matched(keys, wanted, back, BLOCK_M)
        is_less = (back[None, :] == first[:, None]) & (keys < wanted[None, :])
        # The splits are in order, so those that lie before the text come first.
        count = tl.sum(tl.max(is_less.to(tl.int32), axis=1), axis=0)
        split = at + (end - at) * count // (WAYS + 1)
        next_split = at + (end - at) * (count + 1) // (WAYS + 1)
        at = tl.where(count > 0, split + 1, at)
        end = tl.where(count < WAYS, next_split, end)

    candidates = tl.arange(0, 2 * VOTERS)
    is_own = candidates < VOTERS
    own = tl.load(own_places + row * VOTERS + candidates, mask=is_own, other=0)
    near = at - VOTERS // 2 + candidates - VOTERS
    inside = (candidates >= VOTERS) & (near >= low) & (near < high)
    cell = tl.load(order + near, mask=inside, other=0)
    keys = tl.load(pool + tl.maximum(cell[:, None] - 1 - back[None, :], 0))
    keys = tl.where(used[None, :], keys, BEFORE_TEXT)
    run = tl.minimum(_matched(keys, wanted, back, BLOCK_M), MAX_MATCH)
    run = tl.where(inside, run, 0)
    run = tl.where(own > 0, tl.load(own_runs + row), run)

    match = tl.max(run, axis=0)
    alive = (run == match) & (run > 0)
    weight = tl.where(is_own, OWN_VOTES, 1)
    total = tl.sum(tl.where(alive, weight, 0), axis=0)
    going = (match > 0) & (match >= MIN_MATCH)
    period = tl.maximum(seq_len - own, 1)
    for step in tl.static_range(K):
        own_at = tl.minimum(own + step % period, L - 1)
        own_next = tl.load(text + own_at, mask=own > 0, other=SEPARATOR)
        next_ = tl.load(
            pool + cell + step, mask=inside & (cell + step < pool_size), other=SEPARATOR
        )
        following = tl.where(is_own, own_next, next_)
        alive = alive & (following >= 0)
        same = (following[:, None] == following[None, :]) & alive[None, :]
        votes = tl.sum(tl.where(same, weight[None, :], 0), axis=1)
        score = tl.where(alive, votes * 2 * VOTERS + 2 * VOTERS - 1 - candidates, -1)
        best = tl.max(score, axis=0)
        chosen = 2 * VOTERS - 1 - best % (2 * VOTERS)
        token = tl.sum(tl.where(candidates == chosen, following, 0), axis=0)
        kept = 100 * (best // (2 * VOTERS)) >= MIN_SHARE * total
        going = going & (best >= 0) & kept & (step < DRAFTS_PER_MATCH * match)
        tl.store(out + row * K + step, tl.where(going, token, -1).to(tl.int64))
        alive = alive & (following == token)


def propose_suffix(
    tokens: Tensor,
    seq_len: Tensor,
    slots: Tensor,
    history: SuffixHistory,
    k: int,
    rule: SuffixRule,
) -> Tensor:
    """``specdec.kernels.suffix.propose_suffix``."""
    num_reqs, length = slots.shape[0], tokens.shape[1]
    device = tokens.device
    places = torch.empty(num_reqs, VOTERS, dtype=torch.int32, device=device)
    runs = torch.empty(num_reqs, dtype=torch.int32, device=device)
    out = torch.empty(num_reqs, k, dtype=torch.int64, device=device)
    _own_kernel[(num_reqs,)](
        tokens,
        seq_len,
        slots,
        places,
        runs,
        tokens.stride(0),
        seq_len.stride(0),
        MAX_MATCH=rule.max_match,
        VOTERS=VOTERS,
        BLOCK=min(4096, max(32, triton.next_power_of_2(length))),
        num_warps=8,
        **pdl_options(tokens),
    )
    _vote_kernel[(num_reqs,)](
        tokens,
        seq_len,
        slots,
        places,
        runs,
        history.pool,
        history.order,
        history.bounds,
        out,
        tokens.stride(0),
        seq_len.stride(0),
        history.pool.shape[0],
        L=length,
        K=k,
        MAX_MATCH=rule.max_match,
        BLOCK_M=triton.next_power_of_2(rule.max_match),
        MIN_MATCH=rule.min_match,
        DRAFTS_PER_MATCH=rule.drafts_per_match,
        MIN_SHARE=rule.min_share,
        VOTERS=VOTERS,
        OWN_VOTES=OWN_VOTES,
        SEPARATOR=SEPARATOR,
        BEFORE_TEXT=BEFORE_TEXT,
        WAYS=WAYS,
        num_warps=4,
        **pdl_options(tokens),
    )
    return out
