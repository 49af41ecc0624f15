"""Ways to run adapted linear layers on a GPU: bits, and time beside the layers without adapters.

The four linear layers of an 8B-shaped decoder layer, all weights from memory. Base and candidates
are captured in graphs of their own and replayed in turns; the table gives microseconds a layer
beyond the base, medians over the turns. A candidate that fails gives its error instead.

    python bench/lora_candidates.py
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from timing import BF16, SHAPES, randn
from torch import Tensor

from specdec.kernels import (
    linear_triton,
    lora_fused_triton,
    lora_grouped_triton,
    lora_linear_triton,
    lora_rows_triton,
)
from specdec.kernels.linear import configure_exact_blas, linear, linear_silu_mul
from specdec.kernels.lora import lora_linear_reference
from specdec.kernels.lora_rows import SlotTiles

NUM_SLOTS = 8
LAYERS, COPIES = 8, 2
TURNS = 15
WORKERS = 14
PARTS = {"qkv": (4096, 1024, 1024), "o": (4096,), "gate_up": (14336, 14336), "down": (4096,)}
POINTS = [(5, "one"), (40, "one"), (40, "eight"), (320, "one"), (320, "eight")]

Layer = list[tuple[str, Tensor, Tensor, Tensor]]  # name, weight, A, B
Outputs = list[Tensor]


class Batch:
    """Rows of requests of five tokens, their adapters, and what is made of them once a pass."""

    def __init__(self, num_rows: int, adapters: str) -> None:
        self.num_rows = num_rows
        self.adapters = adapters
        requests = torch.arange(num_rows, device="cuda") // 5
        self.slots = {
            "one": torch.zeros_like(requests),
            "eight": requests % NUM_SLOTS,
            "mixed": requests % (NUM_SLOTS + 1) - 1,
        }[adapters]
        self.num_groups = 1 + min(-(-num_rows // 5), NUM_SLOTS)
        generator = torch.Generator("cuda").manual_seed(3)
        self.wide = torch.randn(320, 4096, generator=generator, device="cuda").to(BF16)[:num_rows]
        self.ffn = torch.randn(320, 14336, generator=generator, device="cuda").to(BF16)[:num_rows]
        self.sorted = lora_rows_triton.slot_tiles(self.slots, self.num_groups, BF16)
        self._tiles: dict[int, SlotTiles] = {}

    def tiles(self, block_m: int) -> SlotTiles:
        if block_m not in self._tiles:
            packed = lora_rows_triton.slot_tiles(self.slots, self.num_groups, BF16, block_m=block_m)
            self._tiles[block_m] = SlotTiles.of(packed, self.num_rows, BF16, block_m)
        return self._tiles[block_m]

    def input_of(self, name: str) -> Tensor:
        return self.ffn if name == "down" else self.wide


def base(batch: Batch, layer: Layer) -> Outputs:
    return [
        linear_silu_mul(batch.wide, weight)
        if name == "gate_up"
        else linear(batch.input_of(name), weight)
        for name, weight, _, _ in layer
    ]


def present(batch: Batch, layer: Layer) -> Outputs:
    outs = []
    for name, weight, a, b in layer:
        x = batch.input_of(name)
        if name == "gate_up":
            outs.append(
                lora_linear_triton.lora_linear_silu_mul(x, weight, a, b, batch.slots, batch.sorted)
            )
        else:
            outs.append(
                lora_linear_triton.lora_linear(
                    x, weight, None, a, b, batch.slots, PARTS[name], batch.sorted
                )
            )
    return outs


@dataclass(frozen=True)
class Fused:
    """Shrinking beside few rows' product and expanding in its last stage."""

    max_chunks: int = 8
    one_launch: bool = True
    prefetch: bool = True
    max_lanes: int = 128

    def __call__(self, batch: Batch, layer: Layer) -> Outputs:
        return [
            lora_fused_triton.lora_linear(
                batch.input_of(name),
                weight,
                None,
                a,
                b,
                batch.slots,
                PARTS[name],
                batch.tiles(64).slot,
                silu=name == "gate_up",
                max_chunks=self.max_chunks,
                one_launch=self.one_launch,
                prefetch=self.prefetch,
                max_lanes=self.max_lanes,
            )
            for name, weight, a, b in layer
        ]


@dataclass(frozen=True)
class GroupedLaunches:
    """Shrinking, the product and expanding one after the other, or the first two side by side."""

    block_m: int = 64
    max_chunks: int = 8
    early: bool = True
    block_n: int | None = None
    side: bool = False

    def __call__(self, batch: Batch, layer: Layer) -> Outputs:
        tiles = batch.tiles(self.block_m)
        outs = []
        for name, weight, a, b in layer:
            x, parts = batch.input_of(name), PARTS[name]
            main = torch.cuda.current_stream()
            if self.side:
                side = side_stream()
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    rows = self.shrunk(x, a, tiles, parts)
                product = linear(x, weight)
                main.wait_stream(side)
            else:
                rows = self.shrunk(x, a, tiles, parts)
                product = linear(x, weight)
            outs.append(
                lora_grouped_triton.expand(
                    rows,
                    product,
                    b,
                    parts,
                    silu=name == "gate_up",
                    early=self.early and not self.side,
                    block_n=self.block_n,
                )
            )
        return outs

    def shrunk(
        self, x: Tensor, a: Tensor, tiles: SlotTiles, parts: tuple[int, ...]
    ) -> lora_grouped_triton.Grouped:
        return lora_grouped_triton.shrink(x, a, tiles, len(parts), max_chunks=self.max_chunks)


_SIDE: list[torch.cuda.Stream] = []


def side_stream() -> torch.cuda.Stream:
    if not _SIDE:
        _SIDE.append(torch.cuda.Stream())
    return _SIDE[0]


FEW: dict[str, Fused | GroupedLaunches] = {
    "fused c8": Fused(),
    "fused c4": Fused(4),
    "fused c16": Fused(16),
    "fused c8 no prefetch": Fused(prefetch=False),
    "fused c8 slot by slot": Fused(max_lanes=16),
    "two launches c8": Fused(one_launch=False),
    "two launches c16": Fused(16, one_launch=False),
    "grouped 64 c8": GroupedLaunches(),
}
MANY: dict[str, Fused | GroupedLaunches] = {
    "grouped 64 c8": GroupedLaunches(),
    "grouped 64 c16": GroupedLaunches(max_chunks=16),
    "grouped 64 c4": GroupedLaunches(max_chunks=4),
    "grouped 64 c16 late": GroupedLaunches(max_chunks=16, early=False),
    "grouped 64 c16 n64": GroupedLaunches(max_chunks=16, block_n=64),
    "grouped 32 c16": GroupedLaunches(32, 16),
    "grouped 16 c16": GroupedLaunches(16, 16),
    "side 64 c16": GroupedLaunches(max_chunks=16, side=True),
}
# At the other ranks only these.
SELECTED = {"fused c8", "two launches c8", "grouped 64 c16", "grouped 64 c8"}


def candidates(rank: int, num_rows: int) -> dict[str, Fused | GroupedLaunches]:
    own = FEW if num_rows <= linear_triton.MAX_SKINNY_ROWS else MANY
    return {name: each for name, each in own.items() if rank == 16 or name in SELECTED}


def variants(rank: int, num_rows: int) -> dict[str, Callable[[Batch, Layer], Outputs]]:
    return {"base": base, "present": present, **candidates(rank, num_rows)}


def make_layers(rank: int, copies: int, weights: list[dict[str, Tensor]]) -> list[Layer]:
    """The slot after the last is NaN: no row has it."""
    layers = []
    for copy in range(copies):
        layer = []
        for name, weight in weights[copy].items():
            parts, depth = PARTS[name], weight.shape[1]
            a = randn(NUM_SLOTS + 1, len(parts) * rank, depth, scale=depth**-0.5)
            b = randn(NUM_SLOTS + 1, sum(parts), rank, scale=0.2 * rank**-0.5)
            a[-1] = b[-1] = torch.nan
            layer.append((name, weight, a, b))
        layers.append(layer)
    return layers


def make_weights(copies: int) -> list[dict[str, Tensor]]:
    return [
        {
            name: randn(outputs, inputs, scale=inputs**-0.5)
            for name, outputs, inputs in SHAPES["8b"].linears()
            if name != "head"
        }
        for _ in range(copies)
    ]


def warm(worker: int) -> None:
    """Compile a share of the kernels; all processes have one cache on disk."""
    jobs = [
        (rank, rows, name)
        for rank in (16, 8, 64)
        for rows in (5, 40, 320)
        for name in variants(rank, rows)
    ]
    weights = make_weights(1)
    for rank, rows, name in jobs[worker::WORKERS]:
        layer = make_layers(rank, 1, weights)[0]
        call = variants(rank, rows)[name]
        for adapters in ("one", "eight"):
            try:
                call(Batch(rows, adapters), layer)
                torch.cuda.synchronize()
            except Exception as error:
                print(f"warm-up of {name}, {rows} rows, rank {rank}: {error!r}"[:600], flush=True)
                return


def check(rank: int, layers: list[Layer]) -> Iterator[str]:
    """Bits: base rows those of the product; a row's the same among 5, 40 and 320 rows."""
    layer = layers[0]
    wide = Batch(320, "mixed")
    plain = base(wide, layer)
    own = wide.slots < 0
    references: dict[int, Outputs] = {}
    for chunks in (4, 8, 16):
        references[chunks] = GroupedLaunches(max_chunks=chunks)(wide, layer)
        for result, product in zip(references[chunks], plain, strict=True):
            if not torch.equal(result[own], product[own]):
                yield f"grouped c{chunks}: base rows changed"
    for rows in (5, 40, 320):
        for name, variant in candidates(rank, rows).items():
            wanted = references[variant.max_chunks]
            for adapters in ("mixed", "eight"):
                batch = Batch(rows, adapters)
                # A batch of "eight" has other adapters in the rows' places: compared with itself.
                if adapters == "eight":
                    wanted = GroupedLaunches(max_chunks=variant.max_chunks)(
                        Batch(320, "eight"), layer
                    )
                try:
                    for attempt in range(3):
                        results = variant(batch, layer)
                        for (part, *_), result, full in zip(layer, results, wanted, strict=True):
                            if not torch.equal(result, full[:rows]):
                                off = (result != full[:rows]).sum().item()
                                yield (
                                    f"{name}, {rows} rows, {adapters}, {part}, run {attempt}: "
                                    f"{off} of {result.numel()} differ"
                                )
                except Exception as error:
                    yield f"{name}, {rows} rows: {error!r}"[:600]
    yield from errors(layer)


def errors(layer: Layer) -> Iterator[str]:
    """The error against float64 at most 1.2 times that of the present code."""
    batch = Batch(40, "mixed")
    tried: dict[str, Callable[[Batch, Layer], Outputs]] = {
        "present": present,
        "fused c8": Fused(),
        "grouped 64 c8": GroupedLaunches(),
    }
    norms: dict[str, list[float]] = {}
    for label, variant in tried.items():
        norms[label] = []
        for (name, weight, a, b), result in zip(layer, variant(batch, layer), strict=True):
            if name == "gate_up":
                continue
            wide = (t.double() for t in (batch.input_of(name), weight))
            stacks = (t[:-1].double() for t in (a, b))
            exact = lora_linear_reference(*wide, None, *stacks, batch.slots, PARTS[name])
            norms[label].append(((result.double() - exact).norm() / exact.norm()).item())
    print("relative errors:", {k: [f"{v:.2e}" for v in vs] for k, vs in norms.items()})
    for label, values in norms.items():
        for value, reference in zip(values, norms["present"], strict=True):
            if not value <= 1.2 * reference:
                yield f"{label}: error {value:.2e}, present {reference:.2e}"


def time_point(rank: int, layers: list[Layer], rows: int, adapters: str) -> None:
    batch = Batch(rows, adapters)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    kept: dict[str, list[Outputs]] = {}
    failed: dict[str, str] = {}
    for name, variant in variants(rank, rows).items():
        try:
            for layer in layers:
                variant(batch, layer)
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                kept[name] = [variant(batch, layers[i % COPIES]) for i in range(LAYERS)]
            graphs[name].replay()
            torch.cuda.synchronize()
        except Exception as error:
            failed[name] = repr(error)[:300]
            graphs.pop(name, None)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(1e3 * start.elapsed_time(end) / LAYERS)
    for name, outs in kept.items():
        if name in graphs and name != "base":
            for i, results in enumerate(outs):
                eager = variants(rank, rows)[name](batch, layers[i % COPIES])
                if not all(map(torch.equal, results, eager)):
                    failed[name] = "a replay's bits are not the eager ones"
    medians = {name: statistics.median(values) for name, values in times.items()}
    plain = medians["base"]
    spread = [f"{value:.1f}" for value in statistics.quantiles(times["base"], n=4)[::2]]
    print(f"\nrank {rank}, {rows} rows, {adapters}: base {plain:.1f} us ({' to '.join(spread)})")
    for name, value in medians.items():
        if name != "base":
            print(
                f"   {name:24} +{value - plain:6.1f} us  {value / plain:.3f}x  "
                f"{failed.get(name, '')}"
            )
    for name, text in failed.items():
        if name not in medians:
            print(f"   {name:24} failed: {text}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warm", type=int)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 8, 64])
    arguments = parser.parse_args()
    configure_exact_blas()
    if arguments.warm is not None:
        warm(arguments.warm)
        return
    began = time.perf_counter()
    workers = [
        subprocess.Popen([sys.executable, os.path.abspath(__file__), "--warm", str(i)])
        for i in range(WORKERS)
    ]
    for worker in workers:
        worker.wait()
    print(f"kernels compiled after {time.perf_counter() - began:.0f} s", flush=True)
    torch.manual_seed(0)
    weights = make_weights(COPIES)
    for rank in arguments.ranks:
        layers = make_layers(rank, COPIES, weights)
        try:
            faults = list(check(rank, layers))
        except Exception:
            faults = [traceback.format_exc()[-1500:]]
        print(
            f"\nrank {rank}: bits {'agree' if not faults else 'DIFFER'}", *faults[:24], sep="\n  "
        )
        sys.stdout.flush()
        for rows, adapters in POINTS:
            try:
                time_point(rank, layers, rows, adapters)
            except Exception:
                print(traceback.format_exc()[-1500:], flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
