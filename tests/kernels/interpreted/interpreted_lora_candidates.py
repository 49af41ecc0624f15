"""Deltas fused with few rows' product, and grouped by adapter for many, against their twins."""

import pytest
import torch

from specdec.kernels import (
    linear_triton,
    lora,
    lora_fused_triton,
    lora_grouped_triton,
    lora_rows_triton,
)
from specdec.kernels.lora_rows import SlotTiles

PATTERNS = {
    "one": [0],
    "base": [-1],
    "mixed": [3, 3, -1, 0, 2, 2, 1, -1],
    "no base": [1, 3, 0, 2],
}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stacks(num_slots, rank, depth, parts):
    """Slots that lie apart in memory, with NaN between them; slot s has rank at most s + 1."""
    a_size, b_size = len(parts) * rank * depth, sum(parts) * rank
    flat = torch.full((num_slots, a_size + b_size + 7), torch.nan)
    a = flat[:, :a_size].view(num_slots, len(parts) * rank, depth)
    b = flat[:, a_size : a_size + b_size].view(num_slots, sum(parts), rank)
    # The last slot is all NaN: no row has it.
    a[:-1].copy_(randn(num_slots - 1, *a.shape[1:], seed=1))
    b[:-1].copy_(randn(num_slots - 1, *b.shape[1:], seed=2))
    for slot in range(num_slots - 1):
        a.unflatten(1, (len(parts), rank))[slot, :, slot + 1 :] = 0.0
        b[slot, :, slot + 1 :] = 0.0
    return a, b


def sorted_rows(slots, block_m):
    packed = lora_rows_triton.slot_tiles(slots, 5, torch.float32, block_m=block_m)
    return SlotTiles.of(packed, slots.shape[0], torch.float32, block_m)


def slots_of(pattern, num_rows):
    values = torch.tensor(PATTERNS[pattern])
    return values[torch.arange(num_rows) // 2 % len(values)]


def grouped(x, product, a, b, slots, parts, block_m=16, **options):
    tiles = sorted_rows(slots, block_m)
    rows = lora_grouped_triton.shrink(x, a, tiles, len(parts))
    return lora_grouped_triton.expand(rows, product, b, parts, **options)


def fused(x, weight, bias, a, b, slots, parts, **options):
    distinct = sorted_rows(slots, 64).slot
    return lora_fused_triton.lora_linear(x, weight, bias, a, b, slots, parts, distinct, **options)


@pytest.mark.parametrize(("one_launch", "max_lanes"), [(True, 16), (True, 128), (False, 32)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_few_rows(pattern, max_lanes, one_launch) -> None:
    """The bits of the product and then the deltas; base rows have the product's own."""
    parts, depth, rank = (64, 32, 20), 523, 4
    a, b = stacks(5, rank, depth, parts)
    weight, bias = randn(sum(parts), depth, seed=4), randn(sum(parts), seed=5)
    for num_rows in (3, 20):
        x, slots = randn(num_rows, depth, seed=3), slots_of(pattern, num_rows)
        product = linear_triton.linear(x, weight, bias)
        wanted = grouped(x, product.clone(), a, b, slots, parts)
        options = {"one_launch": one_launch, "max_lanes": max_lanes}
        result = fused(x, weight, bias, a, b, slots, parts, **options)
        if max_lanes == 16:
            assert torch.equal(result, wanted)
        # The interpreter's product, NumPy's, adds lanes in an order of its own.
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-4)
        assert torch.equal(result[slots < 0], product[slots < 0])
        assert bool((result[slots >= 0] != product[slots >= 0]).any(1).all())
        plain = lora.lora_linear_reference(x, weight, bias, a, b, slots, parts)
        torch.testing.assert_close(result, plain, rtol=1e-5, atol=1e-3)
        assert not lora_fused_triton._counters(x.device).any()


@pytest.mark.parametrize(("one_launch", "max_lanes"), [(True, 32), (True, 128), (False, 32)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_few_rows_of_gate_and_up(pattern, one_launch, max_lanes) -> None:
    parts, depth, rank = (33, 33), 75, 20
    a, b = stacks(5, rank, depth, parts)
    weight = randn(sum(parts), depth, seed=4)
    for num_rows in (20,):
        x, slots = 0.1 * randn(num_rows, depth, seed=3), slots_of(pattern, num_rows)
        result = fused(
            x,
            weight,
            None,
            a,
            b,
            slots,
            parts,
            silu=True,
            one_launch=one_launch,
            max_lanes=max_lanes,
        )
        product = linear_triton.linear(x, weight)
        for early in (False, True):
            wanted = grouped(x, product, a, b, slots, parts, silu=True, early=early)
            if max_lanes == 32:
                assert torch.equal(result, wanted)
            torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
        plain = lora.lora_linear_silu_mul_reference(x, weight, a, b, slots)
        torch.testing.assert_close(result, plain, rtol=1e-4, atol=1e-4)
        base = linear_triton.linear_silu_mul(x, weight)
        assert torch.equal(result[slots < 0], base[slots < 0])


@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_many_rows(pattern, block_m) -> None:
    """Any tile height; a row does not depend on the rows beside it."""
    parts, depth, rank = (70, 33, 20), 530, 4
    a, b = stacks(5, rank, depth, parts)
    x, product = randn(40, depth, seed=3), randn(40, sum(parts), seed=4)
    slots = slots_of(pattern, 40)
    wanted = lora.lora_delta_reference(product.clone(), x, a, b, slots, parts)
    result = grouped(x, product.clone(), a, b, slots, parts, block_m, early=block_m == 16)
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-3)
    assert torch.equal(result[slots < 0], product[slots < 0])
    for first, count in ((0, 1), (7, 20)):
        rows = slice(first, first + count)
        few = grouped(x[rows], product[rows].clone(), a, b, slots[rows], parts)
        assert torch.equal(few, result[rows])
