"""Triton side of ``specdec.kernels.rope``.

Shape letters: T rows, H query heads, G key/value heads, D head size, P positions of the table.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.kv_cache_triton import finite_or_zero, heads_together
from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.norm_triton import inverse_rms, row_warps, scale_row


@triton.jit
def rotate(first, second, cos, sin):
    """The rotated pair, in float32. Compiled without fused multiply-adds: each step rounds."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _rope_kernel(
    q,
    k,
    v,  # anything without WRITE
    q_weight,  # [D], or anything without NORM
    k_weight,  # [D], or anything without NORM
    cos_sin,  # [P, 2 * HALF] float32
    positions,  # [T] int64
    q_out,  # [T, H, D]
    k_out,  # [T, G, D], or the key cache with WRITE
    value_cache,  # anything without WRITE
    slot_mapping,  # [T] int64, or anything without WRITE
    q_stride,
    k_stride,
    v_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    WRITE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one row: query heads first, then keys, then (with WRITE) values."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    features = tl.arange(0, BLOCK)
    mask = features < D
    slot = row
    if WRITE:
        slot = tl.load(slot_mapping + row)
    if head >= NUM_HEADS + NUM_KV_HEADS:
        if slot >= 0:
            start = (head - NUM_HEADS - NUM_KV_HEADS) * D
            values = tl.load(v + row * v_stride + start + features, mask=mask, other=0.0)
            values, _ = finite_or_zero(values, mask)
            target = value_cache + slot * (NUM_KV_HEADS * D) + start
            tl.store(target + features, values, mask=mask)
        return

    is_query = head < NUM_HEADS
    if is_query:
        source = q + row * q_stride + head * D
        target = q_out + row * (NUM_HEADS * D) + head * D
        weight = q_weight
    else:
        source = k + row * k_stride + (head - NUM_HEADS) * D
        target = k_out + slot * (NUM_KV_HEADS * D) + (head - NUM_HEADS) * D
        weight = k_weight
    # The other half of a pair is HALF features away; features past 2 * HALF have none.
    is_first = features < HALF
    is_paired = features < 2 * HALF
    partner = tl.where(is_first, features + HALF, features - HALF)
    partner = tl.where(is_paired, partner, features)
    dtype: tl.constexpr = q_out.dtype.element_ty
    own = tl.load(source + features, mask=mask, other=0.0)
    other = tl.load(source + partner, mask=mask, other=0.0)
    if NORM:
        own_weight = tl.load(weight + features, mask=mask, other=0.0)
        other_weight = tl.load(weight + partner, mask=mask, other=0.0)
        inverse = inverse_rms(own.to(tl.float32), eps, D)
        own = scale_row(own.to(tl.float32), inverse, own_weight, dtype)
        other = scale_row(other.to(tl.float32), inverse, other_weight, dtype)
    position = tl.load(positions + row)
    table = cos_sin + position * (2 * HALF) + features % HALF
    cos = tl.load(table, mask=is_paired, other=1.0)
    sin = tl.load(table + HALF, mask=is_paired, other=0.0)
    first = tl.where(is_first, own, other).to(tl.float32)
    second = tl.where(is_first, other, own).to(tl.float32)
    rotated_first, rotated_second = rotate(first, second, cos, sin)
    rotated = tl.where(is_first, rotated_first, rotated_second).to(dtype)
    result = tl.where(is_paired, rotated, own)
    if WRITE:  # noqa: SIM102 (WRITE is known when the kernel is compiled)
        if not is_query:
            start = (head - NUM_HEADS) * D
            values = tl.load(v + row * v_stride + start + features, mask=mask, other=0.0)
            _, broken = finite_or_zero(values, mask)
            result = tl.where(broken > 0, float("nan"), result)
    if is_query or slot >= 0:
        tl.store(target + features, result, mask=mask)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    k_out: Tensor,
    value_cache: Tensor | None,
    slot_mapping: Tensor | None,
) -> Tensor:
    q, k = heads_together(q), heads_together(k)
    num_rows, num_heads, head_size = q.shape
    num_kv_heads = k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return q_out
    v = heads_together(v) if v is not None else k
    block = triton.next_power_of_2(head_size)
    num_programs = num_heads + num_kv_heads * (1 if slot_mapping is None else 2)
    q_weight, k_weight = weights if weights is not None else (q, k)
    _rope_kernel[(num_rows, num_programs)](
        q,
        k,
        v,
        q_weight,
        k_weight,
        cos_sin,
        positions,
        q_out,
        k_out,
        value_cache if value_cache is not None else k_out,
        slot_mapping if slot_mapping is not None else positions,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        D=head_size,
        HALF=cos_sin.shape[1] // 2,
        BLOCK=block,
        NORM=weights is not None,
        WRITE=slot_mapping is not None,
        num_warps=row_warps(block),
        enable_fp_fusion=False,
        **pdl_options(q),
    )
    return q_out


def apply_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """``specdec.kernels.rope.apply_rope``."""
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    q_out = _launch(q, k, None, None, 0.0, cos_sin, positions, k_out, None, None)
    return q_out, k_out


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
    """``specdec.kernels.rope.rope_write_kv``. Both caches are contiguous."""
    return _launch(
        q, k, v, norm_weights, eps, cos_sin, positions, key_cache, value_cache, slot_mapping
    )
