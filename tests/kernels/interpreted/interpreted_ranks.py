"""Kernels over several ranks, run by Triton's interpreter: ``test_interpreted.py`` starts this.

Ranks run one after the other here, so that what a rank waits for must be there before: the others'
parts and flags are written by hand.
"""

import pytest
import torch

from specdec.kernels import argmax, argmax_triton, linear, rank_sum, rank_sum_triton
from specdec.kernels.rank_sum_triton import MAX_PROGRAMS


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", [(1,), (3, 75), (5, 1000)])
def test_sum_ranks(size, shape) -> None:
    parts = torch.randn(size, *shape) * torch.tensor([1.0, 3e3, 1e-3, 7e2])[:size].view(
        -1, *([1] * len(shape))
    )
    assert torch.equal(rank_sum_triton.sum_ranks(parts), rank_sum.sum_ranks_reference(parts))


class Shared:
    """The memory of all ranks in one process."""

    def __init__(self, size: int, half: int) -> None:
        self.half = half
        self.buffers = [torch.full((2 * half,), torch.nan) for _ in range(size)]
        self.flags = [torch.zeros(MAX_PROGRAMS, size, dtype=torch.int64) for _ in range(size)]
        self.epochs = [torch.zeros(MAX_PROGRAMS, dtype=torch.int64) for _ in range(size)]
        self.lost = torch.zeros(1, dtype=torch.int32)

    def call(self, x: torch.Tensor, rank: int, is_sum: bool) -> torch.Tensor:
        return rank_sum_triton.one_shot(
            x,
            torch.tensor([each.data_ptr() for each in self.buffers]),
            torch.tensor([each.data_ptr() for each in self.flags]),
            self.epochs[rank],
            self.lost,
            half_bytes=4 * self.half,
            rank=rank,
            size=len(self.buffers),
            is_sum=is_sum,
        )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("numel", [1, 75, 3000])
def test_one_shot(size, numel) -> None:
    """Three calls in a row: the halves take turns, and each call has its own epoch."""
    shared, rank = Shared(size, 4096), 1
    for call in range(3):
        parts = torch.randn(size, numel) * torch.tensor([1.0, 3e3, 1e-3, 7e2])[:size, None]
        for peer in range(size):
            if peer != rank:
                first = call % 2 * shared.half
                shared.buffers[peer][first : first + numel] = parts[peer]
                shared.flags[rank][:, peer] = call + 1
        is_sum = call != 1
        got = shared.call(parts[rank], rank, is_sum)
        wanted = rank_sum.sum_ranks_reference(parts) if is_sum else parts
        assert torch.equal(got, wanted)
        programs = min(-(-numel // 1024), MAX_PROGRAMS)
        assert shared.epochs[rank][:programs].eq(call + 1).all()
        assert not shared.epochs[rank][programs:].any()
        for peer in range(size):
            told = shared.flags[peer][:, rank]
            assert peer == rank or (
                told[:programs].eq(call + 1).all() and not told[programs:].any()
            )


def test_a_rank_that_is_gone_is_not_waited_for() -> None:
    shared = Shared(2, 1024)
    shared.lost.fill_(1)
    assert shared.call(torch.ones(4), 0, True).shape == (4,)


@pytest.mark.parametrize("size", [1, 3])
def test_best_of_parts(size) -> None:
    vocab, x = 96, torch.randint(-2, 3, (5, 16)).float()
    weight = torch.randint(-1, 2, (vocab, 16)).float()
    weight[90] = torch.nan
    logits, rows = x @ weight.t(), vocab // size
    for limit in (90, 91):
        whole = argmax.argmax_reference(logits, limit)
        parts, from_logits = [], []
        for first in range(0, vocab, rows):
            count = min(limit - first, rows)
            part = weight[first : first + rows]
            parts.append(argmax_triton.linear_best_part(x, part, count, first))
            own = logits[:, first : first + rows].contiguous()
            from_logits.append(argmax_triton.best_part(own, count, first))
            assert torch.equal(parts[-1], linear.linear_best_part_reference(x, part, count, first))
        nothing = argmax_triton.best_part(logits, 0, 96)
        assert torch.equal(nothing, argmax.best_part_reference(logits, 0, 96))
        for each in (parts, from_logits):
            got = argmax_triton.best_of_parts(torch.stack([*each, nothing]))
            assert torch.equal(got[0], whole[0]) and torch.equal(got[1], whole[1])
