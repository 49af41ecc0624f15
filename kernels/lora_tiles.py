"""What the kernels of ``lora_triton`` and ``lora_linear_triton`` are made of; letters as there."""

import triton
import triton.language as tl

NO_SLOT = tl.constexpr(2**31 - 1)


@triton.jit
def next_slot(slots, after):
    """The lowest adapter slot above ``after`` among a tile's rows, or NO_SLOT."""
    return tl.min(tl.where(slots > after, slots, NO_SLOT), axis=0)


@triton.jit
def shrink_tile(
    tile,  # row tile
    part,
    chunk,
    x,  # [T, K], rows x_stride apart
    a_stack,  # [S, P * r, K], slots a_stride apart
    slot_of_token,  # [T]
    partial,  # [C, T, P * r] float32
    num_rows,
    K,
    x_stride,
    a_stride,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The partial sums of one tile of rows, for one part and one chunk of the input features."""
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    slots = tl.load(slot_of_token + rows, mask=rows < num_rows, other=-1).to(tl.int32)
    ranks = tl.arange(0, BLOCK_R)
    rank_mask = ranks < RANK
    depth = tl.arange(0, BLOCK_K)
    x_tile = x + rows[:, None].to(tl.int64) * x_stride + depth[None, :]
    outputs = part * RANK + ranks
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, K)
    out_row = (chunk.to(tl.int64) * num_rows + rows) * (NUM_PARTS * RANK)
    slot = next_slot(slots, -1)
    while slot < NO_SLOT:
        own = slots == slot
        a_tile = a_stack + slot.to(tl.int64) * a_stride + outputs[:, None] * K + depth[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
            inside = (depth < last - start)[None, :]
            a = tl.load(x_tile + start, mask=own[:, None] & inside, other=0.0)
            b = tl.load(a_tile + start, mask=rank_mask[:, None] & inside, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
        target = partial + out_row[:, None] + outputs[None, :]
        tl.store(target, acc, mask=own[:, None] & rank_mask[None, :])
        slot = next_slot(slots, slot)


@triton.jit
def shrunk_rows(
    partial,  # [C, T, P * r] float32
    rows,
    own,  # rows that have an adapter
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
    mask = own[:, None] & (ranks < RANK)[None, :]
    source = partial + rows[:, None].to(tl.int64) * width + (part * RANK + ranks)[None, :]
    total = tl.zeros([rows.shape[0], BLOCK_R], tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        total += tl.load(source + chunk * num_rows.to(tl.int64) * width, mask=mask, other=0.0)
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
