"""Triton side of ``specdec.kernels.kv_cache``. Shape letters: T rows, G heads, D head size."""

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import pdl_options, wait_for_inputs


@triton.jit
def finite_or_zero(values, mask):
    """A head's values with zero for what is not finite, and whether there was any (one integer)."""
    finite = tl.abs(values.to(tl.float32)) < float("inf")
    broken = tl.max((mask & (finite == 0)).to(tl.int32), axis=0)
    return tl.where(finite, values, 0.0), broken


@triton.jit(do_not_specialize=["key_stride", "value_stride"])
def _write_kv_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_stride,
    value_stride,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one row."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    if slot >= 0:
        features = tl.arange(0, BLOCK)
        mask = features < D
        columns = tl.program_id(1) * D + features
        k = tl.load(key + row * key_stride + columns, mask=mask)
        v = tl.load(value + row * value_stride + columns, mask=mask, other=0.0)
        v, broken = finite_or_zero(v, mask)
        k = tl.where(broken > 0, float("nan"), k)
        tl.store(key_cache + slot * (NUM_HEADS * D) + columns, k, mask=mask)
        tl.store(value_cache + slot * (NUM_HEADS * D) + columns, v, mask=mask)


def heads_together(x: Tensor) -> Tensor:
    """``x`` [T, G, D] with the heads of a row side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """``specdec.kernels.kv_cache.write_kv``. Both caches are contiguous."""
    key, value = heads_together(key), heads_together(value)
    num_rows, num_heads, head_size = key.shape
    if num_rows == 0:
        return
    _write_kv_kernel[(num_rows, num_heads)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        NUM_HEADS=num_heads,
        D=head_size,
        BLOCK=triton.next_power_of_2(head_size),
        num_warps=1,
        **pdl_options(key),
    )
