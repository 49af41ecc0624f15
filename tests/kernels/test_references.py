"""The plain-PyTorch twins, against formulas written out in float64."""

import math

import pytest
import torch

from specdec.kernels.activation import silu_mul
from specdec.kernels.argmax import argmax
from specdec.kernels.kv_cache import write_kv
from specdec.kernels.linear import linear, linear_add, linear_argmax, linear_silu_mul
from specdec.kernels.norm import add_rms_norm, rms_norm
from specdec.kernels.rope import apply_rope, rope_write_kv


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("rows", "depth", "features"), [(1, 63, 75), (5, 333, 64)])
def test_linear(rows, depth, features) -> None:
    x, weight, bias = randn(rows, depth), randn(features, depth, seed=1), randn(features, seed=2)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(linear(x, weight).double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        linear(x, weight, bias).double(), exact + bias.double(), rtol=1e-5, atol=1e-4
    )


def test_linear_rounds_the_product_before_the_bias() -> None:
    x, weight = randn(5, 64, dtype=torch.bfloat16), randn(75, 64, seed=1, dtype=torch.bfloat16)
    bias = 100 * randn(75, seed=2, dtype=torch.bfloat16)
    assert torch.equal(linear(x, weight, bias), linear(x, weight) + bias)


def test_float32_output_is_not_rounded_to_the_input_dtype() -> None:
    x, weight = randn(5, 64, dtype=torch.bfloat16), randn(75, 64, seed=1, dtype=torch.bfloat16)
    logits = linear(x, weight, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(
        logits.double(), x.double() @ weight.double().T, rtol=1e-6, atol=1e-5
    )
    assert not torch.equal(logits, logits.bfloat16().float())


def test_fused_linears_round_where_the_separate_ones_do() -> None:
    x, weight = randn(5, 64, dtype=torch.bfloat16), randn(150, 64, seed=1, dtype=torch.bfloat16)
    residual = randn(5, 150, seed=2, dtype=torch.bfloat16)
    assert torch.equal(linear_add(x, weight, residual), residual + linear(x, weight))
    assert torch.equal(linear_silu_mul(x, weight), silu_mul(linear(x, weight)))


def test_linear_argmax_is_the_argmax_of_float32_logits() -> None:
    x, weight = randn(5, 64, dtype=torch.bfloat16), randn(333, 64, seed=1, dtype=torch.bfloat16)
    weight[300:] *= 100
    logits = linear(x, weight, out_dtype=torch.float32)
    assert torch.equal(linear_argmax(x, weight)[0], logits.argmax(-1))
    assert torch.equal(linear_argmax(x, weight, limit=300)[0], logits[:, :300].argmax(-1))


def test_argmax_ties_limits_and_nan() -> None:
    logits = torch.zeros(5, 333)
    logits[1, [7, 200]] = 3.0
    logits[2, 320] = 5.0
    logits[3, 63] = torch.nan
    logits[4] = -torch.inf
    ids, finite = argmax(logits)
    assert ids.tolist() == [0, 7, 320, 63, 0]
    assert finite.tolist() == [True, True, True, False, False]
    logits[0, 301] = torch.inf
    ids, finite = argmax(logits, limit=300)
    assert ids.tolist() == [0, 7, 0, 63, 0]
    assert finite.tolist() == [True, True, True, False, False]
    assert argmax(logits)[1].tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype) -> None:
    x, weight = randn(63, 75, dtype=dtype), randn(75, seed=1, dtype=dtype)
    wide = x.double()
    exact = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    result = rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


def test_rms_norm_of_heads_in_a_wider_row() -> None:
    heads = randn(5, 300)[:, 20:270].unflatten(1, (10, 25))
    weight = randn(25, seed=1)
    assert torch.equal(rms_norm(heads, weight, 1e-6), rms_norm(heads.contiguous(), weight, 1e-6))


def test_add_rms_norm_rounds_the_sum_first() -> None:
    x, residual = (randn(5, 64, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    weight, before = randn(64, seed=2, dtype=torch.bfloat16), residual.clone()
    normed, new_residual = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-5))
    assert torch.equal(residual, before)


def rope_table(num_positions: int, rotary_dim: int) -> torch.Tensor:
    frequencies = 1e4 ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = torch.arange(num_positions).double()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (80, 80), (80, 32)])
def test_rope_rotates_pairs_by_the_position(head_size, rotary_dim) -> None:
    q, k = randn(7, 6, head_size), randn(7, 2, head_size, seed=1)
    positions = torch.tensor([0, 1, 2, 99, 50, 50, 3])
    half = rotary_dim // 2
    angles = positions.double()[:, None] * 1e4 ** -(torch.arange(half).double() / half)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    for x, result in zip(
        (q, k), apply_rope(q, k, rope_table(100, rotary_dim), positions), strict=True
    ):
        pairs = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double()) * turn
        exact = torch.cat([pairs.real, pairs.imag, x[..., rotary_dim:].double()], dim=-1)
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)


def test_write_kv_touches_only_its_slots() -> None:
    """Slot -1 must not wrap to the last slot of the pool, here owned by another row (C26)."""
    caches = [torch.full((5, 4, 2, 16), 7.0) for _ in range(2)]
    key, value = randn(6, 2, 16), randn(6, 2, 16, seed=1)
    slots = torch.tensor([15, -1, 0, -1, 6, -1])
    write_kv(key, value, *caches, slots)
    for rows, cache in zip((key, value), caches, strict=True):
        pool = cache[:-1].view(16, 2, 16)
        assert torch.equal(pool[[15, 0, 6]], rows[[0, 2, 4]])
        untouched = [slot for slot in range(16) if slot not in (15, 0, 6)]
        assert (pool[untouched] == 7.0).all()


@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_write_kv_is_its_parts(with_norm) -> None:
    q, k, v = randn(4, 6, 16), randn(4, 2, 16, seed=1), randn(4, 2, 16, seed=2)
    weights = (randn(16, seed=3), randn(16, seed=4)) if with_norm else None
    positions, slots = torch.tensor([3, 4, 5, 0]), torch.tensor([3, 4, 5, -1])
    table = rope_table(10, 16)
    fused = [torch.zeros(3, 4, 2, 16) for _ in range(2)]
    q_fused = rope_write_kv(q, k, v, table, positions, *fused, slots, weights, 1e-6)
    if weights is not None:
        q, k = rms_norm(q, weights[0], 1e-6), rms_norm(k, weights[1], 1e-6)
    q, k = apply_rope(q, k, table, positions)
    parts = [torch.zeros(3, 4, 2, 16) for _ in range(2)]
    write_kv(k, v, *parts, slots)
    assert torch.equal(q_fused, q)
    for one, other in zip(fused, parts, strict=True):
        assert torch.equal(one[:-1], other[:-1])


def test_silu_mul() -> None:
    gate_up = randn(63, 150)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(silu_mul(gate_up).double(), exact, rtol=1e-5, atol=1e-6)
    extremes = torch.tensor([[-1e4, 1e4, 2.0, 2.0]])
    assert silu_mul(extremes).tolist() == [[0.0, 2e4]]
    assert math.isfinite(silu_mul(extremes.bfloat16()).sum().item())
