"""Triton side of ``rank_sum``, and collectives of one kernel over memory that the ranks share.

Each rank puts its part where the others can read it, says so, waits until they have, and reads all
parts in the order of the ranks. Two halves of the memory take turns: a rank that writes one of them
again has seen the others begin the launch in between, so they have ended the one before that.
Nothing here uses multicast.

Shape letters: N ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
# All programs of a launch must run at the same time, since those of two devices wait for each
# other: a multiprocessor holds several of them.
MAX_PROGRAMS = 128


@triton.jit(do_not_specialize=["numel"])
def _sum_kernel(parts, out, numel, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    total = tl.load(parts + index, mask=mask, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, SIZE):
        total += tl.load(parts + rank * numel + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=mask)


def sum_ranks(parts: Tensor) -> Tensor:
    """``specdec.kernels.rank_sum.sum_ranks``."""
    parts = parts.contiguous()
    out = torch.empty_like(parts[0])
    numel = out.numel()
    if numel:
        grid = (triton.cdiv(numel, _BLOCK),)
        _sum_kernel[grid](parts, out, numel, SIZE=parts.shape[0], BLOCK=_BLOCK)
    return out


@triton.jit(do_not_specialize=["numel"])
def _one_shot_kernel(
    x,  # [numel]
    out,  # [numel] for a sum, else [N, numel]
    buffers,  # [N] int64: address of each rank's two halves
    flags,  # [N] int64: address of each rank's flags, [MAX_PROGRAMS, N] int64
    epochs,  # [MAX_PROGRAMS] int64: launches that each program of this rank has been through
    lost,  # [1] int32: not 0 once a rank is gone for good
    numel,
    half_size,  # elements of a half
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    IS_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    step = tl.num_programs(0) * BLOCK
    epoch = tl.load(epochs + program)
    half = (epoch % 2) * half_size
    own = tl.load(buffers + RANK).to(tl.pointer_type(dtype)) + half
    for start in range(program * BLOCK, numel, step):
        index = start + tl.arange(0, BLOCK)
        tl.store(own + index, tl.load(x + index, mask=index < numel), mask=index < numel)
    # All of the program's part is written before it says so.
    tl.debug_barrier()
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flag = tl.load(flags + peer).to(tl.pointer_type(tl.int64)) + program * SIZE + RANK
            tl.atomic_xchg(flag, epoch + 1, sem="release", scope="sys")
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flag = tl.load(flags + RANK).to(tl.pointer_type(tl.int64)) + program * SIZE + peer
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            gone = tl.load(lost, volatile=True)
            while (seen <= epoch) & (gone == 0):
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                gone = tl.load(lost, volatile=True)
    tl.debug_barrier()
    for start in range(program * BLOCK, numel, step):
        index = start + tl.arange(0, BLOCK)
        mask = index < numel
        first = tl.load(buffers).to(tl.pointer_type(dtype)) + half
        part = tl.load(first + index, mask=mask, other=0, cache_modifier=".cg")
        if IS_SUM:
            total = part.to(tl.float32)
            for rank in tl.static_range(1, SIZE):
                theirs = tl.load(buffers + rank).to(tl.pointer_type(dtype)) + half
                part = tl.load(theirs + index, mask=mask, other=0, cache_modifier=".cg")
                total += part.to(tl.float32)
            tl.store(out + index, total.to(dtype), mask=mask)
        else:
            tl.store(out + index, part, mask=mask)
            for rank in tl.static_range(1, SIZE):
                theirs = tl.load(buffers + rank).to(tl.pointer_type(dtype)) + half
                part = tl.load(theirs + index, mask=mask, other=0, cache_modifier=".cg")
                tl.store(out + rank * numel + index, part, mask=mask)
    tl.store(epochs + program, epoch + 1)


def one_shot(
    x: Tensor,
    buffers: Tensor,
    flags: Tensor,
    epochs: Tensor,
    lost: Tensor,
    *,
    half_bytes: int,
    rank: int,
    size: int,
    is_sum: bool,
) -> Tensor:
    """The sum of all ranks' ``x`` as ``sum_ranks`` makes it, or else all of them, [N, ...].

    buffers, flags: [N] int64 addresses. epochs: [MAX_PROGRAMS] int64 of this rank, zero at first as
    all flags. lost: [1] int32. ``x`` has at most ``half_bytes`` bytes. Every rank must make the
    same calls in the same order. With ``lost`` set nothing is waited for, and the result is
    undefined.
    """
    x = x.contiguous()
    numel = x.numel()
    out = torch.empty_like(x) if is_sum else x.new_empty((size, *x.shape))
    if numel:
        _one_shot_kernel[(min(triton.cdiv(numel, _BLOCK), MAX_PROGRAMS),)](
            x,
            out,
            buffers,
            flags,
            epochs,
            lost,
            numel,
            half_bytes // x.element_size(),
            RANK=rank,
            SIZE=size,
            IS_SUM=is_sum,
            BLOCK=_BLOCK,
        )
    return out
