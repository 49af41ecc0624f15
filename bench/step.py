"""The decode step on one device: its parts, what a token costs, and how long the device idles.

Models are random ones of real shapes; acceptance is simulated, since random models agree on
nothing (``Engine(simulated_acceptance=...)``: every kernel of a real step runs). Sections:

parts  milliseconds of the whole step and of its parts, each a graph replayed alone and timed by
       events: *draft*, *verify* (target forward with head, acceptance and state advance) and
       *accept* (acceptance and state advance, a chain of twenty in one graph). 135M and 1B shapes
       with an n-gram drafter, the 8B shape with a 1B draft model; every row at the same context.
speed  the engine running: milliseconds per token and user of the 8B shape, drafted by a 1B model
       and by n-grams, k=4, and without drafts.
idle   1 - (sum of the graphs' durations timed alone) / wall, over 500 decode steps of one request.

The floor beside a figure is the bytes that must be read (weights, and KV of every row) over the
bandwidth of a device-to-device copy, measured first.

    python bench/step.py --out bench/results/step.json
    python bench/step.py --only parts --shapes 8B
    python bench/step.py --tiny --device cpu
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from made import made_model
from rich.console import Console
from step_engine import RATE, Sizes, StepEngine

from specdec.bench.environment import describe
from specdec.bench.floor import copy_bandwidth
from specdec.tables import plain_table

SECTIONS = ("parts", "speed", "idle")
REAL = Sizes(drafts={"135M": None, "1B": None, "8B": "1B"})
TINY = Sizes(
    drafts={"tiny": "tiny draft"},
    ks=(0, 2, 4),
    counts=(1, 2),
    speed_shape="tiny",
    speed_counts=(1, 2),
    speed_prompt=40,
    speed_steps=6,
    idle_shapes=("tiny",),
    idle_steps=12,
    context=48,
    max_model_len=256,
    blocks_per_row=16,
    replays=3,
)
WIDTH = 4  # drafts of the sections speed and idle


def parts(bench: StepEngine, shape: str, speed: float) -> list[dict[str, Any]]:
    sizes, results = bench.sizes, []
    for num_reqs in sizes.counts:
        for k in sizes.ks:
            times = bench.timer.parts(num_reqs, k, sizes.context)
            if num_reqs == 1:
                bench.timer.rows_at(1, sizes.context, k, temperature=0.8)
                times["verify_sampled"] = bench.timer.pass_ms("target", 1, k, sampled=True)
            floors = bench.floors(num_reqs, k, sizes.context, speed)
            results.append(
                {
                    "shape": shape,
                    "drafter": sizes.drafts[shape] or "ngram",
                    "num_reqs": num_reqs,
                    "k": k,
                    "context": sizes.context,
                    "ms": times,
                    "floor_ms": floors,
                }
            )
            say(f"parts: {shape}, {num_reqs} requests, k={k}: {times['step']:.3f} ms")
    return results


def speed_of(
    bench: StepEngine, drafter: str, ks: Sequence[int], speed: float
) -> list[dict[str, Any]]:
    sizes, results = bench.sizes, []
    for num_reqs in sizes.speed_counts:
        for k in ks:
            requests = bench.running(num_reqs, k, sizes.speed_prompt, sizes.speed_steps)
            row = bench.run_steps(requests, sizes.speed_steps)
            context = (row["first_context"] + row["last_context"]) // 2
            floor = bench.floors(num_reqs, k, context, speed)["step"]
            row |= {
                "shape": sizes.speed_shape,
                "drafter": drafter if k else "none",
                "num_reqs": num_reqs,
                "k": k,
                "floor_ms_per_step": floor,
                "floor_ms_per_token_and_user": floor / row["tokens_per_step"],
            }
            say(
                f"speed: {drafter}, {num_reqs} requests, k={k}: "
                f"{row['ms_per_token_and_user']:.3f} ms per token and user"
            )
            results.append(row)
    return results


def idle_of(bench: StepEngine, shape: str) -> list[dict[str, Any]]:
    """A request's context grows as it runs, so its graph is timed at three contexts of the run."""
    results = []
    for k in (0, WIDTH):
        requests = bench.running(1, k, bench.sizes.context, bench.sizes.idle_steps)
        row = bench.run_steps(requests, bench.sizes.idle_steps)
        ends = row["first_context"], row["last_context"]
        alone = []
        for context in (ends[0], sum(ends) // 2, ends[1]):
            bench.timer.rows_at(1, context, k)
            alone.append(bench.timer.pass_ms("step", 1, k))
        mean = (alone[0] + 4 * alone[1] + alone[2]) / 6
        row |= {
            "shape": shape,
            "k": k,
            "ms_alone": alone,
            "idle_share": 1 - mean / row["ms_per_step"],
        }
        say(f"idle: {shape}, k={k}: {row['idle_share']:.2%} of {row['ms_per_step']:.3f} ms")
        results.append(row)
    return results


def show(report: dict[str, Any]) -> None:
    console = Console(width=110)
    columns = ["requests", "k", "step", "floor", "ratio", "draft", "floor", "verify", "floor"]
    columns += ["ratio", "accept us", "sampling us"]
    for shape in {row["shape"]: None for row in report["parts"]}:
        rows = [row for row in report["parts"] if row["shape"] == shape]
        title = f"{shape}, drafts: {rows[0]['drafter']}, context {rows[0]['context']}, ms"
        table = plain_table(title, [], columns)
        for row in rows:
            times, floor = row["ms"], row["floor_ms"]
            sampled = times.get("verify_sampled")
            table.add_row(
                str(row["num_reqs"]),
                str(row["k"]),
                f"{times['step']:.3f}",
                f"{floor['step']:.3f}",
                f"{times['step'] / floor['step']:.2f}x",
                f"{times['draft']:.3f}" if row["k"] else "-",
                f"{floor['draft']:.3f}" if row["k"] else "-",
                f"{times['verify']:.3f}",
                f"{floor['verify']:.3f}",
                f"{times['verify'] / floor['verify']:.2f}x",
                f"{1e3 * times['accept']:.1f}",
                f"{1e3 * (sampled - times['verify']):.0f}" if sampled is not None else "-",
            )
        console.print(table)
    if report["speed"]:
        names = ["requests", "k", "tokens/step", "ms/step", "floor", "ms/token, user", "floor"]
        table = plain_table(f"Running, acceptance {RATE} simulated", ["drafts"], names)
        for row in report["speed"]:
            table.add_row(
                row["drafter"],
                str(row["num_reqs"]),
                str(row["k"]),
                f"{row['tokens_per_step']:.2f}",
                f"{row['ms_per_step']:.3f}",
                f"{row['floor_ms_per_step']:.3f}",
                f"{row['ms_per_token_and_user']:.3f}",
                f"{row['floor_ms_per_token_and_user']:.3f}",
            )
        console.print(table)
    if report["idle"]:
        names = ["k", "steps", "ms/step", "alone", "idle"]
        table = plain_table("Idle share, one request", ["shape"], names)
        for row in report["idle"]:
            alone = " / ".join(f"{ms:.3f}" for ms in row["ms_alone"])
            numbers = [str(row["k"]), str(row["steps"]), f"{row['ms_per_step']:.3f}", alone]
            table.add_row(row["shape"], *numbers, f"{row['idle_share']:.2%}")
        console.print(table)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(SECTIONS), help="of parts, speed, idle")
    parser.add_argument("--shapes", help="of 135M, 1B, 8B: only these in the sections")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    sections = set(options.only.split(","))
    if unknown := sections - set(SECTIONS):
        parser.error(f"--only: {sorted(unknown)} are not among {SECTIONS}")
    sizes = TINY if options.tiny else REAL
    shapes = options.shapes.split(",") if options.shapes else list(sizes.drafts)
    if unknown := set(shapes) - set(sizes.drafts):
        parser.error(f"--shapes: {sorted(unknown)} are not among {list(sizes.drafts)}")
    device = torch.device(options.device)
    begun = time.perf_counter()
    speed = copy_bandwidth(device)
    report: dict[str, Any] = {
        "benchmark": "step",
        "schema_version": 1,
        **describe(device),
        "bandwidth_bytes_per_second": speed,
        "simulated_acceptance": RATE,
        "parts": [],
        "speed": [],
        "idle": [],
    }
    say(f"copy bandwidth {speed / 1e12:.2f} TB/s")

    def save() -> None:
        report["seconds"] = time.perf_counter() - begun
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    for shape in shapes:
        target = made_model(shape, device)
        name = sizes.drafts[shape]
        runs_alone = shape == sizes.speed_shape and "speed" in sections
        if name is None or runs_alone or (shape in sizes.idle_shapes and "idle" in sections):
            bench = StepEngine(target, None, sizes)
            if name is None and "parts" in sections:
                report["parts"] += parts(bench, shape, speed)
            if runs_alone:
                report["speed"] += speed_of(bench, "ngram", (0, WIDTH), speed)
            if shape in sizes.idle_shapes and "idle" in sections:
                report["idle"] += idle_of(bench, shape)
            bench.close()
            save()
        if name is not None and ("parts" in sections or runs_alone):
            draft = made_model(name, device)
            bench = StepEngine(target, draft, sizes)
            if "parts" in sections:
                report["parts"] += parts(bench, shape, speed)
            if runs_alone:
                report["speed"] += speed_of(bench, f"{name} model", (WIDTH,), speed)
            bench.close()
            del draft
        del target
        save()
        say(f"-- {shape} done after {report['seconds']:.0f} s")
    show(report)


if __name__ == "__main__":
    main()
