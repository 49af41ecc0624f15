"""Check and time every kernel on one GPU, beside the bandwidth floor.

    python bench/kernel_times.py --out kernels.json
    python bench/kernel_times.py --out kernels.json --sections linear,attention

Sections: linear, rows (the kernels between the linear layers), attention, steps (whole verify
steps made of them). Each read misses L2. The floor is the bytes that must move over the bandwidth
of a device-to-device copy, measured first.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import SHAPES, PagedBatch, Shape, Weights, copy_bandwidth, graph_us, randn
from timing import relative_error as error_of
from torch import Tensor

from specdec.kernels import (
    activation,
    argmax,
    attention,
    attention_triton,
    linear,
    norm,
    qkv,
    ready_linear,
    rope,
    sampling,
)

SECTIONS = ("linear", "rows", "attention", "steps")
ROWS = (1, 5, 20, 40, 64, 160, 320)
# (shape, requests, context)
ATTENTION = [
    ("8b", 1, 1024),
    ("8b", 1, 8192),
    ("8b", 8, 1024),
    ("8b", 8, 8192),
    ("8b", 64, 1024),
    ("8b", 64, 8192),
    ("1b", 1, 1024),
    ("1b", 64, 1024),
    ("smollm2", 1, 1024),
    ("smollm2", 64, 1024),
    ("smollm2", 64, 8192),
]
STEPS = [("8b", 1, 1), ("8b", 1, 5), ("8b", 8, 5), ("1b", 1, 1), ("1b", 1, 2), ("smollm2", 1, 5)]


def report(row: dict[str, Any], *labels: str) -> dict[str, Any]:
    """Print one result on a line, with the ratio of each time to the floor where there is one."""
    floor = row.get("floor_us")
    words = [f"{row[label]!s:>8}" for label in labels]
    if floor is not None:
        words.append(f"floor {floor:7.1f}")
    for key, value in row["times_us"].items():
        ratio = f" (x{value / floor:.2f})" if floor is not None else ""
        words.append(f"{key} {value:.1f}{ratio}")
    print("  ".join(words), flush=True)
    return row


def linear_calls(name: str, x: Tensor, features: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """What can compute this layer: our dispatch, cuBLASLt without split-K, fused kernels."""
    residual = randn(x.shape[0], features)
    if name == "head":
        return {
            "ours": lambda w: linear.linear(x, w, out_dtype=torch.float32),
            "cublaslt": lambda w: torch.mm(x, w.t(), out_dtype=torch.float32),
            "argmax": lambda w: linear.linear_argmax(x, w),
        }
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "ours": lambda w: linear.linear(x, w),
        "cublaslt": lambda w: F.linear(x, w),
    }
    if name == "gate_up":
        calls["silu"] = lambda w: linear.linear_silu_mul(x, w)
    if name in ("o", "down"):
        calls["add"] = lambda w: linear.linear_add(x, w, residual)
    return calls


def linear_section(weights: Weights, bandwidth: float) -> list[dict[str, Any]]:
    results = []
    for shape in SHAPES.values():
        for name, features, depth in shape.linears():
            copies = weights.copies(features, depth)
            for rows in ROWS:
                x = randn(rows, depth)
                calls = linear_calls(name, x, features)
                error = error_of(calls["ours"](copies[0]), x.float() @ copies[0].float().t())
                assert error < 1e-2, (shape.name, name, rows, error)
                row = {
                    "model": shape.name,
                    "layer": name,
                    "rows": rows,
                    "error": error,
                    "floor_us": 1e6 * 2 * features * depth / bandwidth,
                    "times_us": {
                        key: graph_us([lambda w=w, call=call: call(w) for w in copies])
                        for key, call in calls.items()
                    },
                }
                results.append(report(row, "model", "layer", "rows"))
    return results


def row_calls(shape: Shape, rows: int) -> dict[str, Callable[[], object]]:
    """The kernels between the linear layers, on one set of inputs."""
    x, residual = randn(rows, shape.hidden), randn(rows, shape.hidden)
    scale = randn(shape.hidden)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    parts = randn(rows, sum(heads), shape.head_size).split(heads, dim=1)
    table = randn(4096, shape.head_size, dtype=torch.float32)
    positions = torch.arange(rows, device="cuda")
    caches = [randn(64, 16, shape.kv_heads, shape.head_size) for _ in "kv"]
    gate_up = randn(rows, 2 * shape.ffn)
    logits = randn(rows, shape.vocab, dtype=torch.float32)
    return {
        "rms_norm": lambda: norm.rms_norm(x, scale, 1e-5),
        "add_rms_norm": lambda: norm.add_rms_norm(x, residual, scale, 1e-5),
        "rope_write_kv": lambda: rope.rope_write_kv(*parts, table, positions, *caches, positions),
        "silu_mul": lambda: activation.silu_mul(gate_up),
        "argmax": lambda: argmax.argmax(logits),
        "gumbel": lambda: sampling.gumbel_noise(positions, positions[:, None], shape.vocab, 0),
    }


def row_section() -> list[dict[str, Any]]:
    """Latency of one in a chain of twenty of a kind; hardly any bytes move."""
    results = []
    for shape, rows in itertools.product(SHAPES.values(), (1, 5, 40, 320)):
        times = {name: graph_us([call] * 20) for name, call in row_calls(shape, rows).items()}
        row = {"model": shape.name, "rows": rows, "times_us": times}
        results.append(report(row, "model", "rows"))
    return results


def attention_section(bandwidth: float) -> list[dict[str, Any]]:
    results = []
    for name, num_reqs, context in ATTENTION:
        row: dict[str, Any] = {"model": name, "requests": num_reqs, "context": context}
        row["times_us"] = {}
        for query_len in (1, 5):
            batch = PagedBatch(SHAPES[name], num_reqs, context, query_len)
            if num_reqs * context <= 8192:
                wanted = attention.paged_attention_reference(*batch.arguments())
                row["error"] = error_of(attention.paged_attention(*batch.arguments()), wanted)
                assert row["error"] < 1e-2, row
            row["times_us"][f"q{query_len}"] = batch.us()
            row["floor_us"] = batch.floor_us(bandwidth)
            del batch
        results.append(report(row, "model", "requests", "context"))
    for name, tokens in itertools.product(("8b", "smollm2"), (512, 2048)):
        batch = PagedBatch(SHAPES[name], 1, 0, tokens, copies=2)
        arguments = batch.arguments(uniform=False)
        us = graph_us([lambda a=arguments: attention.paged_attention(*a)] * 4)
        shape = batch.shape
        flops = 2 * shape.heads * shape.head_size * tokens * (tokens + 1)
        row = {"model": name, "prompt": tokens, "times_us": {"mixed": us}}
        row["tflops"] = round(1e-6 * flops / us)
        results.append(report(row, "model", "prompt", "tflops"))
    return results


class Step:
    """One verify step of a model of random weights: every kernel, no engine around them."""

    def __init__(self, shape: Shape, num_reqs: int, query_len: int, context: int = 1024) -> None:
        self.shape = shape
        self.batch = PagedBatch(shape, num_reqs, context, query_len, copies=shape.layers)
        self.hidden = randn(num_reqs * query_len, shape.hidden)
        sizes = {name: (n, k) for name, n, k in shape.linears()}
        self.head = randn(*sizes.pop("head"), scale=0.02)
        self.layers = [
            {name: randn(*size, scale=0.02) for name, size in sizes.items()}
            for _ in range(shape.layers)
        ]
        self.scale = randn(shape.hidden)
        self.table = randn(16384, shape.head_size, dtype=torch.float32)
        positions = torch.arange(context, context + query_len, device="cuda")
        self.positions = positions.repeat(num_reqs)
        blocks = self.batch.tables[0].long().gather(1, (positions // 16).expand(num_reqs, -1))
        self.slots = (blocks * 16 + positions % 16).flatten()

    def weight_bytes(self) -> int:
        return 2 * sum(
            n * k * (1 if name == "head" else self.shape.layers)
            for name, n, k in self.shape.linears()
        )

    def attend(
        self, x: Tensor, index: int, layer: dict[str, Tensor], within: tuple[Tensor, float] | None
    ) -> Tensor:
        """Attention of x, or of its norm ``within`` the projection."""
        caches = self.batch.caches[index]
        query = qkv.qkv_rope_write_kv(
            x, layer["qkv"], None, self.table, self.positions, *caches, self.slots, within
        )
        _, *rest = self.batch.arguments(index)
        return attention_triton.paged_attention(
            query, *rest, older_keys_stand=within is not None, scratch=self.batch.scratch
        ).flatten(1)

    def run(self) -> Tensor:
        """As the models do: norms within products where those have their weights on hand."""
        residual, scale = self.hidden, (self.scale, 1e-5)
        if ready_linear.is_ready(residual, [weight.shape[1] for weight in self.layers[0].values()]):
            for index, layer in enumerate(self.layers):
                mixed = self.attend(residual, index, layer, scale)
                residual = ready_linear.ready_linear_add(mixed, layer["o"], residual)
                gated = ready_linear.norm_linear_silu_mul(residual, scale, layer["gate_up"])
                residual = ready_linear.ready_linear_add(gated, layer["down"], residual)
            return linear.linear_argmax(norm.rms_norm(residual, *scale), self.head)[0]
        normed = norm.rms_norm(residual, *scale)
        for index, layer in enumerate(self.layers):
            out = linear.linear(self.attend(normed, index, layer, None), layer["o"])
            normed, residual = norm.add_rms_norm(out, residual, self.scale, 1e-5)
            gated = linear.linear_silu_mul(normed, layer["gate_up"])
            out = linear.linear(gated, layer["down"])
            normed, residual = norm.add_rms_norm(out, residual, self.scale, 1e-5)
        return linear.linear_argmax(normed, self.head)[0]


def step_section(bandwidth: float) -> list[dict[str, Any]]:
    results = []
    for name, num_reqs, query_len in STEPS:
        step = Step(SHAPES[name], num_reqs, query_len)
        row = {
            "model": name,
            "requests": num_reqs,
            "query_len": query_len,
            "floor_us": 1e6 * step.weight_bytes() / bandwidth,
            "times_us": {"step": graph_us([step.run])},
        }
        results.append(report(row, "model", "requests", "query_len"))
        del step
        torch.cuda.empty_cache()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    options = parser.parse_args()
    wanted = options.sections.split(",")
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"--sections: {sorted(unknown)} are not among {SECTIONS}")
    linear.configure_exact_blas()
    begin = time.perf_counter()
    bandwidth = copy_bandwidth()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    result: dict[str, Any] = {
        "device": device,
        "torch": torch.__version__,
        "bandwidth": bandwidth,
    }
    # The largest allocations come and go, so sections follow one another.
    for section in wanted:
        if section == "linear":
            result[section] = linear_section(Weights(), bandwidth)
        elif section == "rows":
            result[section] = row_section()
        elif section == "attention":
            result[section] = attention_section(bandwidth)
        else:
            result[section] = step_section(bandwidth)
        print(f"-- {section} done after {time.perf_counter() - begin:.0f} s", flush=True)
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
