"""Triton side of ``argmax`` and ``linear_argmax``. Shape letters: T rows, V vocabulary, K depth.

A logit and its id become one 64-bit integer whose order is that of the choice: first the logit (a
NaN above all numbers), then the lower id. A maximum of such integers is the same in any order, so
each program takes that of its part, and a second kernel that of the parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.argmax import NO_CHOICE
from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.linear_triton import (
    accumulate,
    is_skinny,
    linear,
    tile_arguments,
    unit_stride,
)
from specdec.kernels.tuning import TileConfig

_BLOCK = 4096


@triton.jit
def ranked(logits, ids):
    """float32 logits and their ids as int64, the better choice the larger."""
    # Equal numbers have equal bits: minus zero becomes zero.
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(logits != logits, 0x7FFFFFFF, order)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


# What ``ranked`` makes of infinity and minus infinity, in the upper half.
_INF = tl.constexpr(0x7F800000)
_MINUS_INF = tl.constexpr(-0x7F800001)


@triton.jit
def _argmax_kernel(
    logits, parts, limit, row_stride, num_parts, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * row_stride + ids, mask=ids < limit, other=float("-inf"))
    best = tl.max(ranked(values, ids), axis=0)
    tl.store(parts + row * num_parts + tl.program_id(1), best)


@triton.jit
def _best_part_kernel(parts, out, finite, num_parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], -(1 << 63), tl.int64)
    for start in range(0, num_parts, BLOCK):
        index = start + tl.arange(0, BLOCK)
        part = tl.load(parts + row * num_parts + index, mask=index < num_parts, other=-(1 << 63))
        best = tl.maximum(best, part)
    winner = tl.max(best, axis=0)
    tl.store(out + row, 0x7FFFFFFF - (winner & 0xFFFFFFFF))
    order = winner >> 32
    tl.store(finite + row, (order < _INF) & (order > _MINUS_INF))


@triton.jit(do_not_specialize=["num_rows", "limit", "num_parts"])
def _linear_argmax_kernel(
    x,  # [T, K], rows x_stride apart
    weight,  # [N, K]
    parts,  # [T, num_parts] int64
    num_rows,
    limit,
    num_parts,
    K,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles = (num_rows + BLOCK_M - 1) // BLOCK_M
    wait_for_inputs(PDL)
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(0) // tiles
    ids = part * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < num_rows
    acc = accumulate(
        x,
        weight,
        rows,
        ids,
        row_mask,
        ids < limit,
        K,
        x_stride,
        BLOCK_K,
        EVEN_K,
        STAGES,
        SWAP,
        PRECISION,
    )
    wide_ids = tl.broadcast_to(ids[None, :], [BLOCK_M, BLOCK_N])
    order = tl.where((ids < limit)[None, :], ranked(acc, wide_ids), -(1 << 63))
    tl.store(parts + rows.to(tl.int64) * num_parts + part, tl.max(order, axis=1), mask=row_mask)


def _best_part(parts: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, num_parts = parts.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=parts.device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=parts.device)
    if num_rows:
        block = min(2048, triton.next_power_of_2(num_parts))
        _best_part_kernel[(num_rows,)](
            parts, out, finite, num_parts, BLOCK=block, **pdl_options(parts)
        )
    return out, finite


def argmax(logits: Tensor, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """``specdec.kernels.argmax.argmax``."""
    return _best_part(_parts(logits, logits.shape[1] if limit is None else limit))


def best_part(logits: Tensor, limit: int, first: int) -> Tensor:
    """``specdec.kernels.argmax.best_part``."""
    return _with_first(_parts(logits, limit), first)


def best_of_parts(parts: Tensor) -> tuple[Tensor, Tensor]:
    """``specdec.kernels.argmax.best_of_parts``."""
    return _best_part(parts.t().contiguous())


def _with_first(parts: Tensor, first: int) -> Tensor:
    """The best of each row of ``parts``, its ids counted from ``first`` on."""
    if parts.shape[1] == 0:
        return torch.full(parts.shape[:1], NO_CHOICE, device=parts.device)
    return parts.amax(1) - first


def _parts(logits: Tensor, limit: int) -> Tensor:
    """The best choice in each run of a row's first ``limit`` ids, [T, num_parts] int64."""
    num_rows, vocab_size = logits.shape
    limit = min(limit, vocab_size)
    num_parts = triton.cdiv(limit, _BLOCK)
    parts = torch.empty(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    if parts.numel():
        _argmax_kernel[(num_rows, num_parts)](
            logits,
            parts,
            limit,
            logits.stride(0),
            num_parts,
            BLOCK=_BLOCK,
            **pdl_options(logits),
        )
    return parts


def linear_argmax(
    x: Tensor, weight: Tensor, limit: int | None = None, *, config: TileConfig | None = None
) -> tuple[Tensor, Tensor]:
    """``specdec.kernels.linear.linear_argmax``."""
    return _best_part(_linear_parts(x, weight, weight.shape[0] if limit is None else limit, config))


def linear_best_part(x: Tensor, weight: Tensor, limit: int, first: int) -> Tensor:
    """``specdec.kernels.linear.linear_best_part``."""
    return _with_first(_linear_parts(x, weight, limit, None), first)


def _linear_parts(x: Tensor, weight: Tensor, limit: int, config: TileConfig | None) -> Tensor:
    """``_parts`` of the logits of ``x``."""
    num_features, depth = weight.shape
    limit = min(limit, num_features)
    if config is None and not is_skinny(x, weight):
        return _parts(linear(x, weight, out_dtype=torch.float32), limit)
    x = unit_stride(x)
    num_rows = x.shape[0]
    tiles = tile_arguments(x, num_features, depth, config)
    num_parts = triton.cdiv(limit, tiles["BLOCK_N"])
    parts = torch.empty(num_rows, num_parts, dtype=torch.int64, device=x.device)
    if parts.numel():
        _linear_argmax_kernel[(triton.cdiv(num_rows, tiles["BLOCK_M"]) * num_parts,)](
            x, weight, parts, num_rows, limit, num_parts, depth, x.stride(0), **tiles
        )
    return parts
