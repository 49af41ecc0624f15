"""Kernels of adapted layers on a real GPU: errors, and bits that depend on nothing but the row."""

import pytest
import torch

from specdec.kernels import linear_triton, lora
from specdec.kernels.activation import silu_mul
from specdec.kernels.linear import linear, linear_silu_mul
from specdec.kernels.lora_rows import FEW_ROWS, slot_tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_and_poisoned"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

SHAPES = [((4096, 1024, 1024), 4096), ((4096,), 14336), ((576, 192, 192), 576), ((63,), 75)]
ROW_COUNTS = [1, 5, 15, 16, 17, 40, 63, 64, 65, 80, 320, 511, 512, 513, 1024, 2048]


def randn(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def stacks(num_slots, rank, depth, parts, dtype=torch.bfloat16):
    """The last slot is NaN: no row may read it."""
    a = randn(num_slots, len(parts) * rank, depth, dtype=dtype, seed=1) / depth**0.5
    b = randn(num_slots, sum(parts), rank, dtype=dtype, seed=2) / rank**0.5
    a[-1] = b[-1] = torch.nan
    return a, b


def slots_of(num_rows, num_adapters):
    """Requests of five rows; one in four is a base row's."""
    requests = torch.arange(num_rows, device="cuda") // 5
    return torch.where(requests % 4 == 3, -1, requests % num_adapters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize(("parts", "depth"), SHAPES)
def test_delta_is_as_good_as_pytorchs(parts, depth, rank, dtype):
    """Error against float64 at most twice that of a gather and two products in the same dtype.

    In float32, where PyTorch's products do not add in order, at most that of two sums in order:
    ``depth`` and ``rank`` additions, each off by up to 2^-23 of the sum so far, either way.
    """
    a, b = stacks(5, rank, depth, parts, dtype)
    for num_rows in (5, 80, 600):
        x, slots = randn(num_rows, depth, dtype=dtype, seed=3), slots_of(num_rows, 4)
        out = torch.zeros(num_rows, sum(parts), dtype=dtype, device="cuda")
        result = lora.lora_delta_(out.clone(), x, a, b, slots, parts).double()
        plain = lora.lora_delta_reference(out.clone(), x, a, b, slots, parts).double()
        wide = (t.double() for t in (out, x, a, b))
        exact = lora.lora_delta_reference(*wide, slots, parts)
        assert result.isfinite().all()
        norm = exact.norm()
        bound = 2 * (plain - exact).norm() / norm + 1e-12
        if dtype == torch.float32:
            bound = (depth**0.5 + rank**0.5) * 2**-23
        assert (result - exact).norm() / norm <= bound
        assert not result[slots < 0].any()


@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize(("parts", "depth"), SHAPES)
def test_rows_have_the_same_bits_in_every_batch(parts, depth, rank):
    """Any number of rows, fused with the product or after it; base rows have the layer's bits."""
    a, b = stacks(5, rank, depth, parts)
    x, weight = randn(2048, depth, seed=3), randn(sum(parts), depth, seed=4)
    slots = slots_of(2048, 4)
    product = linear(x, weight)
    wanted = lora.lora_delta_(product.clone(), x, a, b, slots, parts)
    base = slots < 0
    assert torch.equal(wanted[base], product[base])
    assert (wanted[~base] != product[~base]).any(1).all()
    for num_rows in ROW_COUNTS:
        rows = slice(0, num_rows)
        result = lora.lora_linear(x[rows], weight, None, a, b, slots[rows], parts)
        assert torch.equal(result, wanted[rows]), num_rows
        # The same rows further back, beside others.
        rows = slice(2048 - num_rows, 2048)
        result = lora.lora_linear(x[rows], weight, None, a, b, slots[rows], parts)
        assert torch.equal(result, wanted[rows]), num_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("depth", [4096, 1536])
def test_few_rows_have_the_bits_of_many(depth, rank, dtype):
    """5, 40 and 64 rows are expanded in the product's launch, 65 and 320 in one of their own.

    Tiles as a pass makes them, for as many requests as there are: of one request, rows take the
    kernel for a single slot. Adapters alone, one beside base rows, and eight of them.
    """
    parts, features = (1024, 256, 256), 512
    a, b = stacks(9, rank, depth, parts, dtype)
    gate_a, gate_b = stacks(9, rank, depth, (features, features), dtype)
    x = randn(320, depth, dtype=dtype, seed=3)
    weight = randn(sum(parts), depth, dtype=dtype, seed=4) / depth**0.5
    gate_up = weight[: 2 * features]
    bias = randn(sum(parts), dtype=dtype, seed=5)
    requests = torch.arange(320, device="cuda") // 5
    for slots in (requests * 0 + 3, requests % 2 - 1, requests % 8, requests % 9 - 1):
        product = linear(x, weight, bias)
        wanted = lora.lora_delta_(product.clone(), x, a, b, slots, parts)
        delta = lora.lora_delta_(linear(x, gate_up), x, gate_a, gate_b, slots, (features,) * 2)
        gated = silu_mul(delta)
        for num_rows in (5, 40, 64, 65, 320):
            own = x[:num_rows], slots[:num_rows]
            adapters = len(set(own[1].tolist()) - {-1})
            # All rows of one request, as of a prompt, and of requests of five.
            for num_reqs in {1 if adapters <= 1 else 8, num_rows // 5}:
                tiles = slot_tiles(own[1], 1 + min(num_reqs, 8), dtype)
                result = lora.lora_linear(own[0], weight, bias, a, b, own[1], parts, tiles)
                assert torch.equal(result, wanted[:num_rows]), (num_rows, num_reqs)
                result = lora.lora_linear_silu_mul(own[0], gate_up, gate_a, gate_b, own[1], tiles)
                assert torch.equal(result, gated[:num_rows]), (num_rows, num_reqs)


def test_rows_keep_their_bits_while_layers_follow_each_other_in_a_graph():
    """A product starts beside its shrinking launch, before that is over: bits as without overlap.

    Layers that read each other's outputs, replayed many times on two streams at once.
    """
    parts, depth = (4096,), 4096
    a, b = stacks(5, 16, depth, parts)
    weight = randn(depth, depth, seed=4) / depth**0.5
    graphs, inputs, outs, wanted = [], [], [], []
    for seed, num_rows in ((5, 5), (6, 64)):
        x, slots = randn(num_rows, depth, seed=seed), slots_of(num_rows, 4)
        tiles = slot_tiles(slots, 5, x.dtype)

        def layers(x, slots=slots, tiles=tiles, fused=True):
            for _ in range(8):
                if fused:
                    x = lora.lora_linear(x, weight, None, a, b, slots, None, tiles)
                else:
                    x = lora.lora_delta_(linear(x, weight), x, a, b, slots)
                    torch.cuda.synchronize()
            return x

        wanted.append(layers(x, fused=False))
        layers(x)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append(layers(x))
        # A graph reads them at their places, so they stay.
        inputs.append((x, slots, tiles))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(50):
        for out in outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, outs, wanted))


@pytest.mark.parametrize("rank", [8, 64])
@pytest.mark.parametrize(("features", "depth"), [(14336, 4096), (1536, 576), (63, 75)])
def test_gate_and_up_have_the_bits_of_separate_steps(features, depth, rank):
    parts = (features, features)
    a, b = stacks(5, rank, depth, parts)
    x, weight = randn(600, depth, seed=3), randn(2 * features, depth, seed=4) / depth**0.5
    slots = slots_of(600, 4)
    gate_up = lora.lora_delta_(linear(x, weight), x, a, b, slots, parts)
    wanted, base = silu_mul(gate_up), linear_silu_mul(x, weight)
    for num_rows in (1, 5, 17, 40, 64, 65, 320, 513, 600):
        rows = slice(0, num_rows)
        result = lora.lora_linear_silu_mul(x[rows], weight, a, b, slots[rows])
        assert torch.equal(result, wanted[rows]), num_rows
        own = slots[rows] < 0
        assert torch.equal(result[own], base[rows][own])


def test_embedding_rows():
    a, b = randn(4, 300, 8, seed=1), randn(4, 200, 8, seed=2)
    ids = torch.arange(40, device="cuda") * 7 % 300
    slots, out = slots_of(40, 4), randn(40, 200, seed=3)
    wanted = lora.lora_embedding_reference(out.clone(), ids, a, b, slots)
    result = lora.lora_embedding_(out.clone(), ids, a, b, slots)
    torch.testing.assert_close(result, wanted, rtol=2e-2, atol=2e-2)
    assert torch.equal(result[slots < 0], out[slots < 0])


def test_both_families_of_products_are_met():
    """The row counts above lie on both sides of the borders between kernels."""
    assert 5 < linear_triton.MAX_SKINNY_ROWS < 320
    assert FEW_ROWS == 64
