"""Kernels that work row by row, against their plain-PyTorch twins."""

import pytest
import torch

from specdec.kernels import (
    activation,
    activation_triton,
    argmax,
    argmax_triton,
    distill,
    distill_triton,
    kv_cache,
    kv_cache_triton,
    norm,
    norm_triton,
    rope,
    rope_triton,
    sampling,
    sampling_triton,
)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(result: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(result, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("size", [63, 75, 333, 2048])
def test_norms(size, unit_offset) -> None:
    x, residual, weight = randn(5, size), randn(5, size, seed=1), randn(size, seed=2)
    settings = (weight, 1e-5, unit_offset)
    close(norm_triton.rms_norm(x, *settings), norm.rms_norm_reference(x, *settings))
    normed, new_residual = norm_triton.add_rms_norm(x, residual, *settings)
    wanted, wanted_residual = norm.add_rms_norm_reference(x, residual, *settings)
    close(normed, wanted)
    assert torch.equal(new_residual, wanted_residual)


def test_norm_of_heads_in_a_wider_row() -> None:
    heads, weight = randn(5, 700)[:, 60:540].unflatten(1, (6, 80)), randn(80, seed=1)
    close(norm_triton.rms_norm(heads, weight, 1e-5), norm.rms_norm_reference(heads, weight, 1e-5))


@pytest.mark.parametrize("width", [63, 75, 2333])
def test_gated_activations(width) -> None:
    gate_up = 5 * randn(5, 2 * width)
    close(activation_triton.silu_mul(gate_up), activation.silu_mul_reference(gate_up))
    wanted = activation.gelu_tanh_mul_reference(gate_up)
    # PyTorch adds 1 to a tanh near -1, which costs it digits.
    torch.testing.assert_close(
        activation_triton.gelu_tanh_mul(gate_up), wanted, rtol=2e-6, atol=5e-6
    )


def fused_projection(head_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of 7 rows as slices of one projection, 6 and 2 heads."""
    rows = randn(7, 10 * head_size)
    parts = rows.split([6 * head_size, 2 * head_size, 2 * head_size], dim=1)
    q, k, v = (part.unflatten(1, (-1, head_size)) for part in parts)
    return q, k, v


POSITIONS = torch.tensor([0, 49, 3, 3, 17, 0, 1])
SLOTS = torch.tensor([3, -1, 0, 19, -1, 7, 8])


def caches(head_size: int) -> list[torch.Tensor]:
    return [torch.full((6, 4, 2, head_size), 7.0) for _ in range(2)]


@pytest.mark.parametrize(("head_size", "rotary_dim"), [(16, 16), (64, 64), (80, 80), (80, 32)])
def test_rope(head_size, rotary_dim) -> None:
    q, k, _ = fused_projection(head_size)
    table = randn(50, rotary_dim, seed=1)
    results = rope_triton.apply_rope(q, k, table, POSITIONS)
    wanted = rope.apply_rope_reference(q, k, table, POSITIONS)
    for one, other in zip(results, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (80, 32)])
def test_rope_write_kv(head_size, rotary_dim, with_norm) -> None:
    q, k, v = fused_projection(head_size)
    table = randn(50, rotary_dim, seed=1)
    weights = (randn(head_size, seed=2), randn(head_size, seed=3)) if with_norm else None
    ours, theirs = caches(head_size), caches(head_size)
    args = (q, k, v, table, POSITIONS)
    result = rope_triton.rope_write_kv(*args, *ours, SLOTS, weights, 1e-6)
    close(result, rope.rope_write_kv_reference(*args, *theirs, SLOTS, weights, 1e-6))
    for one, other in zip(ours, theirs, strict=True):
        close(one[:-1], other[:-1])
        assert (one[-1] == 7.0).all()


def test_write_kv_touches_only_its_slots() -> None:
    _, k, v = fused_projection(80)
    ours, theirs = caches(80), caches(80)
    kv_cache_triton.write_kv(k, v, *ours, SLOTS)
    kv_cache.write_kv_reference(k, v, *theirs, SLOTS)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one[:-1], other[:-1])
        assert (one[-1] == 7.0).all()


def test_argmax() -> None:
    logits = randn(6, 9333)
    logits[1, [77, 8100]] = 9.0
    logits[2] = -torch.inf
    logits[3, 5000] = torch.nan
    logits[4] = -0.0
    logits[4, 300:] = 0.0
    logits[5] -= 100.0
    logits[0, 69] = torch.inf
    for limit in (None, 9000, 70):
        wanted = argmax.argmax_reference(logits, limit)
        for one, other in zip(argmax_triton.argmax(logits, limit), wanted, strict=True):
            assert torch.equal(one, other)


def test_noise_has_the_same_integers() -> None:
    """Uniform noise is exact in float32, so equal noise means equal integers; and the logarithms
    of the Gumbel noise differ by rounding only."""
    seeds, index = torch.tensor([1, -5, 2**63 - 1]), torch.tensor([[0, 1], [2, -1], [2**40, 7]])
    for stream in (0, 3):
        result = sampling_triton.uniform_noise(seeds, index, stream)
        assert torch.equal(result, sampling.uniform_noise_reference(seeds, index, stream))
        noise = sampling_triton.gumbel_noise(seeds, index, 1500, stream)
        close(noise, sampling.gumbel_noise_reference(seeds, index, 1500, stream))


@pytest.mark.parametrize("with_rope", [False, True])
def test_values_that_are_not_finite_are_stored_as_nan_keys(with_rope) -> None:
    q, k, v = fused_projection(80)
    v = v.clone()
    v[0, 1, 70], v[3, 0, 5] = torch.nan, -torch.inf
    table = randn(50, 80, seed=1)
    ours, theirs = caches(80), caches(80)
    if with_rope:
        rope_triton.rope_write_kv(q, k, v, table, POSITIONS, *ours, SLOTS)
        rope.rope_write_kv_reference(q, k, v, table, POSITIONS, *theirs, SLOTS)
    else:
        kv_cache_triton.write_kv(k, v, *ours, SLOTS)
        kv_cache.write_kv_reference(k, v, *theirs, SLOTS)
    torch.testing.assert_close(ours[0][:-1], theirs[0][:-1], equal_nan=True)
    assert torch.equal(ours[1][:-1], theirs[1][:-1])
    keys = ours[0].view(-1, 2, 80)
    assert keys[3, 1].isnan().all() and keys[19, 0].isnan().all()
    assert keys[3, 0].isfinite().all() and ours[1].isfinite().all()


@pytest.mark.parametrize("vocab", [63, 4096, 9001])
def test_distilled_rows(vocab) -> None:
    """Rows of the target in another order and one of them twice; ties go to the lowest id."""
    logits, target_logits = 4 * randn(5, vocab), 4 * randn(7, vocab + 3, seed=1)[:, :vocab]
    logits[1, [40, 20, 60]] = 50.0
    target_logits[2, [30, 20]] = 40.0
    target_logits[6, 62] = -torch.inf
    rows = torch.tensor([6, 2, 0, 0, 3])
    grad = logits.clone()
    wanted = distill.distill_rows_reference(grad, target_logits, rows)
    loss, hits = distill_triton.distill_rows(logits, target_logits, rows)
    torch.testing.assert_close(loss, wanted[0], rtol=2e-6, atol=2e-6)
    assert torch.equal(hits, wanted[1]) and hits[1]
    close(logits, grad)
