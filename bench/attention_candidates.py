"""Candidates for attention of uniform batches: their bits against the default's, and their times.

    python bench/attention_candidates.py --out attention_candidates.json
    python bench/attention_candidates.py --shapes 8b --requests 1 --jobs 14

A candidate has other warps, stages, programs or leaves for each multiprocessor or query rows in a
tile, shares the features of the values out among several programs of one leaf (``slices``), or asks
for block numbers and for the parts to be folded before they are needed (``ahead``). No bit may
depend on any of these: every case is first compared with the default, at its own context and at the
borders of leaves and nodes; one that differs is reported and not timed.
Times are microseconds of a layer, from graphs over caches larger than L2.
"""

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kernel_tune import compile_all, tried
from timing import SHAPES, PagedBatch, copy_bandwidth
from torch import Tensor

from specdec.bench.environment import describe
from specdec.kernels import attention_triton
from specdec.kernels.attention_triton import TileConfig

SHAPE_NAMES = ("8b", "smollm2")
QUERY_LENS = (1, 5, 9)
# (requests, context)
LOADS = (
    *((1, 512), (1, 4096), (1, 32768), (8, 512), (8, 4096), (8, 32768), (64, 512), (64, 4096)),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    config: TileConfig
    max_rows: int | None = None  # query rows of a tile; None: the kernel's rule

    def __str__(self) -> str:
        config = self.config
        words = [f"{config.num_warps} warps", f"{config.stages} stages"]
        words += [f"{config.programs_per_sm} a SM"] if config.programs_per_sm > 1 else []
        words += [f"{config.leaves_per_sm} leaves a SM"] if config.leaves_per_sm > 1 else []
        words += [f"{config.slices} slices"] if config.slices > 1 else []
        words += ["ahead"] if config.ahead else []
        words += [f"tiles of {self.max_rows}"] if self.max_rows else []
        return ", ".join(words)

    def __call__(self, *arguments: object, **options: object) -> Tensor:
        rule = attention_triton.max_tile_rows
        if self.max_rows is not None:
            attention_triton.max_tile_rows = lambda *_: self.max_rows
        try:
            return attention_triton.paged_attention(*arguments, config=self.config, **options)
        finally:
            attention_triton.max_tile_rows = rule


def _candidate(warps: int, stages: int, per_sm: int = 1, **options: Any) -> Candidate:
    max_rows = options.pop("max_rows", None)
    config = TileConfig(num_warps=warps, stages=stages, programs_per_sm=per_sm, **options)
    return Candidate(config, max_rows)


def candidates(query_len: int) -> list[Candidate]:
    made = [
        *(_candidate(4, stages, per_sm) for stages in (2, 3) for per_sm in (1, 2)),
        *(_candidate(4, 2, 2, leaves_per_sm=leaves) for leaves in (2, 4)),
        _candidate(8, 2, 2),
        _candidate(4, 2, 2, ahead=True, leaves_per_sm=2),
        _candidate(4, 2, 2, slices=2, leaves_per_sm=2),
        _candidate(4, 5),
    ]
    if query_len == 9:
        made += [
            _candidate(4, 2, per_sm, leaves_per_sm=per_sm, max_rows=32) for per_sm in (1, 2, 3)
        ]
        made.append(_candidate(8, 5))
    return made


BORDERS = (0, 1, 126, 127, 128, 507, 511, 512, 1020, 2047)


def compile_one(name: str, query_len: int, num_reqs: int, candidate: Candidate | None) -> None:
    batch = PagedBatch(SHAPES[name], num_reqs, 64, query_len, copies=1)
    call = candidate or attention_triton.paged_attention
    tried(lambda: call(*batch.arguments()), candidate)


def same_bits(batch: PagedBatch, context: int, candidate: Candidate) -> bool:
    """Against the default, at the batch's context and at the borders before it."""
    query, keys, values, table, starts, _, _, *rest = batch.arguments()
    scratch = attention_triton.Scratch()
    for length in (context, *(each for each in BORDERS if each < context)):
        lens = torch.full_like(batch.tables[2], length)
        call = (query, keys, values, table, starts, lens, lens + batch.query_len, *rest)
        wanted = attention_triton.paged_attention(*call)
        for _ in range(3):
            got = candidate(*call, scratch=scratch)
            if not torch.equal(got, wanted):
                return False
    return True


def measure(
    name: str, query_len: int, num_reqs: int, context: int, bandwidth: float
) -> dict[str, Any]:
    batch = PagedBatch(SHAPES[name], num_reqs, context, query_len)
    row: dict[str, Any] = {
        "shape": name,
        "query_len": query_len,
        "requests": num_reqs,
        "context": context,
        "floor_us": round(batch.floor_us(bandwidth), 2),
        "default_us": round(batch.us(), 2),
        "us": {},
        "other_bits": [],
    }
    for candidate in candidates(query_len):
        label = str(candidate)
        equal = tried(lambda each=candidate: same_bits(batch, context, each), label)
        if not equal:
            row["other_bits"] += [label] if equal is False else []
            continue
        row["us"][label] = round(batch.us(call=candidate), 2)
    # Again at the end: what the clock did meanwhile.
    row["default_again_us"] = round(batch.us(), 2)
    best = min(row["us"], key=row["us"].get, default=None)
    row["best"] = best
    print(
        f"{name:8} q={query_len} {num_reqs:2} x {context:5}: default {row['default_us']:6.2f} "
        f"(again {row['default_again_us']:6.2f}, floor {row['floor_us']:6.2f})  best "
        f"{row['us'].get(best, 0.0):6.2f}  {best}"
        + (f"  DIFFERENT BITS: {row['other_bits']}" if row["other_bits"] else ""),
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPE_NAMES, default=list(SHAPE_NAMES))
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    loads = [load for load in LOADS if load[0] in options.requests]
    kernels = itertools.product(options.shapes, QUERY_LENS, sorted({n for n, _ in loads}))
    todo = [
        (name, query_len, num_reqs, candidate)
        for name, query_len, num_reqs in kernels
        for candidate in (None, *candidates(query_len))
    ]
    compile_all(compile_one, options.jobs, todo)
    bandwidth = copy_bandwidth()
    rows = [
        measure(name, query_len, num_reqs, context, bandwidth)
        for name in options.shapes
        for query_len in QUERY_LENS
        for num_reqs, context in loads
    ]
    for label in sorted({label for row in rows for label in row["us"]}):
        timed = [row for row in rows if label in row["us"]]
        ratios = [row["us"][label] / row["default_us"] for row in timed]
        print(f"{label:40} {min(ratios):.2f} to {max(ratios):.2f} of the default's time")
    report = {"environment": describe(torch.device("cuda")), "rows": rows}
    text = json.dumps(report)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
