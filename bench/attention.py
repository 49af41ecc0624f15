"""Time the attention backends on uniform batches, against the bytes that they must read.

    python bench/attention.py
    python bench/attention.py --models 8b --requests 64 --backends triton,fa3

One layer over a paged cache: 1, 8 and 64 requests of 1, 5 and 9 query rows at contexts of 512, 4096
and 32768, Llama-8B's heads and a 135M model's. Each time is the median over replays of a CUDA graph
of several calls that read different keys, past what L2 holds. All backends read one random pool,
each in pages of its own size, and must agree with the first before they are timed. The floor is the
bytes of the keys and values over the bandwidth of a device-to-device copy, measured first.

``fa3`` is FlashAttention-3 where a module of that name can be imported: a yardstick, no backend.
"""

import argparse
import importlib.util
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from importlib import metadata as packages
from pathlib import Path
from typing import Any

import torch
from timing import BF16, copies_of, copy_bandwidth, graph_us, randn
from timing import relative_error as error_of
from torch import Tensor

from specdec.verifier.attention.base import AttentionBackend, AttentionMetadata, AttentionNeeds
from specdec.verifier.attention.select import build_backend, default_block_size, unavailable

HEADS = {"8b": (32, 8, 128), "135m": (9, 3, 64)}
REQUESTS = (1, 8, 64)
QUERY_LENS = (1, 5, 9)
CONTEXTS = (512, 4096, 32768)
BACKENDS = ("triton", "flash_attn", "flashinfer", "sdpa")
MAX_PAGE = 256
# sdpa copies every key to float32 first.
MAX_SDPA_KEYS = 1 << 16
# flashinfer compiles its other head sizes for a minute each.
FLASHINFER_HEAD_SIZES = (128,)
RESULTS = Path(__file__).parent / "results" / "attention.json"

Attend = Callable[[Tensor, Tensor, Tensor, AttentionMetadata], Tensor]


class Pool:
    """One random pool of keys and values that every case takes its slots from."""

    def __init__(self, num_elements: int) -> None:
        self._keys, self._values = randn(num_elements), randn(num_elements)

    def caches(
        self, num_slots: int, kv_heads: int, head_size: int, page: int, copies: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Up to ``copies`` pairs of [pages, page, G, D], as many as there are."""
        size = num_slots * kv_heads * head_size
        for copy in range(min(copies, self._keys.numel() // size)):
            part = slice(copy * size, (copy + 1) * size)
            shape = (-1, page, kv_heads, head_size)
            yield self._keys[part].view(shape), self._values[part].view(shape)


class Point:
    """One uniform batch: its shape, and how it lies in pages."""

    def __init__(self, model: str, num_reqs: int, query_len: int, context: int) -> None:
        self.labels = {
            "model": model,
            "requests": num_reqs,
            "query_len": query_len,
            "context": context,
        }
        self.heads, self.kv_heads, self.head_size = HEADS[model]
        self.num_reqs, self.query_len, self.num_keys = num_reqs, query_len, context + query_len
        # Requests fill whole pages of the largest size, so that all sizes read the same slots.
        self.slots_per_req = MAX_PAGE * math.ceil(self.num_keys / MAX_PAGE)
        self.num_slots = num_reqs * self.slots_per_req
        self.query = randn(num_reqs * query_len, self.heads, self.head_size)
        self._order = torch.randperm(self.num_slots // MAX_PAGE, device="cuda")

    @property
    def num_bytes(self) -> int:
        return 4 * self.num_reqs * self.num_keys * self.kv_heads * self.head_size

    def metadata(self, page: int) -> AttentionMetadata:
        def integers(value: int) -> Tensor:
            return torch.full((self.num_reqs,), value, dtype=torch.int32, device="cuda")

        inside = torch.arange(MAX_PAGE // page, device="cuda")
        table = (self._order[:, None] * (MAX_PAGE // page) + inside).view(self.num_reqs, -1)
        width = math.ceil(self.num_keys / page)
        ends = torch.arange(self.num_reqs + 1, dtype=torch.int32, device="cuda")
        return AttentionMetadata(
            query_start_loc=ends * self.query_len,
            context_lens=integers(self.num_keys - self.query_len),
            seq_lens=integers(self.num_keys),
            block_table=table[:, :width].int().contiguous(),
            slot_mapping=torch.full((len(self.query),), -1, device="cuda"),
            max_query_len=self.query_len,
            uniform=True,
        )

    def needs(self, page: int) -> AttentionNeeds:
        return AttentionNeeds(
            head_size=self.head_size, dtype=BF16, block_size=page, device=torch.device("cuda")
        )


def backend_call(backend: AttentionBackend) -> Attend:
    def attend(query: Tensor, keys: Tensor, values: Tensor, given: AttentionMetadata) -> Tensor:
        return backend.forward(query, keys, values, given, query.shape[-1] ** -0.5)

    return attend


def fa3_call() -> Attend:
    import fa3

    def attend(query: Tensor, keys: Tensor, values: Tensor, given: AttentionMetadata) -> Tensor:
        longest = given.block_table.shape[1] * keys.shape[1]
        return fa3.paged(
            *(query, keys, values, given.query_start_loc, given.max_query_len, given.seq_lens),
            *(longest, given.block_table),
        )

    return attend


class Contestant:
    """Something to time, the size of its pages, and what it cannot do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.backend: AttentionBackend | None = None
        if name == "fa3":
            self.page, self.attend = MAX_PAGE, fa3_call()
            return
        self.page = default_block_size(name)
        self.backend = build_backend(name, torch.device("cuda"))
        self.attend = backend_call(self.backend)

    def refuses(self, point: Point) -> str | None:
        if self.backend is None:
            return None
        if self.name == "sdpa" and point.num_reqs * point.num_keys > MAX_SDPA_KEYS:
            return "copies every key"
        if self.name == "flashinfer" and point.head_size not in FLASHINFER_HEAD_SIZES:
            return "would be compiled"
        return self.backend.unsupported(point.needs(self.page))

    def us(self, point: Point, pool: Pool) -> tuple[float, Tensor]:
        """Microseconds of a call, and the result over the first copy of the keys."""
        size = (point.num_slots, point.kv_heads, point.head_size, self.page)
        caches = list(pool.caches(*size, copies_of(point.num_bytes, 48)))
        first = point.metadata(self.page)
        result = self.attend(point.query, *caches[0], first)

        def call(keys: Tensor, values: Tensor) -> Tensor:
            # What a backend prepares once per pass is there already, as for all layers but one.
            return self.attend(point.query, keys, values, first)

        # Enough calls that the graph's own start does not count.
        repeats = max(1, min(16, math.ceil(16 / len(caches)), (4 << 30) // point.num_bytes))
        calls = [lambda pair=pair: call(*pair) for pair in caches * repeats]
        return graph_us(calls, replays=7), result


def contestants(names: list[str]) -> tuple[list[Contestant], dict[str, str]]:
    found, missing = [], {}
    for name in names:
        if name == "fa3":
            reason = None if importlib.util.find_spec("fa3") else "fa3 cannot be imported"
        else:
            reason = unavailable(name)
        if reason is None:
            found.append(Contestant(name))
        else:
            missing[name] = reason
    return found, missing


def measure(point: Point, entries: list[Contestant], pool: Pool, bandwidth: float) -> dict:
    row: dict[str, Any] = dict(point.labels)
    row["floor_us"] = round(1e6 * point.num_bytes / bandwidth, 2)
    row["times_us"], row["refused"] = {}, {}
    wanted: Tensor | None = None
    for entry in entries:
        reason = entry.refuses(point)
        if reason is not None:
            row["refused"][entry.name] = reason
            continue
        us, result = entry.us(point, pool)
        wanted = result if wanted is None else wanted
        error = error_of(result, wanted)
        assert error < 1e-2, (point.labels, entry.name, error)
        row["times_us"][entry.name] = round(us, 2)
    return row


def report(row: dict[str, Any]) -> None:
    words = [f"{row['model']:>5} {row['requests']:>3} x {row['query_len']}, {row['context']:>6}"]
    words.append(f"floor {row['floor_us']:8.1f}")
    for name, us in row["times_us"].items():
        words.append(f"{name} {us:8.1f} (x{us / row['floor_us']:.2f})")
    print("  ".join(words), flush=True)


def versions() -> dict[str, str]:
    found = {"torch": torch.__version__}
    for name in ("triton", "flash-attn", "flashinfer-python"):
        try:
            found[name] = packages.version(name)
        except packages.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(HEADS))
    parser.add_argument("--requests", default=",".join(map(str, REQUESTS)))
    parser.add_argument("--query-lens", default=",".join(map(str, QUERY_LENS)))
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--backends", default=",".join((*BACKENDS, "fa3")))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    models = options.models.split(",")
    counts, query_lens, contexts = (
        [int(part) for part in text.split(",")]
        for text in (options.requests, options.query_lens, options.contexts)
    )
    names = options.backends.split(",")
    if unknown := (set(models) - set(HEADS)) | (set(names) - {*BACKENDS, "fa3"}):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")

    begin = time.perf_counter()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    entries, missing = contestants(names)
    for name, reason in missing.items():
        print(f"{name}: {reason}", flush=True)
    points = list(itertools.product(models, counts, query_lens, contexts))
    # The largest case is read once, smaller ones in copies.
    largest = max(Point(*labels).num_slots * math.prod(HEADS[labels[0]][1:]) for labels in points)
    pool = Pool(max(largest, 200 << 20))
    rows = []
    for labels in points:
        rows.append(measure(Point(*labels), entries, pool, bandwidth))
        report(rows[-1])
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "bandwidth": bandwidth,
        "missing": missing,
        "points": rows,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    ratios = [
        (row["times_us"]["triton"] / row["times_us"]["fa3"], row)
        for row in rows
        if {"triton", "fa3"} <= row["times_us"].keys()
    ]
    if ratios:
        worst, row = max(ratios, key=lambda pair: pair[0])
        result["worst_triton_over_fa3"] = round(worst, 3)
        place = {label: row[label] for label in ("model", "requests", "query_len", "context")}
        print(f"triton over fa3 at most {worst:.2f}, at {place}", flush=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "points"}))


if __name__ == "__main__":
    main()
