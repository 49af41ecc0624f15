"""What adapters cost the four linear layers of a decoder layer on a GPU: bits, then time.

8B-shaped layers, all weights from memory. Layers without adapters and with them are captured in
graphs and replayed in turns; the table gives microseconds a layer, medians over the turns.
``--chunks`` tries other numbers of chunks of the input features than ``lora_triton.MAX_CHUNKS``.

    python bench/lora_layers.py --ranks 16 8 64 --chunks 4 2
"""

import argparse
import statistics
from collections.abc import Callable, Iterator

import torch
from timing import BF16, SHAPES, randn
from torch import Tensor

from specdec.kernels import lora, lora_triton
from specdec.kernels.activation import silu_mul
from specdec.kernels.linear import configure_exact_blas, linear, linear_silu_mul
from specdec.kernels.lora_rows import slot_tiles

NUM_SLOTS = 8
LAYERS, COPIES = 8, 2
TURNS = 15
ROWS_OF_REQUEST = 5
PARTS = {"qkv": (4096, 1024, 1024), "o": (4096,), "gate_up": (14336, 14336), "down": (4096,)}
POINTS = [(5, "one"), (40, "one"), (40, "eight"), (320, "one"), (320, "eight")]

Layer = list[tuple[str, Tensor, Tensor, Tensor]]  # name, weight, A, B
Outputs = list[Tensor]


class Batch:
    """Rows of requests of five tokens, their adapters, and what is made of them once a pass."""

    def __init__(self, num_rows: int, adapters: str) -> None:
        requests = torch.arange(num_rows, device="cuda") // ROWS_OF_REQUEST
        self.slots = {
            "one": torch.zeros_like(requests),
            "eight": requests % NUM_SLOTS,
            "mixed": requests % (NUM_SLOTS + 1) - 1,
        }[adapters]
        num_groups = 1 + min(-(-num_rows // ROWS_OF_REQUEST), NUM_SLOTS)
        self.tiles = slot_tiles(self.slots, num_groups, BF16)
        generator = torch.Generator("cuda").manual_seed(3)
        self.wide = torch.randn(320, 4096, generator=generator, device="cuda").to(BF16)[:num_rows]
        self.ffn = torch.randn(320, 14336, generator=generator, device="cuda").to(BF16)[:num_rows]

    def input_of(self, name: str) -> Tensor:
        return self.ffn if name == "down" else self.wide


def base(batch: Batch, layer: Layer) -> Outputs:
    return [
        linear_silu_mul(batch.wide, weight)
        if name == "gate_up"
        else linear(batch.input_of(name), weight)
        for name, weight, _, _ in layer
    ]


def adapted(batch: Batch, layer: Layer) -> Outputs:
    """As the model does it."""
    return [
        lora.lora_linear_silu_mul(batch.wide, weight, a, b, batch.slots, batch.tiles)
        if name == "gate_up"
        else lora.lora_linear(
            batch.input_of(name), weight, None, a, b, batch.slots, PARTS[name], batch.tiles
        )
        for name, weight, a, b in layer
    ]


def steps(batch: Batch, layer: Layer) -> Outputs:
    """Product, then deltas, then the activation: the bits to have."""
    outs = []
    for name, weight, a, b in layer:
        x = batch.input_of(name)
        out = lora.lora_delta_(linear(x, weight), x, a, b, batch.slots, PARTS[name])
        outs.append(silu_mul(out) if name == "gate_up" else out)
    return outs


VARIANTS: dict[str, Callable[[Batch, Layer], Outputs]] = {"base": base, "adapted": adapted}


def make_layers(rank: int, weights: list[dict[str, Tensor]]) -> list[Layer]:
    """The slot after the last is NaN: no row has it."""
    layers = []
    for own in weights:
        layer = []
        for name, weight in own.items():
            parts, depth = PARTS[name], weight.shape[1]
            a = randn(NUM_SLOTS + 1, len(parts) * rank, depth, scale=depth**-0.5)
            b = randn(NUM_SLOTS + 1, sum(parts), rank, scale=0.2 * rank**-0.5)
            a[-1] = b[-1] = torch.nan
            layer.append((name, weight, a, b))
        layers.append(layer)
    return layers


def make_weights() -> list[dict[str, Tensor]]:
    return [
        {
            name: randn(outputs, inputs, scale=inputs**-0.5)
            for name, outputs, inputs in SHAPES["8b"].linears()
            if name != "head"
        }
        for _ in range(COPIES)
    ]


def faults(layer: Layer) -> Iterator[str]:
    """Base rows have the base layers' bits, a row the same among any number as in steps."""
    for adapters in ("mixed", "eight", "one"):
        wide = Batch(320, adapters)
        wanted, plain = steps(wide, layer), base(wide, layer)
        own = wide.slots < 0
        for (name, *_), result, product in zip(layer, wanted, plain, strict=True):
            if not torch.equal(result[own], product[own]):
                yield f"{adapters}, {name}: base rows changed"
        for num_rows in (5, 40, 64, 65, 320):
            results = adapted(Batch(num_rows, adapters), layer)
            for (name, *_), result, full in zip(layer, results, wanted, strict=True):
                if not torch.equal(result, full[:num_rows]):
                    off = (result != full[:num_rows]).sum().item()
                    yield f"{adapters}, {name}, {num_rows} rows: {off} of {result.numel()} differ"


def time_point(layers: list[Layer], num_rows: int, adapters: str) -> str:
    batch = Batch(num_rows, adapters)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    kept: dict[str, list[Outputs]] = {}
    for name, variant in VARIANTS.items():
        for layer in layers:
            variant(batch, layer)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            kept[name] = [variant(batch, layers[i % COPIES]) for i in range(LAYERS)]
        graphs[name].replay()
    torch.cuda.synchronize()
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
        for own, layer in zip(outs, layers * (LAYERS // COPIES), strict=True):
            if not all(map(torch.equal, own, VARIANTS[name](batch, layer))):
                return f"{num_rows:4} {adapters:8}  {name}: a replay's bits are not the eager ones"
    plain, value = (statistics.median(times[name]) for name in ("base", "adapted"))
    return f"{num_rows:4} {adapters:8} {plain:8.1f} {value - plain:+9.1f} {value / plain:9.3f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 8, 64])
    parser.add_argument("--chunks", type=int, nargs="+", default=[lora_triton.MAX_CHUNKS])
    arguments = parser.parse_args()
    configure_exact_blas()
    torch.manual_seed(0)
    weights = make_weights()
    print(torch.cuda.get_device_name())
    for rank in arguments.ranks:
        layers = make_layers(rank, weights)
        for chunks in arguments.chunks:
            lora_triton.MAX_CHUNKS = chunks
            found = list(faults(layers[0]))
            bits = "agree" if not found else "DIFFER"
            print(f"\nrank {rank}, {chunks} chunks: bits {bits}", *found, sep="\n  ")
            print("rows adapters  base us  adapted     ratio")
            for point in POINTS:
                print(time_point(layers, *point), flush=True)


if __name__ == "__main__":
    main()
