"""Sums over ranks: the same bits on every rank and for every message size."""

import pytest
import torch
from threaded_ranks import on_ranks

from specdec.kernels.rank_sum import sum_ranks_reference
from specdec.verifier.parallel import communicator as communicators
from specdec.verifier.parallel.communicator import RanksDisagreeError


def parts_of(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What the ranks bring: values so different in size that every order has a sum of its own."""
    generator = torch.Generator().manual_seed(size)
    scales = torch.tensor([1.0, 3e3, 1e-3, 7e2])[:size].view(-1, *([1] * len(shape)))
    return (torch.randn(size, *shape, generator=generator) * scales).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_sum_is_in_the_order_of_the_ranks(size, dtype):
    """N=2 proves nothing, since a + b = b + a; with more, any other order moves bits."""
    parts = parts_of(size, (75, 33), dtype)
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    results = on_ranks(size, lambda tp, c: c.all_reduce(parts[tp.rank]))
    for result in results:
        assert torch.equal(result, expected.to(dtype))
    if size > 2 and dtype is torch.float32:
        assert not torch.equal(sum_ranks_reference(parts.flip(0)), expected)


@pytest.mark.parametrize("size", [3, 4])
def test_large_messages_have_the_bits_of_small_ones(size, monkeypatch):
    """Above a size each rank adds a part; the row that lies in both must be the same."""
    parts = parts_of(size, (1000, 64), torch.float32)
    assert parts[0].nbytes < communicators._WHOLE_SUM_BYTES
    small = on_ranks(size, lambda tp, c: c.all_reduce(parts[tp.rank]))
    rows = on_ranks(size, lambda tp, c: c.all_reduce(parts[tp.rank, 17:18]))
    monkeypatch.setattr(communicators, "_WHOLE_SUM_BYTES", 0)
    # 999 rows of 33 do not divide by the ranks.
    for shape in ((slice(None),), (slice(999), slice(33))):
        large = on_ranks(size, lambda tp, c, s=shape: c.all_reduce(parts[(tp.rank, *s)]))
        for each, whole in zip(large, small, strict=True):
            assert torch.equal(each, whole[shape])
    assert all(torch.equal(each, small[0][17:18]) for each in rows)


def test_gathered_parts_stand_in_the_order_of_the_ranks():
    parts = torch.arange(24).view(4, 3, 2)
    for result in on_ranks(4, lambda tp, c: c.all_gather(parts[tp.rank])):
        assert torch.equal(result, parts)


def test_ranks_that_differ_say_so_on_every_rank():
    def compare(tp, c):
        c.check_same(7, "what is the same")
        with pytest.raises(RanksDisagreeError, match=r"rank 0 and rank 2 differ in their colour"):
            c.check_same(tp.rank // 2, "their colour")
        return c.all_values(tp.rank)

    assert on_ranks(3, compare) == [[0, 1, 2]] * 3
