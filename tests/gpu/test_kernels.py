"""Triton kernels on a GPU: accuracy, the same bits for any number of rows, fused equal to separate.

An error is measured against float64 and may be at most twice that of PyTorch's own operator in the
same dtype.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from specdec.kernels import argmax_triton, linear_triton, qkv_triton, sampling
from specdec.kernels.activation import silu_mul, silu_mul_reference
from specdec.kernels.argmax import argmax, argmax_reference
from specdec.kernels.kv_cache import write_kv
from specdec.kernels.linear import (
    configure_exact_blas,
    linear,
    linear_add,
    linear_argmax,
    linear_silu_mul,
)
from specdec.kernels.norm import add_rms_norm, rms_norm, rms_norm_reference
from specdec.kernels.qkv import qkv_rope_write_kv, qkv_rope_write_kv_reference
from specdec.kernels.rope import apply_rope, apply_rope_reference, rope_write_kv
from specdec.kernels.tuning import TileConfig

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Around every border between tiles and between kernel families, and up to the largest forward.
ROW_COUNTS = [
    *range(1, 18),
    *(20, 31, 32, 33, 40, 48, 63, 64, 65, 66, 80, 96, 127, 128, 129, 160, 192, 255, 256, 257),
    *(320, 333, 511, 512, 513, 640, 768, 1000, 1023, 1024, 1025, 1500, 2000, 2047, 2048),
]


@pytest.fixture(autouse=True)
def exact_and_poisoned() -> Iterator[None]:
    """cuBLASLt without split-K, and NaN in all memory that PyTorch hands out unwritten."""
    configure_exact_blas()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    assert result.isfinite().all()
    return ((result.double() - exact).norm() / exact.norm()).item()


def assert_as_good(result: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> None:
    assert result.dtype == own.dtype
    assert error(result, exact) <= 2 * error(own, exact) + 1e-12


LINEAR_SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (4096, 14336),
    (2048, 8192),
    (2048, 2048),
    (960, 576),
    (576, 576),
    (576, 1536),
    (333, 75),
]
LINEAR_IDS = [f"{n}x{k}" for n, k in LINEAR_SHAPES]


@pytest.mark.parametrize("shape", LINEAR_SHAPES, ids=LINEAR_IDS)
def test_linear_rows_do_not_depend_on_their_number(shape) -> None:
    """Bit for bit over 1..2048 rows, at both ends of the batch: across tiles, across the Triton
    kernel and cuBLASLt, and with float32 output, as the head has it (P3)."""
    x, weight = randn(2048, shape[1]), randn(shape[0], shape[1], seed=1) / shape[1] ** 0.5
    for out_dtype in (None, torch.float32):
        every_row = linear(x, weight, out_dtype=out_dtype)
        for count in ROW_COUNTS:
            for rows in (slice(0, count), slice(2048 - count, 2048)):
                result = linear(x[rows], weight, out_dtype=out_dtype)
                assert torch.equal(result, every_row[rows]), (count, rows, out_dtype)


def test_head_rows_do_not_depend_on_their_number() -> None:
    """As above for a vocabulary of 128,256, whose logits would need much memory at 2048 rows."""
    x, weight = randn(512, 2048), randn(128_256, 2048, seed=1) / 45
    every_row = linear(x, weight, out_dtype=torch.float32)
    every_id, _ = argmax(every_row)
    for count in [count for count in ROW_COUNTS if count <= 512]:
        assert torch.equal(linear(x[:count], weight, out_dtype=torch.float32), every_row[:count])
        assert torch.equal(linear_argmax(x[:count], weight)[0], every_id[:count])


def test_float32_rows_do_not_depend_on_their_number() -> None:
    x, weight = randn(512, 576, dtype=torch.float32), randn(960, 576, dtype=torch.float32, seed=1)
    every_row = linear(x, weight)
    for count in (1, 2, 5, 16, 17, 33, 64, 65, 300):
        assert torch.equal(linear(x[:count], weight), every_row[:count])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "shape"), [(5, (960, 576)), (20, (333, 75)), (63, (4096, 1536))])
def test_linear_is_accurate(rows, shape, dtype) -> None:
    x, weight = randn(rows, shape[1], dtype=dtype), randn(*shape, dtype=dtype, seed=1)
    bias = randn(shape[0], dtype=dtype, seed=2)
    exact = x.double() @ weight.double().T
    # One sum in order: K additions, each off by up to 2^-23 of the sum so far, either way.
    in_order = shape[1] ** 0.5 * 2**-23
    if dtype == torch.float32:
        assert error(linear(x, weight), exact) < in_order
        assert error(linear(x, weight, bias), exact + bias.double()) < in_order
    else:
        assert_as_good(linear(x, weight), F.linear(x, weight), exact)
        own = F.linear(x, weight) + bias
        assert_as_good(linear(x, weight, bias), own, exact + bias.double())
    assert error(linear(x, weight, out_dtype=torch.float32), exact) < in_order


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_bits_do_not_depend_on_the_tile(rows) -> None:
    """What a tuning file may hold: the same sums."""
    x, weight = randn(rows, 2048), randn(4096, 2048, seed=1) / 45
    wanted = linear(x, weight, out_dtype=torch.float32)
    for block_n, block_k, stages, swap in (
        *((16, 64, 8, False), (32, 256, 4, False), (64, 128, 3, True)),
        *((128, 64, 3, False), (128, 64, 4, True), (64, 32, 2, False)),
    ):
        config = TileConfig(block_n=block_n, block_k=block_k, stages=stages, swap=swap)
        result = linear_triton.linear(x, weight, out_dtype=torch.float32, config=config)
        assert torch.equal(result, wanted), config
        gated = linear_triton.linear_silu_mul(x, weight, config=config)
        assert torch.equal(gated, silu_mul(wanted.to(x.dtype))), config
        ids, _ = argmax_triton.linear_argmax(x, weight, config=config)
        assert torch.equal(ids, argmax(wanted)[0]), config


@pytest.mark.parametrize(("head_size", "depth"), [(64, 576), (128, 1024)])
@pytest.mark.parametrize("rows", [1, 5, 20, 64, 65])
def test_the_fused_projection_equals_its_parts(rows, head_size, depth) -> None:
    x, weight = randn(rows, depth), randn(10 * head_size, depth, seed=1) / depth**0.5
    bias = randn(10 * head_size, seed=2)
    table = randn(1000, head_size, dtype=torch.float32, seed=3)
    positions = torch.randint(1000, (rows,), device="cuda")
    slots = torch.randperm(160, device="cuda")[:rows]
    slots[2::7] = -1
    shape = (11, 16, 2, head_size)
    for each in (bias, None):
        ours, parts = (
            [torch.full(shape, 7.0, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
            for _ in range(2)
        )
        args = (x, weight, each, table, positions)
        wanted = qkv_rope_write_kv_reference(*args, *parts, slots)
        assert torch.equal(qkv_rope_write_kv(*args, *ours, slots), wanted)
        swapped = TileConfig(block_n=64, block_k=256, stages=4, swap=True)
        # Four stages of 64 rows would not fit into shared memory.
        if rows <= 20:
            again = qkv_triton.qkv_rope_write_kv(*args, *ours, slots, config=swapped)
            assert torch.equal(again, wanted)
        for one, other in zip(ours, parts, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [1, 5, 20, 64, 65, 300])
def test_fused_linears_equal_their_parts(rows) -> None:
    """Bit for bit: the same sums, rounded at the same points."""
    x, residual = randn(rows, 576), randn(rows, 960, seed=1)
    weight, bias = randn(960, 576, seed=2) / 24, randn(960, seed=3)
    product = linear(x, weight)
    assert torch.equal(linear(x, weight, bias), product + bias)
    assert torch.equal(linear_add(x, weight, residual), residual + product)
    assert torch.equal(linear_silu_mul(x, weight), silu_mul(product))


def test_linear_argmax_equals_the_unfused_head() -> None:
    x, weight = randn(64, 576), randn(49_152, 576, seed=1) / 24
    weight[[17, 40_000]] = weight[300].clone()
    x[3] = 5 * weight[300]
    for rows in (1, 5, 20, 64):
        logits = linear(x[:rows], weight, out_dtype=torch.float32)
        for limit in (None, 49_000, 333):
            ids, finite = linear_argmax(x[:rows], weight, limit)
            assert torch.equal(ids, argmax(logits, limit)[0])
            assert torch.equal(ids, argmax_reference(logits.cpu(), limit)[0].cuda())
            assert finite.all()
    assert linear_argmax(x, weight)[0][3] == 17
    x[5, 7] = torch.nan
    for rows in (20, 64):
        assert linear_argmax(x[:rows], weight)[1].logical_not().nonzero().flatten().tolist() == [5]


def test_argmax_ties_limits_and_nan() -> None:
    logits = randn(6, 128_256, dtype=torch.float32)
    logits[1, [77, 128_000]] = 9.0
    logits[2] = -torch.inf
    logits[3, 50_000] = torch.nan
    logits[4] = -0.0
    logits[4, 300:] = 0.0
    for limit in (None, 100_000, 70):
        wanted = argmax_reference(logits.cpu(), limit)
        for one, other in zip(argmax(logits, limit), wanted, strict=True):
            assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [75, 128, 576, 2048, 4096, 8192])
def test_norms(size, dtype) -> None:
    x, residual = randn(333, size, dtype=dtype), randn(333, size, dtype=dtype, seed=1)
    weight = randn(size, dtype=dtype, seed=2)
    wide = x.double()
    scaled = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    every_row = rms_norm(x, weight, 1e-5)
    assert_as_good(every_row, rms_norm_reference(x, weight, 1e-5), scaled * weight.double())
    normed, new_residual = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, residual + x)
    assert torch.equal(normed, rms_norm(new_residual, weight, 1e-5))
    for count in (1, 2, 5, 63):
        assert torch.equal(rms_norm(x[:count], weight, 1e-5), every_row[:count])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(dtype) -> None:
    gate_up = 4 * randn(333, 2 * 1536, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = gate / (1 + torch.exp(-gate)) * up
    assert_as_good(silu_mul(gate_up), silu_mul_reference(gate_up), exact)


def fused_projection(head_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    rows = randn(63, 10 * head_size, dtype=dtype)
    parts = rows.split([6 * head_size, 2 * head_size, 2 * head_size], dim=1)
    return [part.unflatten(1, (-1, head_size)) for part in parts]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (128, 128), (80, 80), (96, 32)])
def test_rope_and_cache_writes(head_size, rotary_dim, dtype) -> None:
    """Rotation equals the plain one bit for bit, the fused kernel its parts, and padding rows
    leave the cache alone (C26)."""
    q, k, v = fused_projection(head_size, dtype)
    table = randn(1000, rotary_dim, dtype=torch.float32, seed=1)
    positions = torch.randint(1000, (63,), device="cuda")
    slots = torch.randperm(160, device="cuda")[:63]
    slots[::7] = -1
    weights = (randn(head_size, dtype=dtype, seed=2), randn(head_size, dtype=dtype, seed=3))
    rotated = apply_rope(q, k, table, positions)
    for one, other in zip(rotated, apply_rope_reference(q, k, table, positions), strict=True):
        assert torch.equal(one, other)

    def caches() -> list[torch.Tensor]:
        return [torch.full((11, 16, 2, head_size), 7.0, dtype=dtype, device="cuda") for _ in "kv"]

    for norm_weights in (None, weights):
        fused, parts = caches(), caches()
        q_fused = rope_write_kv(q, k, v, table, positions, *fused, slots, norm_weights, 1e-6)
        q_part, k_part = q, k
        if norm_weights is not None:
            q_part = rms_norm(q, norm_weights[0], 1e-6)
            k_part = rms_norm(k, norm_weights[1], 1e-6)
        q_part, k_part = apply_rope(q_part, k_part, table, positions)
        write_kv(k_part, v, *parts, slots)
        assert torch.equal(q_fused, q_part)
        for one, other in zip(fused, parts, strict=True):
            assert torch.equal(one, other)
        flat = parts[0].view(-1, 2, head_size)
        live = slots >= 0
        assert torch.equal(flat[slots[live]], k_part[live])
        untouched = torch.ones(len(flat), dtype=torch.bool, device="cuda")
        untouched[slots[live]] = False
        assert (flat[untouched] == 7.0).all()


def test_noise_has_the_same_integers_as_on_the_cpu() -> None:
    seeds, index = torch.tensor([1, -5, 2**63 - 1]), torch.tensor([[0, 1], [2, -1], [2**40, 7]])
    cuda = (seeds.cuda(), index.cuda())
    for stream in (0, 3):
        uniform = sampling.uniform_noise(*cuda, stream)
        assert torch.equal(uniform.cpu(), sampling.uniform_noise(seeds, index, stream))
        bits = sampling.random_bits(sampling.row_keys(*cuda, stream), 128_256)
        own = sampling.random_bits(sampling.row_keys(seeds, index, stream), 128_256)
        assert torch.equal(bits.cpu(), own)
        noise = sampling.gumbel_noise(*cuda, 128_256, stream)
        wanted = sampling.gumbel_noise(seeds, index, 128_256, stream)
        torch.testing.assert_close(noise.cpu(), wanted, rtol=1e-5, atol=1e-5)
        narrow = sampling.gumbel_noise(*cuda, 100, stream)
        assert torch.equal(narrow, noise[..., :100])


def captured(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """``step`` as a graph, with its output, after a run that compiles and warms up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def test_noise_in_a_graph_follows_its_counters() -> None:
    """2,000 replays draw 2,000 numbers, a seed set again repeats them, and two graphs in turn do
    not share draws (C32)."""
    seed = torch.tensor([7], device="cuda")
    index = torch.zeros(1, 1, dtype=torch.int64, device="cuda")

    def step() -> torch.Tensor:
        drawn = sampling.gumbel_noise(seed, index, 64, 0).argmax(-1)
        index.add_(1)
        return drawn

    (first, first_out), (second, second_out) = captured(step), captured(step)

    def replay(count: int, value: int, alternate: bool = False) -> list[int]:
        seed.fill_(value)
        index.zero_()
        drawn = []
        for turn in range(count):
            odd = alternate and turn % 2 == 1
            (second if odd else first).replay()
            drawn.append((second_out if odd else first_out).clone())
        return torch.cat(drawn).flatten().tolist()

    sevens = replay(2000, 7)
    counts = torch.bincount(torch.tensor(sevens), minlength=64).double()
    # The 1e-6 limit of a chi-square of 63 degrees.
    assert ((counts - 31.25).square() / 31.25).sum() < 132
    assert replay(2000, 7) == sevens
    assert replay(2000, 7, alternate=True) == sevens
    assert replay(2000, 8) != sevens


def test_a_layer_in_a_graph_equals_eager() -> None:
    """All kernels of a layer in one graph, replayed on new inputs: the bits of an eager run."""
    x = randn(5, 576)
    weights = [randn(*shape, seed=2) / 24 for shape in ((960, 576), (3072, 576), (576, 1536))]
    scale = randn(576, seed=3)
    table = randn(100, 64, dtype=torch.float32)
    positions = torch.arange(5, device="cuda")
    caches = [torch.zeros(3, 16, 3, 64, dtype=torch.bfloat16, device="cuda") for _ in "kv"]

    def step() -> torch.Tensor:
        normed, residual = add_rms_norm(x, x, scale, 1e-5)
        heads = linear(normed, weights[0]).view(5, 15, 64)
        parts = heads[:, :9], heads[:, 9:12], heads[:, 12:]
        q = rope_write_kv(*parts, table, positions, *caches, positions)
        normed, residual = add_rms_norm(q.reshape(5, 576), residual, scale, 1e-5)
        hidden = linear_add(linear_silu_mul(normed, weights[1]), weights[2], residual)
        ids, _ = linear_argmax(rms_norm(hidden, scale, 1e-5), weights[0])
        return ids + hidden.float().sum()

    graph, out = captured(step)
    for seed in range(3):
        x.copy_(randn(5, 576, seed=10 + seed))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, step())
