"""From hidden states to rotated queries, and to keys and values in the paged cache.

Shape letters: T token rows, K input features, H query heads, G key/value heads, D head size,
P positions of the table.
"""

import torch
from torch import Tensor

from specdec.kernels.linear import linear
from specdec.kernels.norm import rms_norm_reference
from specdec.kernels.ready_linear import Norm
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
    norm: Norm | None = None,
) -> Tensor:
    """``linear`` to queries, keys and values, then ``rope_write_kv``: the same bits in one kernel.

    x [T, K]; weight [(H + 2 G) * D, K], query heads first, then keys, then values; bias of as many
    features or None; the others as in ``rope_write_kv``. ``norm``: x is normed first; only where
    ``ready_linear.is_ready`` and ``is_fused``. Returns the rotated queries [T, H, D].
    """
    arguments = (x, weight, bias, cos_sin, positions, key_cache, value_cache, slot_mapping)
    if norm is not None and x.is_cuda:
        from specdec.kernels.ready_linear_triton import QKV, ready_qkv

        return ready_qkv(*arguments, norm=norm, config=QKV)
    if is_fused(x, cos_sin, key_cache):
        from specdec.kernels import qkv_triton

        return qkv_triton.qkv_rope_write_kv(*arguments)
    if norm is not None:
        arguments = (rms_norm_reference(x, *norm), *arguments[1:])
    return qkv_rope_write_kv_reference(*arguments)


def is_fused(x: Tensor, cos_sin: Tensor, key_cache: Tensor) -> bool:
    """Whether one kernel does it all: few rows, heads rotated whole and cut into whole tiles."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    from specdec.kernels import qkv_triton

    return qkv_triton.is_fused(x, cos_sin, key_cache)
