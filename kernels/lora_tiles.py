"""What the kernels of ``lora_triton`` and ``lora_linear_triton`` are made of; letters as there."""

import triton
import triton.language as tl


@triton.jit
def tile_of_rows(tile, order, tile_first, tile_end, BLOCK_M: tl.constexpr):
    """A tile's rows [BLOCK_M], and which of them are there."""
    places = tl.load(tile_first + tile) + tl.arange(0, BLOCK_M)
    mask = places < tl.load(tile_end + tile)
    return tl.load(order + places, mask=mask, other=0), mask


@triton.jit
def shrink_rows(
    rows,  # [BLOCK_M], those of one slot where row_mask
    row_mask,
    slot,
    outputs,  # ranks of all parts
    output_mask,
    chunk,
    x,  # [T, K], rows x_stride apart
    a_stack,  # [S, P * r, K], slots a_stride apart
    partial,  # [C, T, P * r] float32
    num_rows,
    K,
    x_stride,
    a_stride,
    WIDTH: tl.constexpr,  # P * r
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The rows' partial sums of these outputs over one chunk of the input features."""
    depth = tl.arange(0, BLOCK_K)
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, K)
    x_tile = x + rows[:, None].to(tl.int64) * x_stride + depth[None, :]
    a_tile = a_stack + slot.to(tl.int64) * a_stride + outputs[:, None] * K + depth[None, :]
    acc = tl.zeros([rows.shape[0], outputs.shape[0]], tl.float32)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            a = tl.load(x_tile + start, mask=row_mask[:, None], other=0.0)
            b = tl.load(a_tile + start, mask=output_mask[:, None], other=0.0)
        else:
            inside = (depth < last - start)[None, :]
            a = tl.load(x_tile + start, mask=row_mask[:, None] & inside, other=0.0)
            b = tl.load(a_tile + start, mask=output_mask[:, None] & inside, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    out_row = (chunk.to(tl.int64) * num_rows + rows) * WIDTH
    target = partial + out_row[:, None] + outputs[None, :]
    tl.store(target, acc, mask=row_mask[:, None] & output_mask[None, :])


@triton.jit
def shrunk_rows(
    partial,  # [C, T, P * r] float32
    rows,
    row_mask,
    part,
    num_rows,
    dtype: tl.constexpr,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """``A x`` of the rows for one part, added up in the order of the chunks. [rows, BLOCK_R]"""
    ranks = tl.arange(0, BLOCK_R)
    width: tl.constexpr = NUM_PARTS * RANK
    mask = row_mask[:, None] & (ranks < RANK)[None, :]
    source = partial + rows[:, None].to(tl.int64) * width + (part * RANK + ranks)[None, :]
    total = tl.zeros([rows.shape[0], BLOCK_R], tl.float32)
    # As many loads in flight as there are registers for.
    AT_ONCE: tl.constexpr = NUM_CHUNKS if rows.shape[0] * BLOCK_R <= 1024 else 2
    for first in range(0, NUM_CHUNKS, AT_ONCE):
        for chunk in tl.static_range(AT_ONCE):
            offset = (first + chunk) * num_rows.to(tl.int64) * width
            there = mask & (first + chunk < NUM_CHUNKS)
            total += tl.load(source + offset, mask=there, other=0.0)
    return total.to(dtype)


@triton.jit
def expand_tile(
    shrunk,  # [rows, BLOCK_R]
    b_stack,
    slot,
    columns,
    column_mask,
    b_stride,
    dtype: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``B (A x)`` of one slot for the columns, rounded to ``dtype``, as float32. [rows, columns]"""
    ranks = tl.arange(0, BLOCK_R)
    b_tile = b_stack + slot.to(tl.int64) * b_stride + columns[:, None] * RANK + ranks[None, :]
    b = tl.load(b_tile, mask=column_mask[:, None] & (ranks < RANK)[None, :], other=0.0)
    return tl.dot(shrunk, tl.trans(b), input_precision=PRECISION).to(dtype).to(tl.float32)
