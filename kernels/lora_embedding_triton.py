"""Triton side of ``lora_embedding_``. Shape letters: T token rows, N features, V ids, r rank."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _embedding_kernel(
    ids,  # [T]
    a_stack,  # [S, V, r], slots a_stride apart
    b_stack,  # [S, N, r], slots b_stride apart
    slot_of_token,  # [T]
    out,  # [T, N]
    N,
    a_stride,
    b_stride,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of_token + row).to(tl.int64)
    if slot >= 0:
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        column_mask = columns < N
        ranks = tl.arange(0, BLOCK_R)
        rank_mask = ranks < RANK
        token = tl.load(ids + row).to(tl.int64)
        a = tl.load(a_stack + slot * a_stride + token * RANK + ranks, mask=rank_mask, other=0.0)
        b_tile = b_stack + slot * b_stride + columns[:, None] * RANK + ranks[None, :]
        b = tl.load(b_tile, mask=column_mask[:, None] & rank_mask[None, :], other=0.0)
        delta = tl.sum(a.to(tl.float32)[None, :] * b.to(tl.float32), axis=1).to(a.dtype)
        target = out + row * N + columns
        product = tl.load(target, mask=column_mask, other=0.0)
        added = product.to(tl.float32) + delta.to(tl.float32)
        tl.store(target, added.to(out.dtype.element_ty), mask=column_mask)


def lora_embedding_(
    out: Tensor, ids: Tensor, a_stack: Tensor, b_stack: Tensor, slot_of_token: Tensor
) -> Tensor:
    """``specdec.kernels.lora.lora_embedding_``."""
    rank, block_n = b_stack.shape[2], 128
    if out.shape[0]:
        _embedding_kernel[(out.shape[0], triton.cdiv(out.shape[1], block_n))](
            ids,
            a_stack,
            b_stack,
            slot_of_token,
            out,
            out.shape[1],
            a_stack.stride(0),
            b_stack.stride(0),
            RANK=rank,
            BLOCK_N=block_n,
            BLOCK_R=triton.next_power_of_2(rank),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
