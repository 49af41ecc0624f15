"""One model over two GPUs: the time of a step beside one GPU's, and of the sums between them.

Made weights of the 8B and the 70B shape, drawn on each GPU; layers from the third on add nothing,
and the draft is a model of the first two, so that every draft is accepted at full cost. The 70B
shape does not fit one GPU: there it runs with half of its layers, and says so.

    python bench/tensor_parallel.py --out bench/results/tensor_parallel.json
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from made import made_config

import specdec
from specdec.bench.environment import describe
from specdec.bench.floor import copy_bandwidth, step_bytes
from specdec.kernels.rank_sum import sum_ranks
from specdec.timed import run_timed
from specdec.verifier.made import MadeModel
from specdec.verifier.parallel.communicator import Communicator

PROMPT_TOKENS, NEW_TOKENS = 512, 64
REQUESTS = (1, 8)
WIDTHS = (0, 4)
SILENT_FROM = 2
MESSAGE_ROWS = (1, 5, 8, 40, 64, 320, 2048)
CALLS = 40  # of a collective in one graph
ENGINE_SECONDS = 150  # that one engine may take


def made(shape: str, layers: int | None, std: float) -> tuple[MadeModel, MadeModel]:
    """A target, with so many of its layers, and its first two layers."""
    config = made_config(shape)
    config = replace(config, num_layers=layers or config.num_layers)
    target = MadeModel(config=config, std=std, silent_from=SILENT_FROM)
    draft = MadeModel(config=replace(config, num_layers=SILENT_FROM), std=std)
    return target, draft


def points(shape: str, layers: int | None, ranks: int, device: str) -> Iterator[dict[str, Any]]:
    """Every width and number of requests on one engine."""
    on_gpu = device == "cuda"
    target, draft = made(shape, layers, 0.02 if on_gpu else 0.25)
    new_tokens = NEW_TOKENS if on_gpu else 12
    length = PROMPT_TOKENS if on_gpu else 16
    started = time.perf_counter()
    with specdec.Engine(
        target,
        draft,
        max(WIDTHS),
        device=device,
        cudagraph_mode="FULL_DECODE_ONLY",
        max_num_seqs=max(REQUESTS),
        uniform_request_counts=list(REQUESTS),
        max_model_len=length + new_tokens + 64,
        tensor_parallel_size=ranks,
    ) as engine:
        built = time.perf_counter() - started
        replays = engine._runner.decode_costs()
        model = engine._runner.step.model
        bandwidth = copy_bandwidth(engine.device)
        ids = torch.randint(500, (max(REQUESTS), length), generator=torch.manual_seed(0)).tolist()
        for num_reqs in REQUESTS:
            texts = {}
            for k in WIDTHS:
                params = specdec.SamplingParams(max_new_tokens=new_tokens, k=k, ignore_eos=True)
                runs = [run_timed(engine, ids[:num_reqs], [params] * num_reqs) for _ in range(3)]
                best = min(runs[1:], key=lambda run: max(each.decode_seconds for each in run))
                texts[k] = [each.token_ids for each in best]
                seconds = max(each.decode_seconds for each in best)
                steps = max(each.stats.steps for each in best)
                read = step_bytes(model, engine.drafter, num_reqs, k, length + new_tokens / 2)
                yield {
                    "shape": shape,
                    "layers": target.config.num_layers,
                    "all_layers": layers is None,
                    "ranks": ranks,
                    "requests": num_reqs,
                    "k": k,
                    "tokens_per_step": best[0].stats.mean_tokens_per_step,
                    "step_ms": 1e3 * seconds / steps,
                    # Over short texts, so that attention reads little.
                    "replay_ms": 1e3 * replays.timing(num_reqs, k).short_seconds,
                    "floor_ms": 1e3 * sum(read.values()) / bandwidth,
                    "ms_per_token": 1e3 * seconds / (new_tokens - 1),
                    "equal_to_k0": texts[k] == texts[WIDTHS[0]],
                    "tokens": texts[k],
                    "start_seconds": built,
                }


def collectives(rank: int, size: int, port: int, hidden: int) -> list[dict[str, Any]]:
    """Microseconds of a sum by message size, each way; the same bits are asked of them."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
    communicator = Communicator("bench", store, rank, size, device)
    symmetric = communicator.symmetric
    rows = []
    for num_rows in MESSAGE_ROWS:
        x = torch.randn(num_rows, hidden, device=device).bfloat16()
        own = x.clone()

        def reduced_by_nccl(own: torch.Tensor = own) -> torch.Tensor:
            communicator._data.allreduce([own]).wait()
            return own

        ways: dict[str, Callable[[], torch.Tensor]] = {
            "nccl_all_reduce": reduced_by_nccl,  # the sum in an order of its own
            "nccl_in_rank_order": lambda x=x: sum_ranks(communicator._gather(x)),
        }
        if symmetric is not None and symmetric.holds(x):
            ways["symmetric_memory"] = lambda x=x: symmetric.all_reduce(x)
        row: dict[str, Any] = {"rows": num_rows, "bytes": x.nbytes}
        for name, way in ways.items():
            row[f"{name}_us"] = graph_us(way, device)
        if "symmetric_memory" in ways:
            row["same_bits"] = torch.equal(ways["symmetric_memory"](), ways["nccl_in_rank_order"]())
        rows.append(row)
    communicator.close()
    return rows


def graph_us(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds of one call among many in one graph: the median of its replays."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    return statistics.median(times[2:])


def measured_collectives(hidden: int, failures: list[str]) -> list[dict[str, Any]]:
    """On two processes of their own; how they failed, if they did."""
    port = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False).port
    command = [sys.executable, __file__, "--collectives", str(hidden), "--port", str(port)]
    processes = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=ENGINE_SECONDS)[0] for process in processes]
        codes = [process.returncode for process in processes]
    except subprocess.TimeoutExpired:
        outputs, codes = [], [f"none after {ENGINE_SECONDS} s"]
        for process in processes:
            process.kill()
    if any(codes):
        failures.append(f"--collectives {hidden}: exit codes {codes}")
        return []
    result: list[dict[str, Any]] = json.loads(outputs[0].splitlines()[-1])
    return result


def json_lines(arguments: list[str], failures: list[str]) -> Iterator[dict[str, Any]]:
    """What this script prints with these arguments, line by line; how it failed, if it did."""
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(ENGINE_SECONDS, process.kill)
        watchdog.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        code = process.wait()
        watchdog.cancel()
    if code:
        failures.append(f"{' '.join(arguments)}: exit code {code}")


def scaling(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One GPU's step over two GPUs', per shape, requests and k; of equal depth where it can be."""
    found = []
    for two in rows:
        if two["ranks"] != 2:
            continue
        keys = ("shape", "requests", "k")
        one = next(
            (r for r in rows if r["ranks"] == 1 and all(r[key] == two[key] for key in keys)), None
        )
        if one is None:
            continue
        found.append(
            {
                **{key: two[key] for key in keys},
                "layers": [one["layers"], two["layers"]],
                # Scaled to the depth of the other where one GPU holds half of the layers.
                "step": one["step_ms"] * two["layers"] / one["layers"] / two["step_ms"],
                "replay": one["replay_ms"] * two["layers"] / one["layers"] / two["replay_ms"],
                "same_tokens": one["tokens"] == two["tokens"],
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="8B,70B", help="shapes, with commas between them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--one", help="SHAPE:LAYERS:RANKS, layers 0 for all: one engine alone")
    parser.add_argument("--collectives", type=int, metavar="HIDDEN")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(collectives(options.rank, 2, options.port, options.collectives)))
        return
    if options.one is not None:
        shape, layers, ranks = options.one.split(":")
        for row in points(shape, int(layers) or None, int(ranks), options.device):
            print(json.dumps(row), flush=True)
        return
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for shape in options.only.split(","):
        half = made_config(shape).num_layers // 2 if shape == "70B" else 0
        for layers, ranks in ((half, 1), (0, 2)):
            one = f"{shape}:{layers}:{ranks}"
            # A process of its own starts with all of the GPU's memory, and takes no other with it.
            for row in json_lines(["--one", one, "--device", options.device], failures):
                rows.append(row)
                print({name: row[name] for name in row if name != "tokens"}, flush=True)
    report = {
        **describe(torch.device(options.device)),
        "unit": "milliseconds of a step: of a text's own steps, of one replay, and the floor",
        "note": "70B on one GPU has half of its layers; scaling multiplies its time by two",
        "scaling": scaling(rows),
        "collectives": measured_collectives(8192, failures) if options.device == "cuda" else [],
        "failures": failures,
        "points": [{name: row[name] for name in row if name != "tokens"} for row in rows],
    }
    print(json.dumps({name: report[name] for name in ("scaling", "collectives")}, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
