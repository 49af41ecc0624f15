"""The fused projection to rotated queries and cached keys and values, against its parts."""

import pytest
import torch

from specdec.kernels import qkv, qkv_triton
from specdec.kernels.tuning import TileConfig


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("head_size", "block_n", "swap"), [(16, 32, False), (64, 32, False), (128, 64, True)]
)
def test_fused_projection(head_size, block_n, swap, with_bias) -> None:
    x, weight = randn(7, 75), randn(10 * head_size, 75, seed=1)
    bias = randn(10 * head_size, seed=2) if with_bias else None
    table, positions = randn(50, head_size, seed=3), torch.tensor([0, 49, 3, 3, 17, 0, 1])
    slots = torch.tensor([3, -1, 0, 19, -1, 7, 8])
    ours, theirs = ([torch.full((6, 4, 2, head_size), 7.0) for _ in "kv"] for _ in range(2))
    config = TileConfig(block_n=block_n, block_k=32, stages=2, swap=swap)
    args = (x, weight, bias, table, positions)
    q = qkv_triton.qkv_rope_write_kv(*args, *ours, slots, config=config)
    wanted = qkv.qkv_rope_write_kv_reference(*args, *theirs, slots)
    torch.testing.assert_close(q, wanted, rtol=1e-5, atol=1e-4)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one[:-1], other[:-1], rtol=1e-5, atol=1e-4)
        assert (one[-1] == 7.0).all()
