"""Linear layers with their weights on hand: against the kernels they stand for."""

import pytest
import torch

from specdec.kernels import linear, norm, norm_triton, qkv
from specdec.kernels.ready_linear_triton import ReadyConfig, ready_linear, ready_qkv


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(result: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize(("depth", "features"), [(64, 40), (576, 48), (1536, 24)])
def test_linears(rows, depth, features) -> None:
    x, weight = randn(rows, depth), randn(features, depth, seed=1)
    scale, residual = randn(depth, seed=2), randn(rows, features, seed=3)
    config = ReadyConfig(block_n=16)
    normed = norm.rms_norm_reference(x, scale, 1e-5)
    close(ready_linear(x, weight, config=config), linear.linear_reference(x, weight))
    close(
        ready_linear(x, weight, residual=residual, config=config),
        linear.linear_add_reference(x, weight, residual),
    )
    close(
        ready_linear(x, weight, norm=(scale, 1e-5), silu=True, config=config),
        linear.linear_silu_mul_reference(normed, weight),
    )


@pytest.mark.parametrize("depth", [64, 576, 1280])
def test_the_norm_in_front_has_the_bits_of_the_norm_alone(depth) -> None:
    """A product with the identity gives the normed row back, as it is."""
    x, scale = randn(5, depth), randn(depth, seed=1)
    config = ReadyConfig(block_n=64)
    result = ready_linear(x, torch.eye(depth), norm=(scale, 1e-5), config=config)
    wanted = norm_triton.rms_norm(x, scale, 1e-5)
    assert torch.equal(result, wanted)
    alone = [
        ready_linear(row[None], torch.eye(depth), norm=(scale, 1e-5), config=config) for row in x
    ]
    assert torch.equal(torch.cat(alone), wanted)


@pytest.mark.parametrize("with_bias", [False, True])
def test_projection(with_bias) -> None:
    x, weight, scale = randn(7, 96), randn(10 * 32, 96, seed=1), randn(96, seed=4)
    bias = randn(10 * 32, seed=2) if with_bias else None
    table, positions = randn(50, 32, seed=3), torch.tensor([0, 49, 3, 3, 17, 0, 1])
    slots = torch.tensor([3, -1, 0, 19, -1, 7, 8])
    ours, theirs = ([torch.full((6, 4, 2, 32), 7.0) for _ in "kv"] for _ in range(2))
    rest = (weight, bias, table, positions)
    config = ReadyConfig(block_n=16)
    q = ready_qkv(x, *rest, *ours, slots, norm=(scale, 1e-5), config=config)
    normed = norm.rms_norm_reference(x, scale, 1e-5)
    close(q, qkv.qkv_rope_write_kv_reference(normed, *rest, *theirs, slots))
    for one, other in zip(ours, theirs, strict=True):
        close(one[:-1], other[:-1])
        assert (one[-1] == 7.0).all()
