"""Each kernel on a GPU beside its roofline: the bytes it must move over the measured bandwidth.

``extra_info`` holds microseconds of one call (the kernel alone, in a graph of many), the floor and
their ratio; the benchmark's own numbers are those of the whole graph. Small kernels move next to
nothing: theirs is the latency of one in a chain.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

ROWS = (1, 5, 40)
SHAPE = "8b"


@pytest.fixture(scope="module")
def bandwidth() -> float:
    from timing import copy_bandwidth

    from specdec.kernels.linear import configure_exact_blas

    configure_exact_blas()
    return copy_bandwidth()


def measure(
    benchmark: Any, calls: list[Callable[[], object]], floor_us: float | None = None
) -> None:
    """Replay a graph of all calls; what is compared between runs is the time of one of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    benchmark.pedantic(replay, rounds=20, warmup_rounds=2)
    # Disabled benchmarks have no numbers.
    if benchmark.stats is not None:
        us = 1e6 * benchmark.stats.stats.median / len(calls)
        benchmark.extra_info["us"] = round(us, 2)
        if floor_us is not None:
            benchmark.extra_info["floor_us"] = round(floor_us, 2)
            benchmark.extra_info["share_of_floor"] = round(floor_us / us, 3)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("layer", ["qkv", "o", "gate_up", "down", "head"])
def test_linear(benchmark: Any, bandwidth: float, layer: str, rows: int) -> None:
    from kernel_times import linear_calls
    from timing import SHAPES, copies_of, randn

    features, depth = next((n, k) for name, n, k in SHAPES[SHAPE].linears() if name == layer)
    copies = [randn(features, depth, scale=0.02) for _ in range(copies_of(2 * features * depth, 8))]
    calls = linear_calls(layer, randn(rows, depth), features)
    # The variant that a decode step takes.
    call = next(calls[name] for name in ("argmax", "silu", "add", "ours") if name in calls)
    floor_us = 1e6 * 2 * features * depth / bandwidth
    measure(benchmark, [lambda w=w: call(w) for w in copies] * 4, floor_us)


@pytest.mark.parametrize("query_len", [1, 5])
@pytest.mark.parametrize(("num_reqs", "context"), [(1, 1024), (8, 1024), (64, 1024)])
def test_attention(
    benchmark: Any, bandwidth: float, num_reqs: int, context: int, query_len: int
) -> None:
    from timing import SHAPES, PagedBatch

    from specdec.kernels import attention_triton

    batch = PagedBatch(SHAPES[SHAPE], num_reqs, context, query_len)
    calls = [
        lambda copy=copy: attention_triton.paged_attention(
            *batch.arguments(copy), scratch=batch.scratch
        )
        for copy in range(len(batch.caches))
    ]
    measure(benchmark, calls * max(1, 32 // len(calls)), batch.floor_us(bandwidth))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "name", ["rms_norm", "add_rms_norm", "rope_write_kv", "silu_mul", "argmax", "gumbel"]
)
def test_between_the_layers(benchmark: Any, bandwidth: float, name: str, rows: int) -> None:
    from kernel_times import row_calls
    from timing import SHAPES

    measure(benchmark, [row_calls(SHAPES[SHAPE], rows)[name]] * 20)


@pytest.mark.parametrize("num_reqs", [1, 64])
@pytest.mark.parametrize("name", ["verify_inputs", "accept", "accept simulated", "ngram"])
def test_around_a_pass(benchmark: Any, name: str, num_reqs: int) -> None:
    from specdec.drafters.ngram import NgramDrafter
    from specdec.verifier.passes import accept_and_commit, verify_pass
    from specdec.verifier.state import DecodeState, RowState

    k, length = 4, 1024
    state = DecodeState(
        max_num_seqs=64, max_model_len=4096, block_size=16, vocab_size=512, device="cuda"
    )
    for row in range(num_reqs):
        ids = [(7 * i + row) % 400 for i in range(length)]
        state.write_row(row, ids, {"end": 4096, "k": k, "draft_len": length - 1}, {})
    slots = torch.arange(num_reqs, device="cuda")
    targets = torch.ones(num_reqs, 1 + k, dtype=torch.int64, device="cuda")
    finite = torch.ones(num_reqs, 1 + k, dtype=torch.bool, device="cuda")
    drafted = torch.full((num_reqs,), k, device="cuda")
    drafts = targets[:, 1:].contiguous()
    rates = torch.full((k,), 0.8, device="cuda") if name == "accept simulated" else None
    drafter = NgramDrafter()

    def call() -> object:
        rows = RowState(state, slots)
        if name == "verify_inputs":
            return verify_pass(rows, drafts, 512)
        if name == "ngram":
            return drafter.propose(rows, k)
        state.seq_len.fill_(length)
        return accept_and_commit(rows, targets, finite, drafts, drafted, rates)

    measure(benchmark, [call] * 20)
