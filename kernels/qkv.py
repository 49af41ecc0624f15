"""From hidden states to rotated queries, and to keys and values in the paged cache.

Shape letters: T token rows, K input features, H query heads, G key/value heads, D head size,
P positions of the table.
"""

import torch
from torch import Tensor

from specdec.kernels.linear import linear
from specdec.kernels.rope import rope_write_kv


def qkv_rope_write_kv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """``qkv_rope_write_kv`` by its parts."""
    num_kv_heads, head_size = key_cache.shape[2:]
    heads = linear(x, weight, bias).unflatten(-1, (-1, head_size))  # [T, H + 2 G, D]
    sizes = (heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads)
    q, k, v = heads.split(sizes, dim=1)
    return rope_write_kv(q, k, v, cos_sin, positions, key_cache, value_cache, slot_mapping)


def qkv_rope_write_kv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """``linear`` to queries, keys and values, then ``rope_write_kv``: the same bits in one kernel.

    x [T, K]; weight [(H + 2 G) * D, K], query heads first, then keys, then values; bias of as many
    features or None; the others as in ``rope_write_kv``. Returns the rotated queries [T, H, D].
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        from specdec.kernels import qkv_triton

        if qkv_triton.is_fused(x, weight, cos_sin, key_cache):
            return qkv_triton.qkv_rope_write_kv(
                x, weight, bias, cos_sin, positions, key_cache, value_cache, slot_mapping
            )
    return qkv_rope_write_kv_reference(
        x, weight, bias, cos_sin, positions, key_cache, value_cache, slot_mapping
    )
