"""Triton side of ``specdec.kernels.qkv``: rotation and cache writes in a linear layer's last stage.

Shape letters: T token rows, K input features, N output features, H query heads, G key/value heads,
D head size, P positions of the table.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import wait_for_inputs
from specdec.kernels.linear_triton import (
    MAX_SKINNY_ROWS,
    accumulate,
    tile_arguments,
    unit_stride,
)
from specdec.kernels.rope_triton import rotate
from specdec.kernels.tuning import TileConfig


@triton.jit
def load_turns(
    cos_sin,
    positions,
    slot_mapping,
    rows,
    row_mask,
    first,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Cosines and sines [rows, PAIRS] from pair ``first`` of a head on, and slots [rows]."""
    slots = tl.load(slot_mapping + rows, mask=row_mask, other=-1)
    position = tl.load(positions + rows, mask=row_mask, other=0)
    table = cos_sin + position[:, None] * D + (first + tl.arange(0, PAIRS))[None, :]
    cos = tl.load(table, mask=row_mask[:, None], other=1.0)
    sin = tl.load(table + D // 2, mask=row_mask[:, None], other=0.0)
    return cos, sin, slots


@triton.jit
def store_heads(
    acc,  # [BLOCK_M, 2 * PAIRS] float32, the features of a pair side by side
    bias,
    cos,  # [BLOCK_M, PAIRS]
    sin,
    slots,  # [BLOCK_M]
    q_out,
    key_cache,
    value_cache,
    rows,
    row_mask,
    columns,
    head,  # query heads first, then keys, then values
    first,  # of the PAIRS rotary pairs of the head
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Round, add the bias, rotate, and write to the queries or to the slots of the cache."""
    HALF: tl.constexpr = D // 2
    dtype: tl.constexpr = q_out.dtype.element_ty
    product = acc.to(dtype)
    if HAS_BIAS:
        added = tl.load(bias + columns)
        product = (product.to(tl.float32) + added.to(tl.float32)[None, :]).to(dtype)
    one, other = tl.split(product.reshape(BLOCK_M, PAIRS, 2))

    features = first + tl.arange(0, PAIRS)
    mask = (row_mask & ((head < NUM_HEADS) | (slots >= 0)))[:, None]
    if head < NUM_HEADS + NUM_KV_HEADS:
        turned, turned_other = rotate(one.to(tl.float32), other.to(tl.float32), cos, sin)
        one, other = turned.to(dtype), turned_other.to(dtype)
    else:
        # A NaN here comes of a NaN in x, which makes NaN of the key too (see ``write_kv``).
        one = tl.where(one != one, 0.0, one)
        other = tl.where(other != other, 0.0, other)
    if head < NUM_HEADS:
        target = q_out + (rows.to(tl.int64) * NUM_HEADS + head)[:, None] * D + features[None, :]
        tl.store(target, one, mask=mask)
        tl.store(target + HALF, other, mask=mask)
    else:
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        offsets = (slots * NUM_KV_HEADS + kv_head)[:, None] * D + features[None, :]
        if head < NUM_HEADS + NUM_KV_HEADS:
            tl.store(key_cache + offsets, one, mask=mask)
            tl.store(key_cache + offsets + HALF, other, mask=mask)
        else:
            tl.store(value_cache + offsets, one, mask=mask)
            tl.store(value_cache + offsets + HALF, other, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _qkv_kernel(
    x,  # [T, K], rows x_stride apart
    weight,  # [N, K]
    bias,  # [N], or anything without HAS_BIAS
    cos_sin,  # [P, D] float32: cosines, then sines
    positions,  # [T] int64
    slot_mapping,  # [T] int64
    q_out,  # [T, H, D]
    key_cache,  # slots of [G, D]
    value_cache,
    num_rows,
    N,
    K,
    x_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N / 2 rotary pairs of one head."""
    HALF: tl.constexpr = D // 2
    PAIRS: tl.constexpr = BLOCK_N // 2
    tiles = (num_rows + BLOCK_M - 1) // BLOCK_M
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tl.program_id(0) // tiles
    head = tile // (HALF // PAIRS)
    first = tile % (HALF // PAIRS) * PAIRS
    # The two features of a pair take turns, so that they lie side by side in the sums.
    turns = tl.arange(0, BLOCK_N)
    columns = head * D + first + turns // 2 + turns % 2 * HALF
    row_mask = rows < num_rows
    wait_for_inputs(PDL)
    acc = accumulate(
        x,
        weight,
        rows,
        columns,
        row_mask,
        columns < N,
        K,
        x_stride,
        BLOCK_K,
        EVEN_K,
        STAGES,
        SWAP,
        PRECISION,
    )
    cos, sin, slots = load_turns(cos_sin, positions, slot_mapping, rows, row_mask, first, D, PAIRS)
    store_heads(
        acc, bias, cos, sin, slots, q_out, key_cache, value_cache, rows, row_mask,
        columns, head, first, NUM_HEADS, NUM_KV_HEADS, D, HAS_BIAS, BLOCK_M, PAIRS,
    )  # fmt: skip


def is_fused(x: Tensor, cos_sin: Tensor, key_cache: Tensor) -> bool:
    """Whether the kernel covers these: few rows, heads rotated whole and cut into whole tiles."""
    head_size = key_cache.shape[3]
    return (
        x.shape[0] <= MAX_SKINNY_ROWS
        and cos_sin.shape[1] == head_size
        and head_size & (head_size - 1) == 0
    )


def qkv_rope_write_kv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    config: TileConfig | None = None,
) -> Tensor:
    """``specdec.kernels.qkv.qkv_rope_write_kv``. Both caches are contiguous."""
    x = unit_stride(x)
    num_rows, depth = x.shape
    num_features = weight.shape[0]
    num_kv_heads, head_size = key_cache.shape[2:]
    num_heads = num_features // head_size - 2 * num_kv_heads
    q_out = torch.empty(num_rows, num_heads, head_size, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return q_out
    tiles = tile_arguments(x, num_features, depth, config)
    tiles["BLOCK_N"] = min(tiles["BLOCK_N"], head_size)
    grid = (triton.cdiv(num_rows, tiles["BLOCK_M"]) * (num_features // tiles["BLOCK_N"]),)
    _qkv_kernel[grid](
        x,
        weight,
        bias if bias is not None else weight,
        cos_sin,
        positions,
        slot_mapping,
        q_out,
        key_cache,
        value_cache,
        num_rows,
        num_features,
        depth,
        x.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        D=head_size,
        HAS_BIAS=bias is not None,
        **tiles,
    )
    return q_out
