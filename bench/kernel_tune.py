"""Time candidate configurations of the linear and attention kernels on one GPU.

    python bench/kernel_tune.py linear --out tune.json --write
    python bench/kernel_tune.py linear --out tune.json --models smollm2 --rows 5
    python bench/kernel_tune.py attention --out tune.json

Candidates are compiled by worker processes first (``--jobs``), then timed one by one; one with
other bits than the present tile is left out. Prints the best few of each case and beside them the
default's time. ``--write`` puts the tiles of linear layers that beat the default by 2% into this
GPU's file in ``kernels/tuned``.
"""

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from timing import HALVES, SHAPES, PagedBatch, Weights, graph_us, randn

from specdec.kernels import attention_triton, linear_triton, tuning
from specdec.kernels.tuning import TileConfig

LINEAR_ROWS = (5, 20, 64)
# (shape, requests, context, query length)
ATTENTION = [
    ("8b", 1, 1024, 5),
    ("8b", 1, 1024, 1),
    ("8b", 1, 8192, 5),
    ("8b", 8, 1024, 5),
    ("8b", 8, 8192, 5),
    ("8b", 64, 1024, 5),
    ("8b", 64, 8192, 5),
    ("8b", 64, 8192, 9),
    ("smollm2", 1, 1024, 5),
    ("smollm2", 64, 1024, 5),
]


def linear_cases(models: list[str]) -> list[tuple[int, int]]:
    """(outputs, inputs) of every linear layer of the shapes."""
    return list(
        dict.fromkeys((n, k) for name in models for _, n, k in (SHAPES | HALVES)[name].linears())
    )


def linear_candidates(features: int, rows: int) -> list[TileConfig]:
    block_m = max(16, 1 << (rows - 1).bit_length())
    candidates = []
    for block_n, block_k, stages, swap, num_warps in itertools.product(
        (16, 32, 64, 128), (64, 128, 256), (3, 4, 6, 8), (False, True), (4, 8)
    ):
        shared = (block_n + block_m) * block_k * 2 * stages
        # Too little or too much in flight, swaps that fill no instruction, grids of a few programs.
        if not 48 << 10 <= shared <= 200 << 10 or (swap and block_n < 64):
            continue
        if block_n > 16 and features / block_n < 32:
            continue
        # Two groups of warps have an instruction each where the tall side is 128.
        if num_warps == 8 and not (swap and block_n == 128):
            continue
        candidates.append(
            TileConfig(
                block_n=block_n, block_k=block_k, stages=stages, num_warps=num_warps, swap=swap
            )
        )
    return candidates


def attention_candidates() -> list[dict[str, Any]]:
    # One stage ends in an illegal access in 16 bits (H200, Triton 3.6).
    return [
        {"leaf": leaf, "warps": warps, "stages": stages, "per_sm": per_sm}
        for leaf, warps, stages, per_sm in itertools.product((64, 128), (4, 8), (2, 3, 5), (1, 2))
    ]


def tried(call: Callable[[], Any], candidate: object) -> Any:
    """The result of ``call``, or None where the candidate needs more than the GPU has."""
    try:
        result = call()
        torch.cuda.synchronize()
    except triton.runtime.errors.OutOfResources as error:
        print(candidate, error, flush=True)
        return None
    return result


def run_linear(rows: int, config: TileConfig, depth_is_even: bool) -> None:
    depth = 1024 if depth_is_even else 576
    x, weight = randn(rows, depth), randn(256, depth)
    tried(lambda: linear_triton.linear(x, weight, config=config), config)


def attention_options(candidate: dict[str, Any]) -> dict[str, Any]:
    attention_triton.leaf_size = lambda *_: candidate["leaf"]
    config = attention_triton.TileConfig(
        num_warps=candidate["warps"],
        stages=candidate["stages"],
        programs_per_sm=candidate["per_sm"],
    )
    return {"config": config}


def run_attention(case: tuple[str, int, int, int], candidate: dict[str, Any]) -> None:
    name, num_reqs, _, query_len = case
    batch = PagedBatch(SHAPES[name], num_reqs, 64, query_len, copies=1)
    options = attention_options(candidate)
    tried(lambda: attention_triton.paged_attention(*batch.arguments(), **options), candidate)


def compile_all(function: Any, jobs: int, arguments: list[tuple[Any, ...]]) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for future in [pool.submit(function, *each) for each in arguments]:
            future.result()


def show(label: str, results: list[dict[str, Any]], default: float) -> dict[str, Any]:
    results.sort(key=lambda result: result["us"])
    print(f"{label}: default {default:.1f}", flush=True)
    for result in results[:3]:
        rest = {key: value for key, value in result.items() if key != "us"}
        print(f"    {result['us']:.1f}  {rest}", flush=True)
    return {"case": label, "default_us": default, "results": results[:12]}


def tune_linear(jobs: int, models: list[str], all_rows: list[int]) -> list[dict[str, Any]]:
    cases = [(n, k, rows) for n, k in linear_cases(models) for rows in all_rows]
    todo = {
        (rows, config, k % config.block_k == 0)
        for n, k, rows in cases
        for config in linear_candidates(n, rows)
    }
    compile_all(run_linear, jobs, sorted(todo, key=str))
    weights, tables = Weights(), []
    for features, depth, rows in cases:
        # All copies, so that weights come from memory, as they do in a step.
        copies = weights.copies(features, depth)
        x = randn(rows, depth)
        results = []
        wanted = linear_triton.linear(x, copies[0])
        for config in linear_candidates(features, rows):
            got = tried(
                lambda c=config, x=x, w=copies[0]: linear_triton.linear(x, w, config=c), config
            )
            if got is None or not torch.equal(got, wanted):
                print(f"{features}x{depth} rows {rows}: left out {config}", flush=True)
                continue
            calls = [
                lambda w=w, c=config, x=x: linear_triton.linear(x, w, config=c) for w in copies
            ]
            us = tried(lambda c=calls: graph_us(c, 4), config)
            if us is not None:
                results.append(asdict(config) | {"us": us})
        default = graph_us([lambda w=w, x=x: linear_triton.linear(x, w) for w in copies])
        table = show(f"{features}x{depth} rows {rows}", results, default)
        tables.append(table | {"outputs": features, "inputs": depth, "rows": rows})
    return tables


def write_tuned(tables: list[dict[str, Any]]) -> None:
    """Merge the best tiles into the file of this GPU."""
    device = torch.cuda.get_device_name()
    file = tuning.tuned_file(device)
    tiles = dict(tuning.tuned_tiles(device))
    for table in tables:
        best = dict(table["results"][0])
        if best.pop("us") < 0.98 * table["default_us"]:
            block_m = max(16, 1 << (table["rows"] - 1).bit_length())
            tiles[table["outputs"], table["inputs"], block_m] = TileConfig(**best)
    lines = [
        json.dumps({"outputs": n, "inputs": k, "rows": rows, "tile": asdict(tile)})
        for (n, k, rows), tile in sorted(tiles.items())
    ]
    entries = ",\n  ".join(lines)
    file.write_text(f'{{\n "gpu": "{device}",\n "linear": [\n  {entries}\n ]\n}}\n')


def tune_attention(jobs: int) -> list[dict[str, Any]]:
    candidates = attention_candidates()
    default_leaf = attention_triton.leaf_size
    compile_all(run_attention, jobs, list(itertools.product(ATTENTION, candidates)))
    tables = []
    for case in ATTENTION:
        name, num_reqs, context, query_len = case
        batch = PagedBatch(SHAPES[name], num_reqs, context, query_len)
        results = []
        for candidate in candidates:
            options = attention_options(candidate)
            us = tried(lambda b=batch, o=options: b.us(**o), candidate)
            if us is not None:
                results.append(candidate | {"us": us})
        attention_triton.leaf_size = default_leaf
        tables.append(show(str(case), results, batch.us()))
        del batch
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("linear", "attention"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument(
        "--models", nargs="+", choices=sorted(SHAPES | HALVES), default=list(SHAPES)
    )
    parser.add_argument("--rows", nargs="+", type=int, default=LINEAR_ROWS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    begin = time.perf_counter()
    if options.what == "linear":
        tables = tune_linear(options.jobs, options.models, options.rows)
        if options.write:
            write_tuned(tables)
    else:
        tables = tune_attention(options.jobs)
    options.out.write_text(json.dumps(tables, indent=1))
    print(f"done after {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
