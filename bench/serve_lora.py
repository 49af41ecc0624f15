"""Many adapters from one server: who gets how many tokens, how soon, and how many drafts fit.

Starts ``specdec serve``, sends it requests that arrive at random (Poisson) for the base model and
its adapters (Zipf: the n-th is asked for 1/n as often as the first), and reports what the clients
of each saw. Tokens are counted by the server's usage, never by chunks.

    python bench/serve_lora.py --out build/serve_lora      the bundled model, two trained adapters
    python bench/serve_lora.py --tiny                      a random model, to try the script
    python bench/serve_lora.py --model M --draft D --lora a=DIR --lora b=DIR --device cuda
    python bench/serve_lora.py --model M --num-adapters 100 -- --max-loras 8
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import torch
from serve_clients import Served, client_for
from style_adapters import random_adapters, tiny_model, train_styles

from specdec.bench.environment import describe
from specdec.bench.prompts import load_prompts
from specdec.server.command import named_paths

BASE = "base"
READY_SECONDS = 900


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="default: the bundled SmolLM2")
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    parser.add_argument("--lora", action="append", metavar="NAME=PATH")
    parser.add_argument("--num-adapters", type=int, help="make this many random adapters")
    parser.add_argument("--rank", type=int, default=8, help="of random adapters")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--k", default="4", help="a number or auto")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rate", type=float, help="arrivals per second; default 0.5, GPU 20")
    parser.add_argument("--zipf", type=float, default=1.0, help="0: all are asked for alike")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, default=Path("build/serve_lora"), help="for adapters")
    parser.add_argument("--out", type=Path, help="folder for the JSON file and the plot")
    parser.add_argument("server_options", nargs="*", help="after --: options of specdec serve")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    on_gpu = args.device.startswith("cuda") or (args.device == "auto" and torch.cuda.is_available())
    rate = args.rate if args.rate is not None else 20.0 if on_gpu else 0.5
    with tempfile.TemporaryDirectory() as scratch:
        model, adapters = materials(args, Path(scratch))
        traffic = make_traffic(args, rate, [BASE, *adapters])
        with Server(args, model, adapters) as server:
            results = asyncio.run(drive(server.url, traffic, args))
    report = {
        "benchmark": "serve_lora",
        "environment": describe(torch.device("cuda" if on_gpu else "cpu")),
        "settings": {
            "model": "tiny random" if args.tiny else args.model or "SmolLM2-135M-Instruct",
            "adapters": list(adapters),
            "rate": rate,
            **{name: value for name, value in vars(args).items() if name in _SETTINGS},
        },
        "ready_seconds": server.ready_seconds,
        **results,
    }
    show(report)
    if args.out is not None:
        save(report, args.out)


_SETTINGS = ("draft", "k", "requests", "zipf", "max_tokens", "temperature", "seed", "device")
_SETTINGS += ("server_options",)


def materials(args: argparse.Namespace, scratch: Path) -> tuple[str | None, dict[str, str]]:
    """The model to serve, None for the bundled one, and its adapters by name."""
    if args.lora:
        return args.model, named_paths("--lora", args.lora)
    model = tiny_model(scratch / "model") if args.tiny else args.model
    if model is None:
        if args.num_adapters is not None:
            raise SystemExit("--num-adapters needs --model or --tiny")
        return None, train_styles(args.work)
    count = 3 if args.num_adapters is None else args.num_adapters
    return model, random_adapters(scratch, model, count, args.rank)


def make_traffic(
    args: argparse.Namespace, rate: float, models: list[str]
) -> list[tuple[float, str, str]]:
    """(seconds from the start, model, prompt) of each request; the same for the same seed."""
    draw = random.Random(args.seed)
    weights = [1 / rank**args.zipf for rank in range(1, len(models) + 1)]
    prompts = [prompt.text for prompt in load_prompts()]
    at, traffic = 0.0, []
    for _ in range(args.requests):
        at += draw.expovariate(rate)
        traffic.append((at, draw.choices(models, weights)[0], draw.choice(prompts)))
    return traffic


class Server:
    """``specdec serve`` as a process of its own."""

    def __init__(
        self, args: argparse.Namespace, model: str | None, adapters: dict[str, str]
    ) -> None:
        self._command = [sys.executable, "-m", "specdec", "serve", *([model] if model else [])]
        self._command += [f"--lora={name}={path}" for name, path in adapters.items()]
        self._command += ["--served-model-name", BASE, "--port", "0", "--draft", args.draft]
        self._command += ["--k", args.k, "--device", args.device, *args.server_options]

    def __enter__(self) -> "Server":
        started = time.perf_counter()
        # Outside the checkout: its folders must not be found as top-level modules.
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "http://" not in line:
            raise SystemExit(f"the server did not start: exit code {self._process.wait()}")
        self.ready_seconds = time.perf_counter() - started
        self.url = next(word for word in line.split() if word.startswith("http://"))
        print(line.strip(), file=sys.stderr)
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait(60)


async def drive(
    url: str, traffic: list[tuple[float, str, str]], args: argparse.Namespace
) -> dict[str, Any]:
    """Warm up, then run the traffic, then ask every model the same thing."""
    models = sorted({model for _, model, _ in traffic})
    client = client_for(url, args)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        await asyncio.gather(*(client(model, "Hello", 8) for model in models))
        before = (await http.get("/stats")).json()
        started, late = time.perf_counter(), 0.0

        async def one(at: float, model: str, prompt: str) -> Served:
            nonlocal late
            await asyncio.sleep(at - (time.perf_counter() - started))
            late = max(late, time.perf_counter() - started - at)
            return await client(model, prompt, args.max_tokens)

        served = await asyncio.gather(*(one(*request) for request in traffic))
        seconds = time.perf_counter() - started
        after = (await http.get("/stats")).json()
        samples = [await client(model, "What is a rainbow?", 24) for model in models]
    return {
        "seconds": seconds,
        "client_late_seconds": late,
        "client": client.name,
        "total": summary(served, seconds),
        "by_model": {
            name: summary([each for each in served if each.model == name], seconds)
            | {"steps_by_mode": row_steps(before, after, name)}
            for name in models
        },
        "graphs": graph_hits(before, after),
        "adapter_loads": after["adapter_loads"] - before["adapter_loads"],
        "samples": {sample.model: sample.text for sample in samples},
    }


def summary(served: list[Served], seconds: float) -> dict[str, Any]:
    drafted = sum(each.drafted for each in served)
    tokens = sum(each.tokens for each in served)
    return {
        "requests": len(served),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "ttft_ms": quantiles(1e3 * each.first_token for each in served),
        "per_token_ms": quantiles(
            1e3 * each.per_token for each in served if each.per_token is not None
        ),
        "request_ms": quantiles(1e3 * each.last_token for each in served),
        "drafted": drafted,
        "acceptance_rate": sum(each.accepted for each in served) / drafted if drafted else 0.0,
    }


def quantiles(values: Iterable[float]) -> dict[str, float | None]:
    found = sorted(values)
    if not found:
        return {"p50": None, "p95": None}
    return {
        "p50": statistics.median(found),
        "p95": found[min(len(found) - 1, int(0.95 * len(found)))],
    }


def row_steps(before: dict[str, Any], after: dict[str, Any], model: str) -> dict[str, int]:
    """Decode steps of one model's requests by graph mode, during the traffic."""
    name = model if model in after["adapters"] else "base"
    earlier = before["row_steps_by_adapter"].get(name, {})
    return {
        mode: steps - earlier.get(mode, 0)
        for mode, steps in after["row_steps_by_adapter"].get(name, {}).items()
    }


def full_share(steps: dict[str, int]) -> str:
    total = sum(steps.values())
    return f"{steps.get('FULL', 0) / total:.0%}" if total else "-"


def graph_hits(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Launches by mode, and replays of graphs with and without adapters, during the traffic."""

    def replays(stats: dict[str, Any], has_lora: bool) -> int:
        return sum(g["replays"] for g in stats["graphs"] if g["has_lora"] == has_lora)

    return {
        "launches_by_mode": {
            mode: count - before["steps_by_mode"][mode]
            for mode, count in after["steps_by_mode"].items()
        },
        "replays_with_adapters": replays(after, True) - replays(before, True),
        "replays_without": replays(after, False) - replays(before, False),
        "padded_row_share": after["padded_row_share"],
    }


def show(report: dict[str, Any]) -> None:
    from rich.console import Console

    from specdec.tables import plain_table

    numbers = ["requests", "tokens", "tok/s", "TTFT", "p95", "ms/tok", "p95", "accepted"]
    numbers.append("FULL")
    settings = report["settings"]
    table = plain_table(f"{settings['model']}, draft {settings['draft']}", ["model"], numbers)
    for name, row in {**report["by_model"], "all": report["total"]}.items():
        times = [row[key][p] for key in ("ttft_ms", "per_token_ms") for p in ("p50", "p95")]
        table.add_row(
            name,
            str(row["requests"]),
            str(row["tokens"]),
            f"{row['tokens_per_second']:.1f}",
            *("-" if value is None else f"{value:.1f}" for value in times),
            f"{row['acceptance_rate']:.0%}" if row["drafted"] else "-",
            full_share(row.get("steps_by_mode", {})),
        )
    console = Console(width=max(110, Console().width))
    console.print(table)
    graphs = report["graphs"]
    console.print(
        f"\nlaunches {graphs['launches_by_mode']}, replays with adapters "
        f"{graphs['replays_with_adapters']}, without {graphs['replays_without']}; "
        f"{report['adapter_loads']} adapter loads; {report['seconds']:.1f} s at "
        f"{settings['rate']:g} requests/s, ready after {report['ready_seconds']:.1f} s",
        highlight=False,
    )
    for name, text in report["samples"].items():
        console.print(f"{name}: {text!r}", highlight=False, markup=False)


def save(report: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "serve_lora.json"
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    try:
        import matplotlib
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report["by_model"]
    figure, axes = pyplot.subplots(1, 4, figsize=(14, 3.6), layout="constrained")
    plots = {
        "tokens/s": [row["tokens_per_second"] for row in rows.values()],
        "TTFT, ms (median)": [row["ttft_ms"]["p50"] or 0 for row in rows.values()],
        "ms per token (median)": [row["per_token_ms"]["p50"] or 0 for row in rows.values()],
        "drafts accepted": [row["acceptance_rate"] for row in rows.values()],
    }
    for axis, (title, values) in zip(axes, plots.items(), strict=True):
        axis.bar(range(len(rows)), values)
        axis.set_xticks(range(len(rows)), list(rows), rotation=30, ha="right", fontsize=8)
        axis.set_title(title, fontsize=10)
    figure.savefig(path.with_suffix(".png"), dpi=120)
    pyplot.close(figure)
    print(f"wrote {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
