"""Paged attention batches with every unread slot poisoned, and their exact results in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

# A block id that no cache has: reading through it fails or faults.
NO_BLOCK = 10**6


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The arguments of ``paged_attention``, named as there."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    context_lens: Tensor
    seq_lens: Tensor
    max_query_len: int
    scale: float
    uniform: bool
    sliding_window: int | None = None
    soft_cap: float | None = None

    def arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def rows(self) -> Tensor:
        """[T] bool: rows that belong to a request."""
        return torch.arange(len(self.query)) < int(self.query_start_loc[-1])

    def keys_and_values(self, request: int) -> tuple[Tensor, Tensor]:
        """The request's valid keys and values, [L, G, D]."""
        block_size = self.key_cache.shape[1]
        length = int(self.seq_lens[request])
        blocks = self.block_table[request, : -(-length // block_size)].long()
        return (
            self.key_cache[blocks].flatten(0, 1)[:length],
            self.value_cache[blocks].flatten(0, 1)[:length],
        )

    def exact(self) -> Tensor:
        """The result in float64, row by row."""
        out = torch.zeros(self.query.shape, dtype=torch.float64, device=self.query.device)
        group = self.query.shape[1] // self.key_cache.shape[2]
        starts = self.query_start_loc.tolist()
        for request, context_len in enumerate(self.context_lens.tolist()):
            keys, values = (part.double() for part in self.keys_and_values(request))
            for row in range(starts[request], starts[request + 1]):
                visible = min(context_len + row - starts[request] + 1, len(keys))
                if visible <= 0:
                    continue
                query = self.query[row].double().unflatten(0, (-1, group))
                first = 0
                if self.sliding_window is not None:
                    position = context_len + row - starts[request]
                    first = max(0, position - self.sliding_window + 1)
                if first >= visible:
                    continue
                scores = torch.einsum("gpd,ngd->gpn", query, keys[first:visible]) * self.scale
                if self.soft_cap is not None:
                    scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
                mixed = torch.einsum("gpn,ngd->gpd", scores.softmax(-1), values[first:visible])
                out[row] = mixed.flatten(0, 1)
        return out


def make_batch(
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    uniform: bool,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_size: int = 16,
    block_size: int = 4,
    seq_lens: Sequence[int] | None = None,
    spare_rows: int = 0,
    table_width: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Batch:
    """Requests with random keys in shuffled blocks; what no row may read is NaN or no block."""
    generator = torch.Generator().manual_seed(seed)
    ends = [max(0, c + q) for c, q in zip(context_lens, query_lens, strict=True)]
    lengths = list(seq_lens) if seq_lens is not None else ends
    width = table_width or max(1, -(-max(*ends, 1) // block_size))
    num_reqs = len(ends)
    table = torch.randperm(num_reqs * width, generator=generator).view(num_reqs, width)
    shape = (num_reqs * width + 1, block_size, num_kv_heads, head_size)
    caches = [torch.full(shape, torch.nan) for _ in range(2)]
    for request, length in enumerate(lengths):
        positions = torch.arange(length)
        blocks = table[request, positions // block_size]
        for cache in caches:
            fresh = torch.randn(length, num_kv_heads, head_size, generator=generator)
            cache[blocks, positions % block_size] = fresh
        table[request, -(-length // block_size) :] = NO_BLOCK
    num_rows = sum(query_lens) + spare_rows
    query = torch.randn(num_rows, num_heads, head_size, generator=generator)
    starts = [0, *accumulate(query_lens)]

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Batch(
        query=query.to(device, dtype),
        key_cache=caches[0].to(device, dtype),
        value_cache=caches[1].to(device, dtype),
        block_table=table.to(device, torch.int32),
        query_start_loc=ints(starts),
        context_lens=ints(context_lens),
        seq_lens=ints(lengths),
        max_query_len=max(query_lens),
        scale=head_size**-0.5,
        uniform=uniform,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


HEADS = [(6, 2), (9, 3), (7, 1), (28, 4), (40, 2), (48, 2)]
HEAD_IDS = [f"{heads}/{kv_heads}" for heads, kv_heads in HEADS]


def border_lengths(block_size: int) -> list[int]:
    """Cached lengths at the borders of blocks, and one far from any."""
    return [0, 1, block_size - 1, block_size, block_size + 1, 333]


def with_broken_values(batch: Batch) -> tuple[Batch, Tensor]:
    """The batch with NaN or infinity in one feature of each request's last value, and the rows
    that see it, [T] bool."""
    value_cache = batch.value_cache.clone()
    sees = torch.zeros(len(batch.query), dtype=torch.bool)
    block_size = value_cache.shape[1]
    for request, length in enumerate(batch.seq_lens.tolist()):
        start, end = batch.query_start_loc[request : request + 2].tolist()
        if length == 0:
            continue
        block = batch.block_table[request, (length - 1) // block_size]
        broken = (torch.nan, torch.inf, -torch.inf)[request % 3]
        value_cache[block, (length - 1) % block_size, :, request % 5] = broken
        rows = torch.arange(end - start) + int(batch.context_lens[request])
        sees[start:end] = rows >= length - 1
    return replace(batch, value_cache=value_cache), sees
