"""Triton side of ``specdec.kernels.kv_cache``. Shape letters: T rows, G heads, D head size."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["key_stride", "value_stride"])
def _write_kv_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    if slot >= 0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        k = tl.load(key + row * key_stride + columns, mask=mask)
        v = tl.load(value + row * value_stride + columns, mask=mask)
        tl.store(key_cache + slot * WIDTH + columns, k, mask=mask)
        tl.store(value_cache + slot * WIDTH + columns, v, mask=mask)


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
    width = num_heads * head_size
    block = min(1024, triton.next_power_of_2(width))
    _write_kv_kernel[(num_rows, triton.cdiv(width, block))](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        WIDTH=width,
        BLOCK=block,
    )
