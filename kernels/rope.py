"""Rotary position embedding, half-rotation (NeoX) layout.

Shape letters: T rows, H query heads, G key/value heads, D head size, P positions of the table.
"""

import torch
from torch import Tensor

from specdec.kernels.kv_cache import write_kv_reference
from specdec.kernels.norm import rms_norm_reference


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, *, D], cos and sin [T, 1, rotary_dim / 2]; features past rotary_dim pass unchanged."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    if 2 * half == x.shape[-1]:
        return rotated.to(x.dtype)
    return torch.cat([rotated.to(x.dtype), x[..., 2 * half :]], dim=-1)


def apply_rope_reference(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch twin of ``apply_rope``."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def apply_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions.

    q [T, H, D], k [T, G, D], cos_sin [P, rotary_dim] float32 (cosines, then sines), positions [T]
    int64 within the table -> (q, k) of the same shapes, new tensors. Computed in float32 and
    rounded once.
    """
    if q.is_cuda:
        from specdec.kernels import rope_triton

        return rope_triton.apply_rope(q, k, cos_sin, positions)
    return apply_rope_reference(q, k, cos_sin, positions)


def rope_write_kv_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    norm_weights: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Plain PyTorch twin of ``rope_write_kv``."""
    if norm_weights is not None:
        q = rms_norm_reference(q, norm_weights[0], eps)
        k = rms_norm_reference(k, norm_weights[1], eps)
    q, k = apply_rope_reference(q, k, cos_sin, positions)
    write_kv_reference(k, v, key_cache, value_cache, slot_mapping)
    return q


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    norm_weights: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """``apply_rope``, then ``write_kv`` of the rotated keys and the values. Returns q [T, H, D].

    ``norm_weights`` ([D] for queries, [D] for keys) norms each head first, as ``rms_norm`` does.
    """
    if q.is_cuda:
        from specdec.kernels import rope_triton

        return rope_triton.rope_write_kv(
            q,
            k,
            v,
            cos_sin,
            positions,
            key_cache,
            value_cache,
            slot_mapping,
            norm_weights,
            eps,
        )
    return rope_write_kv_reference(
        q, k, v, cos_sin, positions, key_cache, value_cache, slot_mapping, norm_weights, eps
    )
