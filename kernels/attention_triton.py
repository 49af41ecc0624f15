"""Paged attention in Triton: one launch for uniform batches (split over keys), one for all others.

Shape letters: T query rows, R requests, Q query rows per request, H query heads, G key/value heads,
D head size, N blocks of the pool, B block size, W width of a block table, M rows of a tile.

Grids are sized by the shapes of the batch, never by its lengths: those are data.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from specdec.kernels.attention_mixed import mixed_kernel
from specdec.kernels.attention_tree import NODE, leaf_size, request_block
from specdec.kernels.attention_uniform import uniform_kernel
from specdec.kernels.launch import pdl_options, reads_early

# Head sizes of ``small_config``: so short a row lies in whole lines of the cache.
SMALL_HEADS = (32, 64)
# Bytes of scratch beyond which long batches are not split over keys.
MAX_SCRATCH_BYTES = 256 << 20
# Tiles from which on programs walk long runs of keys.
DEEP_TILES = 16
# Query rows up to which ``shared_config`` takes one tile for few requests.
SHARED_ROWS = 32


class Scratch:
    """Partial results of one launch, reused by the next. Its addresses are baked into graphs.

    ``counters`` are zero between launches. Buffers grow only outside a capture, and a buffer that
    was outgrown is kept, since a graph may still write to it.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._parts: Tensor | None = None
        self._counters: Tensor | None = None

    def _grown(self, buffer: Tensor | None, size: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        if buffer is not None and buffer.numel() >= size and buffer.device == like.device:
            return buffer
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"attention needs {size} elements of scratch during a capture; run a batch of this "
                "shape once before capturing it"
            )
        buffer = torch.zeros(size, dtype=dtype, device=like.device)
        self._kept.append(buffer)
        return buffer

    def parts(self, size: int, like: Tensor) -> Tensor:
        """At least ``size`` float32 elements on the device of ``like``."""
        self._parts = self._grown(self._parts, size, torch.float32, like)
        return self._parts

    def counters(self, size: int, like: Tensor) -> Tensor:
        """At least ``size`` int32 zeros on the device of ``like``."""
        self._counters = self._grown(self._counters, size, torch.int32, like)
        return self._counters


@dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """How a kernel is compiled and spread over the GPU. No bit of a result depends on it."""

    num_warps: int
    stages: int
    programs_per_sm: int = 1
    # Leaves for each multiprocessor up to which a program takes single ones, not whole nodes.
    leaves_per_sm: int = 1
    # For uniform batches: slices of the values' features, each a program's own (the head size is
    # then a power of two), and whether blocks and parts are asked for before they are needed.
    slices: int = 1
    ahead: bool = False
    # Whether keys of earlier passes are read before the kernel in front is over, which must not
    # write those, the lengths or the block table; and whether the kernel behind is let in early.
    keys_first: bool = False
    lets_in: bool = False


def max_tile_rows(block_d: int, itemsize: int) -> int:
    """Query rows that one program carries without spilling its sums."""
    if itemsize == 4:
        return 16
    return 64 if block_d <= 128 else 32


def default_config(
    block_m: int, block_d: int, leaf: int, like: Tensor, num_tiles: int
) -> TileConfig:
    """The configuration of a tile of ``block_m`` rows and ``block_d`` features.

    ``like``: device and dtype; ``num_tiles``: how many tiles share the GPU, each all keys long.
    """
    num_warps = 8 if block_m * block_d >= 8192 else 4
    if like.itemsize == 4:
        return TileConfig(num_warps=num_warps, stages=1)
    # A stage for the page table and one for keys and values put one leaf in flight, and only
    # between two leaves' products; twice that keeps the next leaf coming meanwhile. With few tiles
    # a program walks a leaf or two, and the longer way in would cost more.
    small = 2 * block_m * (block_d + leaf) + 2048
    deep = num_tiles >= DEEP_TILES and 3 * 4 * leaf * block_d + small <= _shared_bytes(like.device)
    programs_per_sm = 2 if deep and block_d <= 64 else 1
    return TileConfig(num_warps=num_warps, stages=5 if deep else 2, programs_per_sm=programs_per_sm)


def shared_config(num_rows: int, num_tiles: int) -> TileConfig | None:
    """The configuration of heads of 128 features in 16 bits whose keys many programs share out.

    ``num_rows``: query rows of a request and head; ``num_tiles``: requests by heads. None: the
    default is as good. Measured on one H200 by ``bench/attention_candidates.py``.
    """
    if num_tiles < DEEP_TILES:
        # A leaf or two for each program: slices shorten the last fold, smaller tiles both.
        if num_rows <= 16:
            return None
        slices = 2 if num_rows <= SHARED_ROWS else 1
        return TileConfig(num_warps=4, stages=2, programs_per_sm=2, leaves_per_sm=2, slices=slices)
    # Nodes: while one program computes, the other one's keys come.
    if num_rows <= SHARED_ROWS:
        return TileConfig(num_warps=4, stages=2, programs_per_sm=2, leaves_per_sm=2, ahead=True)
    return TileConfig(num_warps=8, stages=2, programs_per_sm=2)


def small_config(query_len: int) -> TileConfig:
    """The configuration of one request with small heads, whose launches are waits for most part."""
    return TileConfig(
        num_warps=4,
        stages=2,
        slices=2 if query_len > 1 else 1,
        ahead=True,
        keys_first=True,
        lets_in=True,
    )


@cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may take; no limit under the interpreter."""
    if device.type != "cuda":
        return 1 << 30
    index = torch.cuda.current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]


def num_programs(device: torch.device, per_sm: int) -> int:
    """Programs of a persistent grid; a handful under the interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count * per_sm


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    context_lens: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    uniform: bool,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    older_keys_stand: bool = False,
    scratch: Scratch | None = None,
    config: TileConfig | None = None,
) -> Tensor:
    """Triton side of ``specdec.kernels.attention.paged_attention``.

    ``older_keys_stand``: the kernel before this one writes no lengths, no block table, and no key
    before ``context_lens``, so that a uniform batch may read those while it still runs.

    ``scratch`` is kept between calls by whoever captures graphs; without it a call makes its own.
    """
    query = query if query.stride()[1:] == (query.shape[2], 1) else query.contiguous()
    head_size = query.shape[2]
    num_reqs, table_width = block_table.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = query.shape[1] // num_kv_heads
    block_d = max(16, triton.next_power_of_2(head_size))
    leaf = leaf_size(head_size, query.itemsize)
    max_rows = max_tile_rows(block_d, query.itemsize)
    common = {
        "GROUP": group,
        "NUM_KV_HEADS": num_kv_heads,
        "D": head_size,
        "BLOCK_D": block_d,
        "BLOCK_SIZE": block_size,
        "BLOCK_R": request_block(num_reqs),
        "LEAF": leaf,
        "NODE": NODE,
        "WINDOW": sliding_window or 0,
        "CAPPED": soft_cap is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "enable_fp_fusion": False,
    }
    # With a cap the kernels keep scores as tanh(score / cap).
    scale_log2 = (scale if soft_cap is None else soft_cap) * math.log2(math.e)
    cap_scale = 0.0 if soft_cap is None else scale / soft_cap
    if not uniform:
        block_m = max(max_rows, triton.next_power_of_2(group))
        tile_tokens = block_m // group
        num_tiles = num_kv_heads * triton.cdiv(query.shape[0], tile_tokens)
        config = config or default_config(block_m, block_d, leaf, query, num_tiles)
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        mixed_kernel[(num_kv_heads, triton.cdiv(query.shape[0], tile_tokens) + num_reqs)](
            query,
            key_cache,
            value_cache,
            block_table,
            query_start_loc,
            context_lens,
            seq_lens,
            out,
            num_reqs,
            query.stride(0),
            block_table.stride(0),
            scale_log2,
            cap_scale,
            TILE_TOKENS=tile_tokens,
            BLOCK_M=block_m,
            STAGES=config.stages,
            num_warps=config.num_warps,
            **common,
        )
        return out

    num_rows = max_query_len * group
    num_tiles = num_reqs * num_kv_heads
    # From three tiles for each multiprocessor on a program walks all keys of a tile.
    if (
        config is None
        and head_size == 128
        and query.itemsize == 2
        and num_tiles * triton.cdiv(num_rows, max_rows) < num_programs(query.device, 3)
    ):
        config = shared_config(num_rows, num_tiles)
        if config is not None and num_tiles < DEEP_TILES:
            max_rows = SHARED_ROWS
    tiles = triton.cdiv(num_rows, max_rows)
    tile_rows = triton.cdiv(num_rows, tiles)
    block_m = max(16, triton.next_power_of_2(tile_rows))
    tiles_of_batch = num_reqs * num_kv_heads * tiles
    is_small = num_reqs == 1 and head_size in SMALL_HEADS and query.itemsize == 2
    if config is None and older_keys_stand and is_small:
        config = small_config(max_query_len)
    config = config or default_config(block_m, block_d, leaf, query, tiles_of_batch)
    if config.keys_first and head_size % 16:
        raise ValueError(f"keys_first: head size {head_size} is no multiple of 16")
    programs = num_programs(query.device, config.programs_per_sm)
    max_leaf_items = num_programs(query.device, config.leaves_per_sm)
    assert config.slices == 1 or head_size == block_d, (config, head_size)
    value_size, block_v = head_size // config.slices, block_d // config.slices
    tiles_of_batch *= config.slices
    max_leaves = triton.cdiv(table_width * block_size, leaf)
    # Rows of a part in fours and parts in lines of 128 bytes, for wide and unshared accesses.
    part_rows = 4 * triton.cdiv(tile_rows, 4)
    part_size = 32 * triton.cdiv(part_rows * (value_size + 2), 32)
    max_items = min(
        tiles_of_batch * triton.cdiv(max_leaves, NODE), MAX_SCRATCH_BYTES // (4 * part_size)
    )
    scratch = scratch or Scratch()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    uniform_kernel[(min(programs, tiles_of_batch * max_leaves),)](
        query,
        key_cache,
        value_cache,
        block_table,
        context_lens,
        seq_lens,
        out,
        scratch.parts(max(programs, max_leaf_items, max_items) * part_size, query),
        scratch.counters(tiles_of_batch, query),
        num_reqs,
        query.stride(0),
        block_table.stride(0),
        max_leaf_items,
        max_items,
        scale_log2,
        cap_scale,
        reads_early(query),
        Q=max_query_len,
        DV=value_size,
        BLOCK_V=block_v,
        SLICES=config.slices,
        AHEAD=config.ahead,
        KEYS_FIRST=config.keys_first and not sliding_window,
        TILES=tiles,
        TILE_ROWS=tile_rows,
        PART=part_size,
        PART_ROWS=part_rows,
        BLOCK_M=block_m,
        STAGES=config.stages,
        num_warps=config.num_warps,
        **common,
        **pdl_options(query, lets_in=config.lets_in),
    )
    return out
