"""What the kernels of ``lora_fused_triton`` and ``lora_grouped_triton`` are made of.

Shape letters: T token rows, K input features, N output features, P fused projections, r rank of a
slot, S adapter slots, C chunks of K, J slots at once.
"""

import triton
import triton.language as tl


@triton.jit
def shrink_block(
    rows,  # [BLOCK_M], of one slot where row_mask
    row_mask,
    slot,
    block,
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
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``x @ A.T`` over one chunk of the input features, for BLOCK_W of all parts' ranks."""
    outputs = block * BLOCK_W + tl.arange(0, BLOCK_W)
    output_mask = outputs < WIDTH
    depth = tl.arange(0, BLOCK_K)
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, K)
    x_tile = x + rows[:, None].to(tl.int64) * x_stride + depth[None, :]
    a_tile = a_stack + slot.to(tl.int64) * a_stride + outputs[:, None] * K + depth[None, :]
    acc = tl.zeros([rows.shape[0], BLOCK_W], tl.float32)
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
def fold_chunks(
    partial,  # [C, T, P * r] float32
    rows,
    row_mask,
    part,
    num_rows,
    dtype: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """``A x`` of the rows for one part, added up in the order of the chunks. [rows, BLOCK_R]"""
    ranks = tl.arange(0, BLOCK_R)
    mask = row_mask[:, None] & (ranks < RANK)[None, :]
    source = partial + rows[:, None].to(tl.int64) * WIDTH + (part * RANK + ranks)[None, :]
    total = tl.zeros([rows.shape[0], BLOCK_R], tl.float32)
    # As many loads in flight as there are registers for.
    AT_ONCE: tl.constexpr = NUM_CHUNKS if rows.shape[0] * BLOCK_R <= 2048 else 2
    for first in range(0, NUM_CHUNKS, AT_ONCE):
        for chunk in tl.static_range(AT_ONCE):
            # Not from L1: another program of the same launch may have written it.
            total += tl.load(
                source + (first + chunk) * num_rows.to(tl.int64) * WIDTH,
                mask=mask & (first + chunk < NUM_CHUNKS),
                other=0.0,
                cache_modifier=".cg",
            )
    return total.to(dtype)


@triton.jit
def load_slots(tile_slot, first, num_groups, BLOCK_R: tl.constexpr, J: tl.constexpr):
    """The slot of each of J * BLOCK_R ranks, those of one slot together; negative of none."""
    groups = first + tl.arange(0, J * BLOCK_R) // BLOCK_R
    return tl.load(tile_slot + groups, mask=groups < num_groups, other=-2)


@triton.jit
def prefetch_expanding(
    b_stack,  # [S, N, r], slots b_stride apart
    tile_slot,
    first,
    num_groups,
    columns,
    column_mask,
    b_stride,
    RANK: tl.constexpr,
    J: tl.constexpr,
):
    """Ask for what ``load_expanding`` will read to be brought to L2."""
    groups = first + tl.arange(0, J)
    slots = tl.load(tile_slot + groups, mask=groups < num_groups, other=-2)
    # Where nothing will be read, the first weights of all.
    read = column_mask[:, None] & (slots >= 0)[None, :]
    offsets = slots.to(tl.int64)[None, :] * b_stride + columns[:, None] * RANK
    source = b_stack + tl.where(read, offsets, 0)
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l",
        [source.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_expanding(
    b_stack,  # [S, N, r], slots b_stride apart
    lane_slots,  # [J * BLOCK_R]
    columns,
    column_mask,
    b_stride,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    J: tl.constexpr,
):
    """The columns' expanding weights of J slots side by side. [columns, J * BLOCK_R]"""
    ranks = tl.arange(0, J * BLOCK_R) % BLOCK_R
    source = b_stack + lane_slots.to(tl.int64)[None, :] * b_stride
    source += columns[:, None] * RANK + ranks[None, :]
    mask = column_mask[:, None] & ((lane_slots >= 0) & (ranks < RANK))[None, :]
    return tl.load(source, mask=mask, other=0.0)


@triton.jit
def spread(shrunk, slots, lane_slots, BLOCK_R: tl.constexpr, J: tl.constexpr):
    """Each row's shrunk values in the lanes of its own slot, zero in the others'."""
    wide = tl.broadcast_to(shrunk[:, None, :], [shrunk.shape[0], J, BLOCK_R])
    wide = wide.reshape(shrunk.shape[0], J * BLOCK_R)
    return tl.where(slots[:, None] == lane_slots[None, :], wide, tl.zeros_like(wide))
