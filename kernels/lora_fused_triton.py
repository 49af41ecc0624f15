"""A layer's product and its rows' deltas in one launch, for few rows.

Few rows leave most of the GPU's arithmetic idle while the weights stream in. The first programs of
the launch shrink, the others are the tiles of ``linear_triton``, added in the same order; when a
tile's sum is done it waits until all of the first are over (a counter), and adds its rows' deltas
to its rounded product. Programs start in the order of their numbers, so those that are waited for
run. With ``one_launch=False`` shrinking is a launch of its own, which the product's overlaps.

All slots of a batch are expanded at once: their ranks stand side by side, and a row is zero in
those of the others. A zero adds nothing, to the bit, as long as the weights are finite.

Shape letters as in ``lora_blocks``.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from specdec.kernels.activation_triton import silu_product
from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.linear_triton import (
    MAX_SKINNY_ROWS,
    accumulate,
    tile_arguments,
    unit_stride,
)
from specdec.kernels.lora_blocks import (
    fold_chunks,
    load_expanding,
    load_slots,
    prefetch_expanding,
    shrink_block,
    spread,
)

# Lanes of the product with the expanding weights: slots at once times rank.
_MAX_LANES = 128
# A wait that nothing ends gives a wrong result rather than a process that hangs.
MAX_POLLS = tl.constexpr(1 << 20)
_RUNTIME = ["num_rows", "num_shrink", "num_groups"]


@triton.jit
def _shrink_program(
    program,
    x,
    a_stack,
    slot_of_token,
    tile_slot,
    partial,
    num_rows,
    num_groups,
    K,
    x_stride,
    a_stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SHRINK_K: tl.constexpr,
    SHRINK_EVEN: tl.constexpr,
    SHRINK_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk = program % NUM_CHUNKS
    program //= NUM_CHUNKS
    group = program % num_groups
    program //= num_groups
    row_tiles = (num_rows + BLOCK_M - 1) // BLOCK_M
    slot = tl.load(tile_slot + group)
    if slot >= 0:
        rows = program % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        slots = tl.load(slot_of_token + rows, mask=rows < num_rows, other=-1).to(tl.int32)
        shrink_block(
            rows,
            slots == slot,
            slot,
            program // row_tiles,
            chunk,
            x,
            a_stack,
            partial,
            num_rows,
            K,
            x_stride,
            a_stride,
            WIDTH,
            CHUNK,
            BLOCK_W,
            SHRINK_K,
            SHRINK_EVEN,
            SHRINK_STAGES,
            PRECISION,
        )


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=["tile_slot"])
def _shrink_kernel(
    x,
    a_stack,
    slot_of_token,
    tile_slot,
    partial,
    num_rows,
    num_groups,
    K,
    x_stride,
    a_stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SHRINK_K: tl.constexpr,
    SHRINK_EVEN: tl.constexpr,
    SHRINK_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    # Inputs are there: what follows may read them too, and waits for the sums alone.
    if PDL:
        gdc_launch_dependents()
    _shrink_program(
        tl.program_id(0),
        x,
        a_stack,
        slot_of_token,
        tile_slot,
        partial,
        num_rows,
        num_groups,
        K,
        x_stride,
        a_stride,
        WIDTH,
        CHUNK,
        NUM_CHUNKS,
        BLOCK_M,
        BLOCK_W,
        SHRINK_K,
        SHRINK_EVEN,
        SHRINK_STAGES,
        PRECISION,
    )


@triton.jit
def _delta(
    shrunk,  # [rows, BLOCK_R]
    slots,  # [rows]
    b_stack,
    tile_slot,
    skip,
    num_groups,
    columns,
    column_mask,
    b_stride,
    dtype: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    J: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The rows' deltas, rounded to ``dtype``, as float32. [rows, columns]"""
    lanes = load_slots(tile_slot, skip, num_groups, BLOCK_R, J)
    b = load_expanding(b_stack, lanes, columns, column_mask, b_stride, RANK, BLOCK_R, J)
    wide = spread(shrunk, slots, lanes, BLOCK_R, J)
    delta = tl.dot(wide, tl.trans(b), input_precision=PRECISION)
    for first in range(skip + J, num_groups, J):
        if tl.load(tile_slot + first) >= 0:
            lanes = load_slots(tile_slot, first, num_groups, BLOCK_R, J)
            b = load_expanding(b_stack, lanes, columns, column_mask, b_stride, RANK, BLOCK_R, J)
            wide = spread(shrunk, slots, lanes, BLOCK_R, J)
            delta = tl.dot(wide, tl.trans(b), delta, input_precision=PRECISION)
    return delta.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=["tile_slot"])
def _lora_linear_kernel(
    x,  # [T, K], rows x_stride apart
    weight,  # [N, K]; with SILU gate rows first
    bias,  # [N], or anything without HAS_BIAS
    out,  # [T, N]; with SILU [T, N / 2]
    a_stack,  # [S, P * r, K], slots a_stride apart
    b_stack,  # [S, N, r], slots b_stride apart
    slot_of_token,  # [T]
    tile_slot,  # [G] int32: the slots of the batch, ascending, then -2
    partial,  # [C, T, P * r] float32
    counters,  # [2] int32, zero between launches
    num_shrink,  # programs that shrink
    num_groups,
    num_rows,
    N,
    K,
    x_stride,
    a_stride,
    b_stride,
    WIDTH_0,  # output features of the first two parts
    WIDTH_1,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ONE_LAUNCH: tl.constexpr,
    PREFETCH: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    J: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SHRINK_K: tl.constexpr,
    SHRINK_EVEN: tl.constexpr,
    SHRINK_STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    if ONE_LAUNCH:
        wait_for_inputs(PDL)
    if program < num_shrink:
        _shrink_program(
            program,
            x,
            a_stack,
            slot_of_token,
            tile_slot,
            partial,
            num_rows,
            num_groups,
            K,
            x_stride,
            a_stride,
            WIDTH,
            CHUNK,
            NUM_CHUNKS,
            BLOCK_M,
            BLOCK_W,
            SHRINK_K,
            SHRINK_EVEN,
            SHRINK_STAGES,
            PRECISION,
        )
        # All threads' sums before the one that counts.
        tl.debug_barrier()
        tl.atomic_add(counters, 1, sem="release")
    else:
        program -= num_shrink
        row_tiles = (num_rows + BLOCK_M - 1) // BLOCK_M
        rows = program % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        tile = program // row_tiles
        row_mask = rows < num_rows
        slots = tl.load(slot_of_token + rows, mask=row_mask, other=-1).to(tl.int32)
        skip = (tl.load(tile_slot) < 0).to(tl.int32)
        turns = tl.arange(0, BLOCK_N)
        if SILU:
            # Gate and up columns take turns, so that a pair lies side by side in the sums.
            first = tile * (BLOCK_N // 2)
            pairs = first + turns // 2
            weight_rows = pairs + turns % 2 * (N // 2)
            weight_mask = pairs < N // 2
            columns = first + tl.arange(0, BLOCK_N // 2)
            column_mask = columns < N // 2
            part = 0
            up_stack = b_stack + (N // 2).to(tl.int64) * RANK
        else:
            columns = tile * BLOCK_N + turns
            column_mask = columns < N
            weight_rows = columns
            weight_mask = column_mask
            # A tile lies within one part.
            part = (tile * BLOCK_N >= WIDTH_0).to(tl.int32)
            part += (tile * BLOCK_N >= WIDTH_0 + WIDTH_1).to(tl.int32)
        if PREFETCH:
            # The weights that expand are on their way while the product is summed.
            prefetch_expanding(
                b_stack, tile_slot, skip, num_groups, columns, column_mask, b_stride, RANK, J
            )
            if SILU:
                prefetch_expanding(
                    up_stack, tile_slot, skip, num_groups, columns, column_mask, b_stride, RANK, J
                )
        acc = accumulate(
            x,
            weight,
            rows,
            weight_rows,
            row_mask,
            weight_mask,
            K,
            x_stride,
            BLOCK_K,
            EVEN_K,
            STAGES,
            SWAP,
            PRECISION,
        )
        dtype: tl.constexpr = out.dtype.element_ty
        operand: tl.constexpr = b_stack.dtype.element_ty
        if ONE_LAUNCH:
            done = tl.atomic_add(counters, 0, sem="acquire")
            polls = done * 0
            while (done < num_shrink) & (polls < MAX_POLLS):
                done = tl.atomic_add(counters, 0, sem="acquire")
                polls += 1
            tl.debug_barrier()
            # The last to have waited leaves the counters as they were.
            others = tl.num_programs(0) - num_shrink - 1
            if tl.atomic_add(counters + 1, 1, sem="relaxed") == others:
                tl.store(counters, 0)
                tl.store(counters + 1, 0)
        else:
            wait_for_inputs(PDL)
        own = slots >= 0
        shrunk = fold_chunks(
            partial, rows, own, part, num_rows, operand, RANK, WIDTH, NUM_CHUNKS, BLOCK_R
        )
        delta = _delta(
            shrunk,
            slots,
            b_stack,
            tile_slot,
            skip,
            num_groups,
            columns,
            column_mask,
            b_stride,
            dtype,
            RANK,
            BLOCK_R,
            J,
            PRECISION,
        )
        if SILU:
            gate, up = tl.split(acc.to(dtype).reshape(BLOCK_M, BLOCK_N // 2, 2))
            gate = tl.where(own[:, None], (gate.to(tl.float32) + delta).to(dtype), gate)
            shrunk = fold_chunks(
                partial, rows, own, 1, num_rows, operand, RANK, WIDTH, NUM_CHUNKS, BLOCK_R
            )
            delta = _delta(
                shrunk,
                slots,
                up_stack,
                tile_slot,
                skip,
                num_groups,
                columns,
                column_mask,
                b_stride,
                dtype,
                RANK,
                BLOCK_R,
                J,
                PRECISION,
            )
            up = tl.where(own[:, None], (up.to(tl.float32) + delta).to(dtype), up)
            product = silu_product(gate, up, dtype)
            width = N // 2
        else:
            product = acc.to(dtype)
            if HAS_BIAS:
                added = tl.load(bias + columns, mask=column_mask, other=0.0)
                product = (product.to(tl.float32) + added.to(tl.float32)[None, :]).to(dtype)
            product = tl.where(own[:, None], (product.to(tl.float32) + delta).to(dtype), product)
            width = N
        offsets = rows[:, None].to(tl.int64) * width + columns[None, :]
        tl.store(out + offsets, product, mask=row_mask[:, None] & column_mask[None, :])


def chunk_size(depth: int, max_chunks: int) -> int:
    """Input features of a partial sum: the layer's own, whatever the batch."""
    chunk = 512
    while depth > chunk * max_chunks:
        chunk *= 2
    return chunk


@cache
def _counters(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)


def is_fusable(num_rows: int, widths: Sequence[int], block_n: int) -> bool:
    return num_rows <= MAX_SKINNY_ROWS and all(width % block_n == 0 for width in widths[:-1])


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a_stack: Tensor,
    b_stack: Tensor,
    slot_of_token: Tensor,
    widths: Sequence[int],
    distinct: Tensor,
    *,
    silu: bool = False,
    one_launch: bool = True,
    max_chunks: int = 8,
    max_lanes: int = _MAX_LANES,
    prefetch: bool = True,
) -> Tensor:
    """``lora_linear``, or with ``silu`` ``lora_linear_silu_mul``.

    distinct: [G] int32, the slots of the batch in ascending order, -1 first where there is one,
    then -2.
    """
    x = unit_stride(x)
    (num_rows, depth), num_features = x.shape, weight.shape[0]
    out_features = num_features // 2 if silu else num_features
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tiles = tile_arguments(x, num_features, depth, None)
    block_m, block_n = tiles["BLOCK_M"], tiles["BLOCK_N"]
    assert silu or is_fusable(num_rows, widths, block_n)
    width = a_stack.shape[1]
    rank = width // len(widths)
    chunk = chunk_size(depth, max_chunks)
    num_chunks = triton.cdiv(depth, chunk)
    num_groups = distinct.shape[0]
    row_tiles = triton.cdiv(num_rows, block_m)
    block_r = max(16, triton.next_power_of_2(rank))
    block_w = max(16, min(64, triton.next_power_of_2(width)))
    shrink_k = 32 if x.dtype == torch.float32 else 128
    # No more shared memory than the product's tiles have: less would run beside each other.
    room = (block_m + block_n) * tiles["BLOCK_K"] * tiles["STAGES"]
    stages = max(2, min(5, room // ((block_m + block_w) * shrink_k)))
    lanes = max(block_r, min(max_lanes, triton.next_power_of_2(max(1, num_groups - 1)) * block_r))
    partial = torch.empty(num_chunks, num_rows, width, dtype=torch.float32, device=x.device)
    num_shrink = num_chunks * num_groups * row_tiles * triton.cdiv(width, block_w)
    shared: dict[str, Any] = {
        "WIDTH": width,
        "CHUNK": chunk,
        "NUM_CHUNKS": num_chunks,
        "BLOCK_M": block_m,
        "BLOCK_W": block_w,
        "SHRINK_K": shrink_k,
        "SHRINK_EVEN": depth % shrink_k == 0,
        "SHRINK_STAGES": stages,
        "PRECISION": tiles["PRECISION"],
    }
    sizes = (num_rows, num_groups, depth, x.stride(0), a_stack.stride(0))
    if not one_launch:
        _shrink_kernel[(num_shrink,)](
            x,
            a_stack,
            slot_of_token,
            distinct,
            partial,
            *sizes,
            **shared,
            num_warps=4,
            enable_fp_fusion=False,
            **pdl_options(x),
        )
        num_shrink = 0
    grid = num_shrink + row_tiles * triton.cdiv(num_features, block_n)
    _lora_linear_kernel[(grid,)](
        x,
        weight,
        bias if bias is not None else weight,
        out,
        a_stack,
        b_stack,
        slot_of_token,
        distinct,
        partial,
        _counters(x.device),
        num_shrink,
        num_groups,
        num_rows,
        num_features,
        depth,
        x.stride(0),
        a_stack.stride(0),
        b_stack.stride(0),
        widths[0],
        widths[1] if len(widths) > 1 else num_features,
        HAS_BIAS=bias is not None,
        SILU=silu,
        ONE_LAUNCH=one_launch,
        PREFETCH=prefetch and x.is_cuda,
        RANK=rank,
        BLOCK_R=block_r,
        J=lanes // block_r,
        **(tiles | shared),
    )
    return out
