"""Skinny linear layers and what is fused into them, against their plain-PyTorch twins."""

import pytest
import torch

from specdec.kernels import argmax_triton, linear, linear_triton
from specdec.kernels.tuning import TileConfig

SHAPES = [(1, 64, 63), (5, 75, 333), (20, 333, 48)]
CONFIGS = [
    TileConfig(block_n=32, block_k=32, stages=3),
    TileConfig(block_n=64, block_k=64, stages=2, swap=True),
    None,
]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(result: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "swapped", "default"])
@pytest.mark.parametrize(("rows", "depth", "features"), SHAPES)
def test_linears(rows, depth, features, config) -> None:
    x, weight = randn(rows, depth), randn(features, depth, seed=1)
    bias, residual = randn(features, seed=2), randn(rows, features, seed=3)
    close(
        linear_triton.linear(x, weight, bias, config=config),
        linear.linear_reference(x, weight, bias),
    )
    close(
        linear_triton.linear(x, weight, residual=residual, config=config),
        linear.linear_add_reference(x, weight, residual),
    )
    pairs = randn(2 * features, depth, seed=4)
    torch.testing.assert_close(
        linear_triton.linear_silu_mul(x, pairs, config=config),
        linear.linear_silu_mul_reference(x, pairs),
        rtol=1e-4,
        atol=1e-3,
    )
    for limit in (None, 40):
        ids, finite = argmax_triton.linear_argmax(x, weight, limit, config=config)
        assert torch.equal(ids, linear.linear_argmax_reference(x, weight, limit)[0])
        assert finite.all()


def test_input_rows_may_lie_apart() -> None:
    wide, weight = randn(5, 200), randn(63, 64, seed=1)
    close(
        linear_triton.linear(wide[:, 7:71], weight), linear.linear_reference(wide[:, 7:71], weight)
    )


def test_equal_logits_give_the_lowest_id() -> None:
    weight = randn(64, 32, seed=1)
    weight[[9, 50]] = 10 * weight[3]
    x = weight[3:4].repeat(3, 1)
    assert argmax_triton.linear_argmax(x, weight)[0].tolist() == [9, 9, 9]
