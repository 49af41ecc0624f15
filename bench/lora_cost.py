"""What adapters cost: steps on LoRA graphs against steps on base graphs of the same engine.

An 8B-shaped model with random weights, drafts by n-gram lookup, k drafts a step. For each rank an
engine with eight adapters runs batches of base rows, of rows that share one adapter, and of rows
spread over all of them, and times a step of each: graph replay, adapter kernels and host work. The
three take turns, so that a drift of the clocks reaches all of them, and medians over the turns are
compared; prompts are in the prefix cache after the first turn.

    python bench/lora_cost.py --out bench/results/lora_cost.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import specdec
from specdec.bench.environment import describe
from specdec.verifier.attention.select import select_backend
from specdec.verifier.loading import random_weights
from specdec.verifier.models.config import config_from_json
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.peft_format import AdapterWeights, adapter_sites

RANKS = (8, 16, 64)
REQUEST_COUNTS = (1, 8, 64)
NUM_ADAPTERS = 8
WARM_STEPS, TIMED_STEPS = 4, 20
# The first turn, which fills the prefix cache, is not counted.
TURNS = 5
SHAPES = {
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "tiny": (64, 128, 2, 4, 2, 512),  # to try the script
}


def make_model(shape: str, device: str) -> CausalLM:
    hidden, ffn, layers, heads, kv_heads, vocab = SHAPES[shape]
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16" if device == "cuda" else "float32",
    }
    config = config_from_json(content, source=f"the {shape} shape")
    backend = select_backend(
        "auto", head_size=config.head_size, dtype=config.dtype, block_size=16, device=device
    )
    return random_weights(
        config, std=0.02, dtype=config.dtype, device=device, attention_backend=backend
    )


def random_adapter(model: CausalLM, rank: int, seed: int) -> AdapterWeights:
    generator = torch.Generator(model.device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return 0.01 * torch.randn(*shape, generator=generator, device=model.device).cpu()

    sites = {
        name: (draw(rank, columns), draw(rows, rank))
        for name, (rows, columns) in adapter_sites(model.config).items()
        if ".layers." in name
    }
    return AdapterWeights(path=f"random {seed}", rank=rank, sites=sites, base_weights={})


def step_ms(engine: Any, prompts: list[list[int]], lora: list[str | None]) -> float:
    """Milliseconds of a step while all of these requests decode."""
    params = specdec.SamplingParams(max_new_tokens=1_000, ignore_eos=True)
    requests = [
        engine.add_request(prompt, params, name)[0]
        for prompt, name in zip(prompts, lora, strict=True)
    ]
    while any(not request.output_ids for request in requests):
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    synchronize(engine)
    started = time.perf_counter()
    for _ in range(TIMED_STEPS):
        engine.step()
    synchronize(engine)
    seconds = time.perf_counter() - started
    record = engine.recent_steps(1)[0]
    wanted = any(name is not None for name in lora)
    assert (record.mode, record.descriptor.has_lora) == ("FULL", wanted), record
    assert record.num_reqs == len(requests), record
    for request in requests:
        engine.abort(request.id)
    return 1e3 * seconds / TIMED_STEPS


def synchronize(engine: Any) -> None:
    if engine.config.torch_device.type == "cuda":
        torch.cuda.synchronize()


def run(model: CausalLM, rank: int, k: int, length: int) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    with specdec.Engine(
        model,
        "ngram",
        k,
        device=model.device.type,
        max_num_seqs=max(REQUEST_COUNTS),
        uniform_request_counts=REQUEST_COUNTS,
        max_model_len=2048,
        # The prompts of all three plans, and what is decoded.
        num_kv_blocks=max(REQUEST_COUNTS) * (3 * length // 16 + 32),
        enable_prefix_caching=True,
        max_loras=NUM_ADAPTERS,
        max_lora_rank=rank,
    ) as engine:
        names = [f"adapter-{i}" for i in range(NUM_ADAPTERS)]
        # The same values under eight names: distinct slots, so distinct memory.
        weights = random_adapter(model, rank, seed=1)
        for name in names:
            engine._lora._table.add(name, weights)
        table = engine.graph_table()
        facts = {
            "slot_bytes": engine._lora._table.memory.slots.bytes_per_slot,
            "graphs": {
                kind: sum(row.descriptor.has_lora == (kind == "lora") for row in table)
                for kind in ("base", "lora")
            },
            "capture_seconds": engine.capture_seconds,
        }
        for count in REQUEST_COUNTS:
            shape = (count, length)
            ids = torch.randint(3, model.config.vocab_size, shape, generator=generator)
            prompts = ids.tolist()
            plans = {
                "base": [None] * count,
                "one": names[:1] * count,
                "spread": [names[i % NUM_ADAPTERS] for i in range(count)],
            }
            times: dict[str, list[float]] = {plan: [] for plan in plans}
            for turn in range(1 + TURNS):
                for plan, lora in plans.items():
                    milliseconds = step_ms(engine, prompts, lora)
                    if turn > 0:
                        times[plan].append(milliseconds)
            medians = {plan: statistics.median(values) for plan, values in times.items()}
            # Within a turn, so that what drifts from turn to turn cancels out.
            ratios = {
                plan: statistics.median(
                    own / base for own, base in zip(times[plan], times["base"], strict=True)
                )
                for plan in ("one", "spread")
            }
            yield {
                "rank": rank,
                "num_reqs": count,
                "k": k,
                "base_ms": medians["base"],
                "base_lowest_ms": min(times["base"]),
                "base_highest_ms": max(times["base"]),
                "one_adapter_ms": medians["one"],
                "eight_adapters_ms": medians["spread"],
                "ratio_one": ratios["one"],
                "ratio_eight": ratios["spread"],
                **facts,
            }


def save(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=512)
    arguments = parser.parse_args()
    model = make_model(arguments.shape, arguments.device)
    report: dict[str, Any] = {
        "schema": 1,
        "environment": describe(model.device),
        "settings": {
            "shape": arguments.shape,
            "k": arguments.k,
            "prompt_len": arguments.prompt_len,
            "timed_steps": TIMED_STEPS,
            "turns": TURNS,
            "adapters": NUM_ADAPTERS,
        },
        "results": [],
    }
    print("rank  reqs   base ms (lowest, highest)   one adapter         eight adapters", flush=True)
    for rank in arguments.ranks:
        for row in run(model, rank, arguments.k, arguments.prompt_len):
            report["results"].append(row)
            # What there is stays, should the run be stopped.
            if arguments.out is not None:
                save(arguments.out, report)
            print(
                f"{rank:4}  {row['num_reqs']:4}  {row['base_ms']:8.3f} "
                f"({row['base_lowest_ms']:.3f}, {row['base_highest_ms']:.3f})  "
                f"{row['one_adapter_ms']:8.3f} ({row['ratio_one']:.3f}x)  "
                f"{row['eight_adapters_ms']:8.3f} ({row['ratio_eight']:.3f}x)",
                flush=True,
            )


if __name__ == "__main__":
    main()
