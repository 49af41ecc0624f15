"""Timing by graph replay, and the model shapes and inputs that the kernel benchmarks share."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.bench import floor
from specdec.kernels import attention_triton

BF16 = torch.bfloat16
# Copies of an input hold at least this much, several times the L2 cache.
_COLD_BYTES = 200 << 20


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-type model."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int

    def linears(self) -> list[tuple[str, int, int]]:
        """(name, outputs, inputs) of each kind of linear layer."""
        heads = self.heads * self.head_size
        return [
            ("qkv", heads + 2 * self.kv_heads * self.head_size, self.hidden),
            ("o", self.hidden, heads),
            ("gate_up", 2 * self.ffn, self.hidden),
            ("down", self.hidden, self.ffn),
            ("head", self.vocab, self.hidden),
        ]


SHAPES = {
    "8b": Shape("8b", 32, 4096, 32, 8, 128, 14336, 128_256),
    "1b": Shape("1b", 16, 2048, 32, 8, 64, 8192, 128_256),
    "smollm2": Shape("smollm2", 30, 576, 9, 3, 64, 1536, 49_152),
}
# What one of two GPUs holds.
HALVES = {
    "8b/2": Shape("8b/2", 32, 4096, 16, 4, 128, 7168, 64_128),
    "70b/2": Shape("70b/2", 80, 8192, 32, 4, 128, 14336, 64_128),
}


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 10) -> float:
    """Microseconds of one call: the median over replays of one graph of all of them in order."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 1e3 * statistics.median(times) / len(calls)


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype) * scale


def copies_of(num_bytes: int, most: int = 160) -> int:
    """How many copies of an input make every read miss L2."""
    return max(2, min(most, math.ceil(_COLD_BYTES / num_bytes)))


class Weights:
    """Copies of a weight matrix cut out of one random buffer."""

    def __init__(self) -> None:
        self._buffer = randn(2 * 128_256 * 4096, scale=0.02)

    def copies(self, num_features: int, depth: int) -> list[Tensor]:
        size = num_features * depth
        count = min(copies_of(2 * size), self._buffer.numel() // size)
        return [
            self._buffer[i * size : (i + 1) * size].view(num_features, depth) for i in range(count)
        ]


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a large device-to-device copy.

    Outside a graph: there a copy becomes a node for the copy engines, which reach two thirds of it.
    """
    return floor.copy_bandwidth(torch.device("cuda"))


def relative_error(result: Tensor, wanted: Tensor) -> float:
    return ((result.double() - wanted.double()).norm() / wanted.double().norm()).item()


class PagedBatch:
    """Requests of one context length with blocks in random order, over copies of the caches."""

    def __init__(
        self, shape: Shape, num_reqs: int, context: int, query_len: int, copies: int | None = None
    ) -> None:
        self.shape = shape
        self.num_keys = num_reqs * (context + query_len)
        width = -(-(context + query_len) // 16)
        cache_shape = (num_reqs * width + 1, 16, shape.kv_heads, shape.head_size)
        count = copies or copies_of(4 * math.prod(cache_shape), 64)
        self.caches = [(randn(*cache_shape), randn(*cache_shape)) for _ in range(count)]
        blocks = torch.randperm(num_reqs * width, device="cuda").view(num_reqs, width)
        ends = torch.arange(num_reqs + 1, device="cuda") * query_len
        lens = torch.full((num_reqs,), context, device="cuda")
        self.query_len = query_len
        self.query = randn(num_reqs * query_len, shape.heads, shape.head_size)
        self.tables = [t.int() for t in (blocks, ends, lens, lens + query_len)]
        self.scratch = attention_triton.Scratch()

    def arguments(self, copy: int = 0, uniform: bool = True) -> tuple[object, ...]:
        """Arguments of ``paged_attention``."""
        scale = self.shape.head_size**-0.5
        return self.query, *self.caches[copy], *self.tables, self.query_len, scale, uniform

    def us(self, call: Callable[..., Tensor] | None = None, **options: object) -> float:
        """Microseconds of one layer, with scratch that is kept as an engine keeps it."""
        run = call or attention_triton.paged_attention
        repeats = max(1, 32 // len(self.caches))
        copies = [*range(len(self.caches))] * repeats
        return graph_us(
            [
                lambda copy=copy: run(*self.arguments(copy), scratch=self.scratch, **options)
                for copy in copies
            ]
        )

    def floor_us(self, bandwidth: float) -> float:
        num_bytes = 4 * self.num_keys * self.shape.kv_heads * self.shape.head_size
        return 1e6 * num_bytes / bandwidth
