"""Low-rank deltas of mixed adapters against their plain-PyTorch twins."""

import pytest
import torch

from specdec.kernels import (
    activation_triton,
    linear_triton,
    lora,
    lora_embedding_triton,
    lora_linear_triton,
    lora_rows_triton,
    lora_triton,
)
from specdec.kernels.lora_rows import FEW_ROWS, SlotTiles, max_tiles, packed_size
from specdec.verifier.lora import _WARM_UP_BATCHES
from specdec.verifier.models.lora import max_groups


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stacks(num_slots, rank, depth, parts):
    """Slots that lie apart in memory, with NaN between them; the last slot is all NaN."""
    a_size, b_size = len(parts) * rank * depth, sum(parts) * rank
    flat = torch.full((num_slots, a_size + b_size + 7), torch.nan)
    a = flat[:, :a_size].view(num_slots, len(parts) * rank, depth)
    b = flat[:, a_size : a_size + b_size].view(num_slots, sum(parts), rank)
    a[:-1].copy_(randn(num_slots - 1, *a.shape[1:], seed=1))
    b[:-1].copy_(randn(num_slots - 1, *b.shape[1:], seed=2))
    return a, b


@pytest.mark.parametrize("rank", [1, 20])
@pytest.mark.parametrize(
    ("depth", "parts"), [(64, (63,)), (75, (70, 33)), (640, (96, 20, 21)), (2304, (40,))]
)
@pytest.mark.parametrize("num_rows", [1, 20])
def test_deltas(num_rows, depth, parts, rank) -> None:
    a, b = stacks(5, rank, depth, parts)
    x, out = randn(num_rows, depth, seed=3), randn(num_rows, sum(parts), seed=4)
    slots = torch.tensor([3, 3, -1, 0, 2, 2, 1, -1])[torch.arange(num_rows) // 2 % 8]
    before = out.clone()
    wanted = lora.lora_delta_reference(out.clone(), x, a, b, slots, parts)
    result = lora_triton.lora_delta_(out, x, a, b, slots.int(), parts)
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-3)
    assert torch.equal(result[slots < 0], before[slots < 0])
    assert result is out and bool((result[slots >= 0] != before[slots >= 0]).any(1).all())


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Other rows, other adapters beside it, and another tile height: the same bits."""
    a, b = stacks(5, 8, 300, (50, 30))
    x, out = randn(520, 300, seed=3), randn(520, 80, seed=4)
    slots = torch.arange(520) // 3 % 5 - 1
    wide = lora_triton.lora_delta_(out.clone(), x, a, b, slots, (50, 30))
    for first, count in ((0, 1), (7, 5), (30, 20)):
        rows = slice(first, first + count)
        few = lora_triton.lora_delta_(out[rows].clone(), x[rows], a, b, slots[rows], (50, 30))
        assert torch.equal(few, wide[rows])


def test_input_rows_may_lie_apart() -> None:
    a, b = stacks(3, 4, 64, (48,))
    wide, out = randn(5, 200), randn(5, 48, seed=4)
    slots = torch.tensor([0, 1, -1, 1, 0])
    wanted = lora.lora_delta_reference(out.clone(), wide[:, 7:71], a, b, slots)
    result = lora_triton.lora_delta_(out, wide[:, 7:71], a, b, slots)
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-4)


def test_embeddings() -> None:
    a, b = randn(3, 40, 6, seed=1), randn(3, 70, 6, seed=2)
    a[1] = b[1] = torch.nan
    out, ids = randn(7, 70, seed=3), torch.tensor([0, 39, 5, 5, 7, 8, 1])
    slots = torch.tensor([0, 2, -1, 0, 2, -1, 0])
    wanted = lora.lora_embedding_reference(out.clone(), ids, a, b, slots)
    before = out.clone()
    result = lora_embedding_triton.lora_embedding_(out, ids, a, b, slots)
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(result[slots < 0], before[slots < 0])


PATTERNS = {
    "one": [0],
    "base": [-1],
    "mixed": [3, 3, -1, 0, 2, 2, 1, -1],
    "no base": [1, 3, 0, 2],
}


@pytest.fixture(params=[16, 64], ids=lambda lanes: f"{lanes} lanes")
def exact(request, monkeypatch):
    """Slots side by side; whether the interpreter, that is NumPy, keeps the order of the lanes."""
    monkeypatch.setattr(lora_linear_triton, "_MAX_LANES_FLOAT32", request.param)
    return request.param == 16


def slots_of(pattern, num_rows):
    values = torch.tensor(PATTERNS[pattern])
    return values[torch.arange(num_rows) // 2 % len(values)]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("num_rows", "biased"), [(3, True), (20, False)])
def test_product_and_deltas_of_few_rows(num_rows, biased, pattern, exact) -> None:
    """The bits of the product and then the deltas; base rows have the product's own."""
    parts, depth, rank = (70, 33, 20), 1100, 4
    a, b = stacks(5, rank, depth, parts)
    x, weight = randn(num_rows, depth, seed=3), randn(sum(parts), depth, seed=4)
    bias = randn(sum(parts), seed=5) if biased else None
    slots = slots_of(pattern, num_rows)
    product = linear_triton.linear(x, weight, bias)
    wanted = lora_triton.lora_delta_(product.clone(), x, a, b, slots, parts)
    # No more tiles than the batch has slots.
    tiles = lora_rows_triton.slot_tiles(slots, len(slots.unique()), torch.float32)
    result = lora_linear_triton.lora_linear(x, weight, bias, a, b, slots, parts, tiles)
    if exact:
        assert torch.equal(result, wanted)
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-4)
    assert torch.equal(result[slots < 0], product[slots < 0])
    assert bool((result[slots >= 0] != product[slots >= 0]).any(1).all())
    plain = lora.lora_linear_reference(x, weight, bias, a, b, slots, parts)
    torch.testing.assert_close(result, plain, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gate_and_up_of_few_rows(pattern, exact) -> None:
    a, b = stacks(5, 8, 75, (63, 63))
    x, weight = 0.1 * randn(20, 75, seed=3), randn(126, 75, seed=4)
    slots = slots_of(pattern, 20)
    result = lora_linear_triton.lora_linear_silu_mul(x, weight, a, b, slots)
    gate_up = linear_triton.linear(x, weight)
    lora_triton.lora_delta_(gate_up, x, a, b, slots, (63, 63))
    wanted = activation_triton.silu_mul(gate_up)
    if exact:
        assert torch.equal(result, wanted)
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
    plain = lora.lora_linear_silu_mul_reference(x, weight, a, b, slots)
    torch.testing.assert_close(result, plain, rtol=1e-4, atol=1e-4)
    base = linear_triton.linear_silu_mul(x, weight)
    assert torch.equal(result[slots < 0], base[slots < 0])


def test_rows_are_the_same_on_both_sides_of_the_border() -> None:
    """Few rows are expanded in the product's launch, many in one of their own."""
    parts, depth, rank = (40, 9), 600, 20
    a, b = stacks(5, rank, depth, parts)
    x, weight = randn(70, depth, seed=3), randn(sum(parts), depth, seed=4)
    slots = slots_of("mixed", 70)
    wide = lora_linear_triton.lora_linear(x, weight, None, a, b, slots, parts)
    features = 20
    gate_a, gate_b = stacks(5, rank, depth, (features, features))
    gate_up = 0.003 * weight[: 2 * features]
    gated = lora_linear_triton.lora_linear_silu_mul(x, gate_up, gate_a, gate_b, slots)
    for first, last in ((0, 5), (0, FEW_ROWS), (0, FEW_ROWS + 1), (31, 36)):
        rows = slice(first, last)
        few = lora_linear_triton.lora_linear(x[rows], weight, None, a, b, slots[rows], parts)
        assert torch.equal(few, wide[rows]), (first, last)
        stacked = (gate_a, gate_b, slots[rows])
        few = lora_linear_triton.lora_linear_silu_mul(x[rows], gate_up, *stacked)
        assert torch.equal(few, gated[rows]), (first, last)


def test_high_ranks_add_two_partial_sums_at_once() -> None:
    """Three of them, for a tile too large to hold all at once."""
    parts, depth, rank = (20, 9), 1100, 72
    a, b = stacks(4, rank, depth, parts)
    x, weight = randn(20, depth, seed=3), randn(sum(parts), depth, seed=4)
    slots = slots_of("base", 20)
    slots[3:] = torch.arange(17) % 3
    result = lora_linear_triton.lora_linear(x, weight, None, a, b, slots, parts)
    wanted = linear_triton.linear(x, weight)
    lora_triton.lora_delta_(wanted, x, a, b, slots, parts)
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-3)
    plain = lora.lora_linear_reference(x, weight, None, a, b, slots, parts)
    torch.testing.assert_close(result, plain, rtol=1e-4, atol=1e-2)


def test_a_batch_of_one_request_has_kernels_for_one_slot() -> None:
    """Tiles made for one request: at most its adapter's slot and -1."""
    a, b = stacks(5, 4, 64, (48,))
    x, weight = randn(40, 64, seed=3), randn(48, 64, seed=4)
    for pattern in ([2], [-1], [-1, 3]):
        slots = torch.tensor(pattern)[torch.arange(40) * len(pattern) // 40]
        tiles = lora_rows_triton.slot_tiles(slots, 2, torch.float32)
        assert SlotTiles.of(tiles, 40, torch.float32).num_tiles == 2
        result = lora_linear_triton.lora_linear(x, weight, None, a, b, slots, None, tiles)
        wanted = lora_linear_triton.lora_linear(x, weight, None, a, b, slots)
        assert torch.equal(result, wanted)
        plain = lora.lora_linear_reference(x, weight, None, a, b, slots)
        torch.testing.assert_close(result, plain, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("num_slots", [1, 2, 8, 100])
@pytest.mark.parametrize("block_r", [16, 64, 256])
def test_the_warm_up_meets_every_kernel_of_few_rows(block_r, num_slots) -> None:
    """A kernel is its height of tile and its slots at once; traffic compiles none."""

    def kernel(num_rows: int, num_reqs: int) -> tuple[int, int]:
        groups = max_tiles(num_rows, max_groups(num_reqs, num_slots), FEW_ROWS)
        tiles = linear_triton.tile_arguments(randn(num_rows, 64).bfloat16(), 64, 64, None)
        at_once = lora_linear_triton._slots_at_once(torch.bfloat16, block_r, num_slots, groups)
        return tiles["BLOCK_M"], at_once

    warm = {kernel(*batch) for batch in _WARM_UP_BATCHES if batch[0] <= FEW_ROWS}
    batches = [(rows, reqs) for rows in range(1, FEW_ROWS + 1) for reqs in range(1, rows + 1)]
    assert {kernel(*batch) for batch in batches} == warm


@pytest.mark.parametrize("num_rows", [1, 5, 40, 64])
def test_few_rows_have_a_tile_for_each_slot(num_rows) -> None:
    """What the kernel for few rows takes for the list of the batch's slots."""
    slots = torch.tensor([3, 3, 3, -1, 0, 7, 7, -1, 2])[torch.arange(num_rows) // 5 % 9]
    packed = lora_rows_triton.slot_tiles(slots, 6, torch.bfloat16)
    found = SlotTiles.of(packed, num_rows, torch.bfloat16).slot.tolist()
    distinct = sorted(set(slots.tolist()))
    assert found == distinct + [-2] * (min(6, num_rows) - len(distinct))


@pytest.mark.parametrize("num_rows", [1, 16, 40, 1100])
def test_rows_are_sorted_by_slot(num_rows) -> None:
    """Every row once, tiles of one slot each, unused tiles marked; over more than one block."""
    slots = torch.tensor([3, 3, 3, -1, 0, 7, 7, -1, 2])[torch.arange(num_rows) // 5 % 9]
    out = torch.full((packed_size(num_rows, 6, torch.float32),), -7, dtype=torch.int32)
    packed = lora_rows_triton.slot_tiles(slots, 6, torch.float32, out)
    assert packed is out
    tiles = SlotTiles.of(packed, num_rows, torch.float32)
    assert sorted(tiles.order.tolist()) == list(range(num_rows))
    seen = []
    for slot, first, end in zip(
        *(t.tolist() for t in (tiles.slot, tiles.first, tiles.end)), strict=True
    ):
        if slot == -2:
            continue
        assert 0 < end - first <= tiles.block_m
        rows = tiles.order[first:end]
        assert bool((slots[rows] == slot).all())
        seen += rows.tolist()
    assert seen == sorted(range(num_rows), key=lambda row: (int(slots[row]), row))
