"""Ways to run the kernels of a decode step: their bits against the present way's, and their times.

    python bench/step_candidates.py --out step_candidates.json
    python bench/step_candidates.py --shapes smollm2 --plans 'base|ready'

A plan says which linear layers have their weights on hand early, whether norms are fused into them,
which kernels let the next one in before they are over, and how attention is spread. Every plan runs
as a graph of a whole step of one request (context 1024, k=0 and k=4), on two inputs in turn, so that
a value of the replay before cannot pass for this one's; hidden states must equal those of ``base``.
Each plan is first compiled and checked on two layers in a process of its own: one that fails is
reported and left out.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernel_times import Step
from timing import SHAPES, Weights, copies_of, graph_us, randn
from torch import Tensor

from specdec.kernels import (
    argmax_triton,
    attention_triton,
    launch,
    linear,
    linear_triton,
    norm_triton,
    qkv_triton,
)
from specdec.kernels.attention_triton import TileConfig
from specdec.kernels.ready_linear_triton import ReadyConfig, ready_linear, ready_qkv

EPS = 1e-5
KS = (0, 4)
AGAIN = "base again"
SEPARATOR = "|"  # of plans
ALL = frozenset(("norm", "qkv", "attention", "o", "gate_up", "down"))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the kernels of a step run; the default is the present way."""

    ready: dict[str, ReadyConfig] = field(default_factory=dict)
    fuses_norm: bool = False  # needs ``ready`` for qkv and gate_up
    adds_in_linear: bool = False  # the residual stream is added by o and down, not by the norm
    lets_in: frozenset[str] = frozenset()  # kernels, beside the ready ones, that let the next in
    prefetch: int = 0  # bytes of each weight row
    attention: TileConfig | None = None


def ready(qkv: int, o: int, gate_up: int, down: int, **options: Any) -> dict[str, ReadyConfig]:
    """Weight rows of each program; 64 with the wide instruction; ``down_warps``."""
    sizes = {"qkv": qkv, "o": o, "gate_up": gate_up, "down": down}
    configs = {
        name: ReadyConfig(block_n=n, block_m=16 if n == 64 else 8) for name, n in sizes.items()
    }
    configs["down"] = replace(configs["down"], num_warps=options.get("down_warps", 4))
    return configs


def tile(warps: int, slices: int, *, ahead: bool = True, keys_first: bool = True) -> TileConfig:
    return TileConfig(num_warps=warps, stages=2, slices=slices, ahead=ahead, keys_first=keys_first)


FUSED = Plan(ready=ready(16, 16, 32, 16), fuses_norm=True, adds_in_linear=True)
FUSED_ATTENTION = replace(FUSED, lets_in=frozenset(("attention",)))
NORM = frozenset(("norm",))
NORM_ATTENTION = frozenset(("norm", "attention"))
PLANS: dict[str, dict[str, Plan]] = {
    "smollm2": {
        "base": Plan(),
        "norm lets in": Plan(lets_in=NORM),
        "all let in": Plan(lets_in=ALL),
        "all let in, prefetch 1152": Plan(lets_in=ALL, prefetch=1152),
        "ready": Plan(ready=ready(16, 16, 32, 16), lets_in=NORM_ATTENTION, adds_in_linear=True),
        "ready, norms fused": FUSED_ATTENTION,
        "  tiles 16 16 16 16": replace(FUSED_ATTENTION, ready=ready(16, 16, 16, 16)),
        "  tiles 32 16 64 16w8": replace(
            FUSED_ATTENTION, ready=ready(32, 16, 64, 16, down_warps=8)
        ),
        "  tiles 64 64 64 32w8": replace(
            FUSED_ATTENTION, ready=ready(64, 64, 64, 32, down_warps=8)
        ),
        "  attention ahead w4": replace(FUSED_ATTENTION, attention=tile(4, 1, keys_first=False)),
        "  keys first w4": replace(FUSED, attention=tile(4, 1)),
        "  keys first w8": replace(FUSED, attention=tile(8, 1)),
        "  keys first w4 s2": replace(FUSED, attention=tile(4, 2)),
        "  keys first w4 s4": replace(FUSED, attention=tile(4, 4)),
        "  keys first w4 not ahead": replace(FUSED, attention=tile(4, 1, ahead=False)),
    },
    "8b": {
        "base": Plan(),
        "add in linear": Plan(adds_in_linear=True),
        "norm lets in": Plan(lets_in=NORM),
        "norm lets in, add in linear": Plan(lets_in=NORM, adds_in_linear=True),
        "norm lets in, prefetch 256": Plan(lets_in=NORM, prefetch=256),
        "norm lets in, prefetch 512": Plan(lets_in=NORM, prefetch=512),
        "norm lets in, prefetch 1024": Plan(lets_in=NORM, prefetch=1024),
        "norm, attention let in": Plan(lets_in=NORM_ATTENTION),
        "norm, attention, prefetch 512": Plan(lets_in=NORM_ATTENTION, prefetch=512),
        "all let in": Plan(lets_in=ALL),
        "all let in, prefetch 512": Plan(lets_in=ALL, prefetch=512),
        "norm; attention ahead w8 s2": Plan(lets_in=NORM, attention=tile(8, 2, keys_first=False)),
        "norm; keys first w8 s2": Plan(lets_in=NORM, attention=tile(8, 2)),
        "norm, qkv; keys first w8 s2": Plan(
            lets_in=frozenset(("norm", "qkv")), attention=tile(8, 2)
        ),
        "norm, qkv; keys first w8": Plan(lets_in=frozenset(("norm", "qkv")), attention=tile(8, 1)),
    },
}


class PlannedStep(Step):
    """A step of one request that runs by a plan."""

    def __init__(self, name: str, query_len: int, layers: int | None = None) -> None:
        shape = SHAPES[name]
        super().__init__(replace(shape, layers=layers or shape.layers), 1, query_len)
        self.inputs = [self.hidden.clone(), randn(*self.hidden.shape)]
        self.plan = Plan()

    def lets_in(self, name: str) -> None:
        """Whether the kernel launched next lets in the one after it."""
        chosen = name in self.plan.lets_in

        def options(like: Tensor, **_: bool) -> dict[str, Any]:
            return launch.pdl_options(like, lets_in=chosen)

        for module in (linear_triton, norm_triton, attention_triton):
            module.pdl_options = options

    def linear(
        self,
        name: str,
        x: Tensor,
        weight: Tensor,
        residual: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        config = self.plan.ready.get(name)
        if config is not None:
            silu = name == "gate_up"
            return ready_linear(x, weight, norm=norm, residual=residual, silu=silu, config=config)
        self.lets_in(name)
        if name == "gate_up":
            return linear_triton.linear_silu_mul(x, weight)
        return linear_triton.linear(x, weight, residual=residual)

    def project(
        self, x: Tensor, layer: dict[str, Tensor], index: int, norm: tuple[Tensor, float] | None
    ) -> Tensor:
        rest = (None, self.table, self.positions, *self.batch.caches[index], self.slots)
        config = self.plan.ready.get("qkv")
        if config is not None:
            return ready_qkv(x, layer["qkv"], *rest, norm=norm, config=config)
        self.lets_in("qkv")
        return qkv_triton.qkv_rope_write_kv(x, layer["qkv"], *rest)

    def attend(self, query: Tensor, index: int) -> Tensor:
        self.lets_in("attention")
        if self.plan.attention is not None and self.plan.attention.keys_first:
            attention_triton.pdl_options = launch.pdl_options
        _, *rest = self.batch.arguments(index)
        return attention_triton.paged_attention(
            query, *rest, scratch=self.batch.scratch, config=self.plan.attention
        ).flatten(1)

    def normed(self, out: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        self.lets_in("norm")
        if self.plan.adds_in_linear:
            return norm_triton.rms_norm(out, self.scale, EPS), out
        return norm_triton.add_rms_norm(out, residual, self.scale, EPS)

    def run(self) -> tuple[Tensor, Tensor]:
        """Hidden states after the last norm, and the tokens."""
        plan = self.plan
        linear_triton.PREFETCH_BYTES = plan.prefetch
        norm = (self.scale, EPS) if plan.fuses_norm else None
        residual = x = self.hidden
        if not plan.fuses_norm:
            self.lets_in("norm")
            x = norm_triton.rms_norm(residual, self.scale, EPS)
        for index, layer in enumerate(self.layers):
            mixed = self.attend(self.project(x, layer, index, norm), index)
            added = residual if plan.adds_in_linear else None
            x = self.linear("o", mixed, layer["o"], added)
            if plan.fuses_norm:
                residual = x
            else:
                x, residual = self.normed(x, residual)
            gated = self.linear("gate_up", x, layer["gate_up"], norm=norm)
            added = residual if plan.adds_in_linear else None
            x = self.linear("down", gated, layer["down"], added)
            if plan.fuses_norm:
                residual = x
            else:
                x, residual = self.normed(x, residual)
        if plan.fuses_norm:
            self.lets_in("norm")
            x = norm_triton.rms_norm(residual, self.scale, EPS)
        self.lets_in("head")
        return x, argmax_triton.linear_argmax(x, self.head)[0]

    def outputs(self, plan: Plan, rounds: int) -> list[Tensor]:
        """Hidden states of ``rounds`` replays, the inputs taking turns."""
        self.plan = plan
        graph, hidden = self.captured()
        results = []
        for turn in range(rounds):
            self.hidden.copy_(self.inputs[turn % 2])
            graph.replay()
            results.append(hidden.clone())
        torch.cuda.synchronize()
        return results

    def captured(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden, _ = self.run()
        return graph, hidden

    def us(self, plan: Plan) -> float:
        self.plan = plan
        return graph_us([self.run], 25)


def same(step: PlannedStep, plan: Plan, wanted: list[Tensor], rounds: int = 6) -> bool:
    got = step.outputs(plan, rounds)
    return all(torch.equal(each, wanted[turn % 2]) for turn, each in enumerate(got))


def check(name: str, label: str) -> None:
    """Compile a plan and compare two layers of it, at the borders of leaves and blocks too."""
    for k in KS:
        step = PlannedStep(name, 1 + k, layers=2)
        for context in (1024, 1019, 127, 128, 3):
            step.batch.tables[2].fill_(context)
            step.batch.tables[3].fill_(context + 1 + k)
            step.positions.copy_(torch.arange(context, context + 1 + k, device="cuda"))
            blocks = step.batch.tables[0][0].long()[step.positions // 16]
            step.slots.copy_(blocks * 16 + step.positions % 16)
            wanted = step.outputs(Plan(), 2)
            if not wanted[0].isfinite().all() or torch.equal(*wanted):
                raise SystemExit("base gives no fit values")
            if not same(step, PLANS[name][label], wanted):
                raise SystemExit(f"k={k}, context {context}: other bits than base")


def measure(name: str, labels: list[str]) -> None:
    """Times of whole steps; a line of JSON for each plan and k."""
    steps = {k: PlannedStep(name, 1 + k) for k in KS}
    wanted = {k: step.outputs(Plan(), 2) for k, step in steps.items()}
    for step in steps.values():
        step.us(Plan())
    for label in [*labels, AGAIN]:
        plan = PLANS[name].get(label, Plan())
        for k, step in steps.items():
            row = {"shape": name, "k": k, "plan": label, "same": same(step, plan, wanted[k], 4)}
            print(json.dumps(row | {"us": step.us(plan)}), flush=True)


def kernels(name: str) -> None:
    """Microseconds of one kernel among its like, weights from memory, five rows."""
    shape, weights = SHAPES[name], Weights()
    scale = randn(shape.hidden)
    for layer, features, depth in shape.linears():
        if layer in ("head", "qkv"):
            continue
        copies = weights.copies(features, depth)[: copies_of(2 * features * depth, 100)]
        x = randn(5, depth)
        silu = layer == "gate_up"
        residual = None if silu else randn(5, features)
        norm = (scale, EPS) if silu else None

        def present(w: Tensor, x: Tensor = x, norm: Any = norm, residual: Any = residual) -> Any:
            if norm is not None:
                return linear.linear_silu_mul(norm_triton.rms_norm(x, *norm), w)
            return linear_triton.linear(x, w, residual=residual)

        times = {"present": graph_us([partial(present, w) for w in copies])}
        wanted = present(copies[0])
        for block_n, block_m, warps in (
            *((16, 8, 4), (16, 8, 2), (16, 16, 4), (32, 8, 4), (32, 8, 8), (64, 8, 4)),
            *((64, 16, 4), (64, 16, 8)),
        ):
            if block_n * depth * 2 > 160 << 10:
                continue
            config = ReadyConfig(block_n=block_n, block_m=block_m, num_warps=warps)
            label = f"{block_n}x{block_m} w{warps}"
            call = partial(ready_linear, norm=norm, residual=residual, silu=silu, config=config)
            try:
                label += "" if torch.equal(call(x, copies[0]), wanted) else " OTHER BITS"
                times[label] = graph_us([partial(call, x, w) for w in copies])
            except Exception as error:
                print(f"{layer} {label}: {type(error).__name__} {error}"[:300], flush=True)
        print(json.dumps({"shape": name, "kernel": layer, "us": times}), flush=True)


def child(*arguments: str, limit: int = 240) -> tuple[int, str, str]:
    command = [sys.executable, __file__, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        return 124, out.decode() if isinstance(out, bytes) else out, "timed out"
    return done.returncode, done.stdout, done.stderr


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def measured(name: str, labels: list[str]) -> list[dict[str, Any]]:
    """Rows of all plans; one that ends the process is left out and the others go on."""
    rows: list[dict[str, Any]] = []
    while labels:
        code, out, error = child("--measure", name, "--plans", SEPARATOR.join(labels))
        rows += rows_of(out)
        done = {row["plan"] for row in rows_of(out) if row["k"] == KS[-1]}
        rest = [label for label in labels if label not in done]
        if code == 0 or not rest:
            break
        print(f"{name}: {rest[0]} ends the process: {error.strip()[-300:]}", flush=True)
        labels = rest[1:]
    return rows


def show(name: str, rows: list[dict[str, Any]]) -> None:
    print(f"{name}: microseconds of a step" + "".join(f"{f'k={k}':>10}" for k in KS))
    for label in dict.fromkeys(row["plan"] for row in rows):
        cells = []
        for k in KS:
            found = [row for row in rows if row["plan"] == label and row["k"] == k]
            cells.append(f"{found[0]['us']:10.1f}" if found else f"{'-':>10}")
            if found and not found[0]["same"]:
                cells.append(" OTHER BITS")
        print(f"  {label:34}" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(PLANS))
    parser.add_argument("--plans", help="only these, after base")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--out", type=Path)
    for part in ("--check", "--measure", "--kernels"):
        parser.add_argument(part, metavar="SHAPE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    linear.configure_exact_blas()
    wanted = options.plans.split(SEPARATOR) if options.plans else None
    if options.check:
        return check(options.check, options.plans)
    if options.measure:
        return measure(options.measure, wanted or list(PLANS[options.measure]))
    if options.kernels:
        return kernels(options.kernels)
    begin = time.perf_counter()
    report: dict[str, Any] = {"rows": [], "kernels": [], "failed": {}}
    shapes = options.shapes.split(",")
    plans = [
        (name, label)
        for name in shapes
        for label in PLANS[name]
        if wanted is None or label == "base" or label.strip() in [each.strip() for each in wanted]
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        checks = list(pool.map(lambda each: child("--check", each[0], "--plans", each[1]), plans))
    for (name, label), (code, _, error) in zip(plans, checks, strict=True):
        if code:
            report["failed"][f"{name}: {label}"] = error.strip()[-600:]
            print(f"{name}: {label.strip()} left out: {error.strip()[-600:]}", flush=True)
    print(f"-- checked after {time.perf_counter() - begin:.0f} s", flush=True)
    for name in shapes:
        labels = [label for shape, label in plans if shape == name]
        rows = measured(name, [x for x in labels if f"{name}: {x}" not in report["failed"]])
        report["rows"] += rows
        show(name, rows)
        print(f"-- {name} after {time.perf_counter() - begin:.0f} s", flush=True)
    if "smollm2" in shapes:
        code, out, error = child("--kernels", "smollm2")
        report["kernels"] = rows_of(out)
        print(out if code == 0 else f"kernels: {error.strip()[-600:]}\n{out}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(report) + "\n")
    print(f"-- done after {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
