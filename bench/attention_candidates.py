"""Candidates for attention of uniform batches: their bits against the default's, and their times.

    python bench/attention_candidates.py --out attention_candidates.json
    python bench/attention_candidates.py --shapes 8b --requests 1 --jobs 14

A candidate shares the features of the values out among several programs of one leaf (``slices``),
asks for block numbers and for the parts to be folded before they are needed (``ahead``), or has
other warps. No bit may depend on any of these: every case is first compared with the default, at
its own context and at the borders of leaves and nodes; one that differs is reported and not timed.
Times are microseconds of a layer, from graphs over caches larger than L2.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from kernel_tune import compile_all, tried
from timing import SHAPES, PagedBatch, copy_bandwidth

from specdec.bench.environment import describe
from specdec.kernels import attention_triton
from specdec.kernels.attention_triton import TileConfig

SHAPE_NAMES = ("8b", "1b", "smollm2")
QUERY_LENS = (1, 5)
# (requests, context)
LOADS = ((1, 128), (1, 1024), (1, 4096), (1, 16384), (8, 1024), (8, 4096))
CANDIDATES = {
    f"slices={slices}{' ahead' if ahead else ''} warps={warps}": TileConfig(
        num_warps=warps, stages=2, slices=slices, ahead=ahead
    )
    for slices, ahead, warps in (
        *((1, True, 4), (1, True, 8), (2, False, 4), (2, True, 4), (2, True, 8)),
        *((4, True, 4), (1, False, 8)),
    )
}
BORDERS = (0, 1, 126, 127, 128, 507, 511, 512, 1020, 2047)


def compile_one(name: str, query_len: int, num_reqs: int, config: TileConfig | None) -> None:
    batch = PagedBatch(SHAPES[name], num_reqs, 64, query_len, copies=1)
    tried(lambda: attention_triton.paged_attention(*batch.arguments(), config=config), config)


def same_bits(batch: PagedBatch, context: int, config: TileConfig) -> bool:
    """Against the default, at the batch's context and at the borders before it."""
    query, keys, values, table, starts, _, _, *rest = batch.arguments()
    scratch = attention_triton.Scratch()
    for length in (context, *(each for each in BORDERS if each < context)):
        lens = torch.full_like(batch.tables[2], length)
        call = (query, keys, values, table, starts, lens, lens + batch.query_len, *rest)
        wanted = attention_triton.paged_attention(*call)
        for _ in range(3):
            got = attention_triton.paged_attention(*call, scratch=scratch, config=config)
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
    for label, config in CANDIDATES.items():
        if not tried(lambda config=config: same_bits(batch, context, config), label):
            row["other_bits"].append(label)
            continue
        row["us"][label] = round(batch.us(config=config), 2)
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
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    loads = [load for load in LOADS if load[0] in options.requests]
    kernels = itertools.product(options.shapes, QUERY_LENS, sorted({n for n, _ in loads}))
    todo = [
        (name, query_len, num_reqs, config)
        for name, query_len, num_reqs in kernels
        for config in (None, *CANDIDATES.values())
    ]
    compile_all(compile_one, options.jobs, todo)
    bandwidth = copy_bandwidth()
    rows = [
        measure(name, query_len, num_reqs, context, bandwidth)
        for name in options.shapes
        for query_len in QUERY_LENS
        for num_reqs, context in loads
    ]
    for label in CANDIDATES:
        timed = [row for row in rows if label in row["us"]]
        ratios = [row["us"][label] / row["default_us"] for row in timed]
        if ratios:
            print(f"{label:26} {min(ratios):.2f} to {max(ratios):.2f} of the default's time")
    report = {"environment": describe(torch.device("cuda")), "rows": rows}
    text = json.dumps(report)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
