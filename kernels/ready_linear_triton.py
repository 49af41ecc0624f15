"""Small linear layers whose weights are on hand before their inputs are.

Shape letters: T token rows, K input features, N output features.

A program reads all its weights, and those of a norm before the layer, while the kernel before it
still runs; then it waits, reads the whole rows, norms them and multiplies. Sums are those of
``linear_triton`` (along K in order), the norm's those of ``norm_triton``, so the bits are theirs.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.activation_triton import silu_product
from specdec.kernels.launch import pdl_options, reads_early, wait_for_inputs, wait_unless_early
from specdec.kernels.norm_triton import inverse_of_total, scale_row, sum_of_squares
from specdec.kernels.qkv_triton import load_turns, store_heads

# Most features of a piece. With a norm, as many as a warp reads of one row at once: the sum of a
# piece's squares then needs no other warp.
_PIECE, _NORM_PIECE = 512, 256


@triton.jit
def _as_they_lie(parts, PDL: tl.constexpr):
    """A tuple of tensors whose layouts the compiler does not change at their sources.

    Otherwise loads are turned into a product's operands one by one, each before the next is asked
    for; and a row is normed as an operand, of which every warp holds all rows.
    """
    if PDL:
        kept = ()
        for i in tl.static_range(len(parts)):
            part = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [parts[i]], dtype=parts[i].dtype, is_pure=False, pack=2
            )
            kept = kept + (part,)  # type: ignore[assignment]  # noqa: RUF005
        parts = kept
    return parts


@triton.jit
def _pairwise_sum(parts):
    """The sum of a tuple, neighbours first: the upper levels of ``sum_of_squares``."""
    for _ in tl.static_range(8):
        if len(parts) > 1:
            sums = ()
            for i in tl.static_range(0, len(parts), 2):
                if i + 1 < len(parts):
                    sums = sums + (parts[i] + parts[i + 1],)  # noqa: RUF005
                else:
                    sums = sums + (parts[i],)  # noqa: RUF005
            parts = sums
    return parts[0]


@triton.jit
def ready_product(
    x,  # [T, K], rows x_stride apart
    weight,  # [N, K]
    norm_weight,  # [K], or anything without HAS_NORM
    rows,
    columns,
    row_mask,
    column_mask,
    x_stride,
    eps,
    early,
    HAS_NORM: tl.constexpr,
    K: tl.constexpr,
    PIECE: tl.constexpr,  # divides K
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """``norm(x)[rows] @ weight[columns].T`` in float32. [rows, columns]"""
    PIECES: tl.constexpr = K // PIECE
    dtype: tl.constexpr = weight.dtype.element_ty
    wait_unless_early(early, PDL)
    depth = tl.arange(0, PIECE)
    weights = weight + columns[:, None].to(tl.int64) * K
    w = ()
    scales = ()
    for i in tl.static_range(PIECES):
        piece = i * PIECE + depth
        part = tl.load(weights + piece[None, :], mask=column_mask[:, None], other=0.0)
        w = w + (part,)  # type: ignore[assignment]  # noqa: RUF005
        if HAS_NORM:
            scales = scales + (tl.load(norm_weight + piece),)  # type: ignore[assignment]  # noqa: RUF005
    # A barrier, here and below: all loads are on their way before the first is waited for.
    tl.debug_barrier()
    w = _as_they_lie(w, PDL)
    wait_for_inputs(PDL)
    inputs = x + rows[:, None].to(tl.int64) * x_stride
    a = ()
    for i in tl.static_range(PIECES):
        piece = i * PIECE + depth
        part = tl.load(inputs + piece[None, :], mask=row_mask[:, None], other=0.0)
        a = a + (part,)  # type: ignore[assignment]  # noqa: RUF005
    tl.debug_barrier()
    if HAS_NORM:
        totals = ()
        for i in tl.static_range(len(a)):
            totals = totals + (sum_of_squares(a[i].to(tl.float32)),)  # type: ignore[assignment]  # noqa: RUF005
        inverse = inverse_of_total(_pairwise_sum(totals), eps, K)[:, None]
        normed = ()
        for i in tl.static_range(len(a)):
            part = scale_row(a[i].to(tl.float32), inverse, scales[i][None, :], dtype)
            normed = normed + (part,)  # type: ignore[assignment]  # noqa: RUF005
        a = normed
    a = _as_they_lie(a, PDL)
    acc = tl.zeros([columns.shape[0], rows.shape[0]], tl.float32)
    for i in tl.static_range(len(a)):
        acc = tl.dot(w[i], tl.trans(a[i]), acc, input_precision=PRECISION)
    return tl.trans(acc)


@triton.jit(do_not_specialize=["num_rows", "early"])
def _ready_linear_kernel(
    x,  # [T, K], rows x_stride apart
    weight,  # [N, K]; with SILU [2N, K], gate rows first
    norm_weight,  # [K], or anything without HAS_NORM
    residual,  # [T, N], or anything without HAS_RESIDUAL
    out,  # [T, N]
    num_rows,
    N,
    x_stride,
    eps,
    early,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SILU: tl.constexpr,
    K: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    dtype: tl.constexpr = out.dtype.element_ty
    rows = tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    first = tl.program_id(0) * OUTPUTS
    turns = tl.arange(0, BLOCK_N)
    if SILU:
        # Gate and up columns take turns, so that a pair lies side by side in the sums.
        pairs = first + turns // 2
        weight_rows = pairs + turns % 2 * N
        column_mask = pairs < N
    else:
        weight_rows = first + turns
        column_mask = weight_rows < N
    acc = ready_product(
        x, weight, norm_weight, rows, weight_rows, row_mask, column_mask, x_stride, eps, early,
        HAS_NORM, K, PIECE, PRECISION, PDL,
    )  # fmt: skip
    columns = first + tl.arange(0, OUTPUTS)
    offsets = rows[:, None].to(tl.int64) * N + columns[None, :]
    mask = row_mask[:, None] & (columns < N)[None, :]
    product = acc.to(dtype)
    if SILU:
        gate, up = tl.split(product.reshape(BLOCK_M, OUTPUTS, 2))
        product = silu_product(gate, up, dtype)
    if HAS_RESIDUAL:
        added = tl.load(residual + offsets, mask=mask, other=0.0)
        product = (product.to(tl.float32) + added.to(tl.float32)).to(dtype)
    tl.store(out + offsets, product, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "early"])
def _ready_qkv_kernel(
    x,  # [T, K], rows x_stride apart
    weight,  # [N, K]
    norm_weight,  # [K], or anything without HAS_NORM
    bias,  # [N], or anything without HAS_BIAS
    cos_sin,  # [P, D] float32: cosines, then sines
    positions,  # [T] int64
    slot_mapping,  # [T] int64
    q_out,  # [T, H, D]
    key_cache,  # slots of [G, D]
    value_cache,
    num_rows,
    x_stride,
    eps,
    early,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    K: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N / 2 rotary pairs of one head, as in ``qkv_triton``."""
    HALF: tl.constexpr = D // 2
    PAIRS: tl.constexpr = BLOCK_N // 2
    rows = tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    head = tl.program_id(0) // (HALF // PAIRS)
    first = tl.program_id(0) % (HALF // PAIRS) * PAIRS
    turns = tl.arange(0, BLOCK_N)
    columns = head * D + first + turns // 2 + turns % 2 * HALF
    # The kernel before this one writes the rows alone: positions and slots are older.
    wait_unless_early(early, PDL)
    cos, sin, slots = load_turns(cos_sin, positions, slot_mapping, rows, row_mask, first, D, PAIRS)
    acc = ready_product(
        x, weight, norm_weight, rows, columns, row_mask, turns < BLOCK_N, x_stride, eps, early,
        HAS_NORM, K, PIECE, PRECISION, PDL,
    )  # fmt: skip
    store_heads(
        acc, bias, cos, sin, slots, q_out, key_cache, value_cache, rows, row_mask,
        columns, head, first, NUM_HEADS, NUM_KV_HEADS, D, HAS_BIAS, BLOCK_M, PAIRS,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyConfig:
    """Weight rows of a program, and its warps. No bit of a result depends on it."""

    block_n: int
    num_warps: int = 4
    # Rows of a tile, at least; from 16 on, with block_n >= 64, the tensor cores' wide instruction.
    block_m: int = 8


# The fastest of SmolLM2's layers, which these kernels were measured on.
QKV = OUTPUT = ReadyConfig(block_n=16)
GATE_UP = ReadyConfig(block_n=32)


def piece_of_depth(depth: int, has_norm: bool) -> int:
    """Features that are read as one tensor: pieces of one layout, since changing it takes time."""
    return min(depth & -depth, _NORM_PIECE if has_norm else _PIECE)


def ready_arguments(x: Tensor, depth: int, has_norm: bool, config: ReadyConfig) -> dict[str, Any]:
    """Launch arguments that the kernels share; ``x`` has at most 16 rows."""
    piece = piece_of_depth(depth, has_norm)
    assert piece >= 16 and x.shape[0] <= 16, (x.shape, depth)
    return {
        "K": depth,
        "PIECE": piece,
        "BLOCK_M": 16 if x.shape[0] > 8 else config.block_m,
        "BLOCK_N": config.block_n,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": config.num_warps,
        "enable_fp_fusion": False,
        **pdl_options(x, lets_in=True),
    }


def ready_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    silu: bool = False,
    config: ReadyConfig,
) -> Tensor:
    """``linear``, ``linear_add`` or, with ``silu``, ``linear_silu_mul`` of x or of its norm.

    x [T, K], weight [N, K] ([2N, K] with ``silu``), residual [T, N] -> [T, N]; ``norm``: weight [K]
    and eps of ``rms_norm``.
    """
    num_rows, depth = x.shape
    num_features = weight.shape[0] // 2 if silu else weight.shape[0]
    out = torch.empty(num_rows, num_features, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    options = ready_arguments(x, depth, norm is not None, config)
    outputs = config.block_n // 2 if silu else config.block_n
    _ready_linear_kernel[(triton.cdiv(num_features, outputs),)](
        x,
        weight,
        norm[0] if norm is not None else weight,
        residual if residual is not None else x,
        out,
        num_rows,
        num_features,
        x.stride(0),
        norm[1] if norm is not None else 0.0,
        reads_early(x),
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        SILU=silu,
        **options,
    )
    return out


def ready_qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    config: ReadyConfig,
) -> Tensor:
    """``qkv_rope_write_kv`` of x or of its norm; arguments and result as there."""
    num_rows, depth = x.shape
    num_kv_heads, head_size = key_cache.shape[2:]
    num_heads = weight.shape[0] // head_size - 2 * num_kv_heads
    q_out = torch.empty(num_rows, num_heads, head_size, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return q_out
    options = ready_arguments(x, depth, norm is not None, config)
    options["BLOCK_N"] = min(config.block_n, head_size)
    _ready_qkv_kernel[(weight.shape[0] // options["BLOCK_N"],)](
        x,
        weight,
        norm[0] if norm is not None else weight,
        bias if bias is not None else weight,
        cos_sin,
        positions,
        slot_mapping,
        q_out,
        key_cache,
        value_cache,
        num_rows,
        x.stride(0),
        norm[1] if norm is not None else 0.0,
        reads_early(x),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        D=head_size,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        **options,
    )
    return q_out
