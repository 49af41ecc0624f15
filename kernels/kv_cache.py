"""Writing keys and values into the paged cache.

Shape letters: T rows, G key/value heads, D head size, N blocks of the pool, B block size.
"""

import torch
from torch import Tensor


def write_kv_reference(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Plain PyTorch twin of ``write_kv``.

    Rows that write nowhere go to the dump block on top of the pool: as an index, -1 would be the
    last slot of the cache.
    """
    # NaN where a value is not finite, else zero.
    broken = (value * 0).sum(-1, keepdim=True)
    key, value = key + broken, torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0)
    num_blocks, block_size = key_cache.shape[:2]
    dump_slot = (num_blocks - 1) * block_size
    slots = torch.where(slot_mapping < 0, dump_slot, slot_mapping)
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slots, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slots, value)


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store each row's key and value at its slot (block * B + offset).

    key, value [T, G, D]; key_cache, value_cache [N + 1, B, G, D], changed in place; slot_mapping
    [T] int64, where -1 writes to no slot of the pool.

    A value that is not finite is stored as zero, and the head's key as NaN. Attention then makes
    NaN of the rows that see that token and of no others: they weigh it with zero, and zero times
    NaN would be NaN.
    """
    if key.is_cuda:
        from specdec.kernels import kv_cache_triton

        kv_cache_triton.write_kv(key, value, key_cache, value_cache, slot_mapping)
    else:
        write_kv_reference(key, value, key_cache, value_cache, slot_mapping)
