"""Mixture of experts, and layers of each head, against their plain-PyTorch twins."""

import pytest
import torch

from specdec.kernels import head_linear, head_linear_triton, moe, moe_triton
from specdec.kernels.tuning import TileConfig

# E, k, sigmoid with a bias, normalize, scale, groups, groups that may win.
ROUTINGS = [
    (8, 2, False, True, 1.0, 1, 1),
    (60, 4, False, False, 1.0, 1, 1),
    (40, 6, False, False, 2.5, 8, 3),
    (64, 8, True, True, 2.5, 8, 4),
    (6, 6, True, False, 1.0, 1, 1),
]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def route_both(logits, bias, *settings):
    ours = moe_triton.route_experts(logits, bias, *settings)
    return ours, moe.route_experts_reference(logits, bias, *settings)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_routes(routing) -> None:
    num_experts, top_k, sigmoid, *rest = routing
    bias = randn(num_experts, seed=1) if sigmoid else None
    (ids, weights), (own_ids, own) = route_both(randn(7, num_experts), bias, top_k, sigmoid, *rest)
    assert torch.equal(ids, own_ids)
    torch.testing.assert_close(weights, own, rtol=1e-5, atol=1e-6)


def test_of_equal_scores_the_lowest_ids_win() -> None:
    logits = torch.zeros(3, 12)
    logits[1, [3, 7, 9]] = 1.0
    logits[2] = torch.nan
    for groups in ((1, 1), (4, 2)):
        (ids, weights), (own_ids, _) = route_both(logits, None, 4, False, True, 1.0, *groups)
        assert torch.equal(ids, own_ids)
        assert ids[0].tolist() == ids[2].tolist() == [0, 1, 2, 3]
        assert ids[1].tolist() == ([3, 7, 9, 0] if groups[0] == 1 else [3, 7, 4, 5])
        assert weights[:2].isfinite().all()
        assert weights[2].isnan().all()


@pytest.mark.parametrize("config", [None, TileConfig(block_n=64, block_k=16, stages=2, swap=True)])
@pytest.mark.parametrize(("rows", "depth", "width"), [(1, 64, 48), (20, 75, 33), (5, 32, 63)])
def test_applies_experts(rows, depth, width, config) -> None:
    num_experts, top_k = 5, 3
    x, weights = randn(rows, depth), randn(rows, top_k, seed=1)
    gate_up = randn(num_experts, 2 * width, depth, seed=2) / depth**0.5
    down = randn(num_experts, depth, width, seed=3) / width**0.5
    experts = randn(rows, num_experts, seed=4).topk(top_k).indices.int()
    experts[experts == 2] = 4  # one expert without rows, one with many
    result = moe_triton.apply_experts(x, gate_up, down, experts, weights, config=config)
    own = moe.apply_experts_reference(x, gate_up, down, experts, weights)
    torch.testing.assert_close(result, own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "depth", "features"), [(1, 64, 48), (20, 75, 133), (5, 12, 24)])
def test_head_linear(rows, depth, features, transposed) -> None:
    """Inputs that are a part of wider heads, weights in either order."""
    x = randn(rows, 3, depth + 8)[..., :depth]
    weight = randn(3, features, depth, seed=1).transpose(1, 2)
    weight = weight if transposed else weight.contiguous()
    result = head_linear_triton.head_linear(x, weight)
    torch.testing.assert_close(
        result, head_linear.head_linear_reference(x, weight), rtol=1e-5, atol=1e-4
    )
