"""What graphs cost and what they give, on one GPU.

Capture: seconds and bytes of every kind of graph of an 8B-shaped model with a draft of two of its
layers, at 64 requests and k in 0, 2, 4. Latency: milliseconds of one decode step under FULL,
PIECEWISE and NONE, at 1, 8 and 64 requests, k=0 and k=4 (n-gram drafts), for the shapes of
SmolLM2-135M and of an 8B model, random weights, the modes of a row measured in one run.

    python bench/graph_modes.py --out bench/results/graph_modes.json
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import specdec
from specdec.bench.environment import describe
from specdec.verifier.attention.select import select_backend
from specdec.verifier.loading import random_weights, truncate_layers
from specdec.verifier.models.config import config_from_json
from specdec.verifier.models.llama import CausalLM

MAX_NUM_SEQS = 64
REQUEST_COUNTS = (1, 8, 64)
MODES = ("FULL_AND_PIECEWISE", "PIECEWISE", "NONE")
PROMPT_LEN = 64
WARM_UP_STEPS = 8
STEPS = 40

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SMOLLM2_135M = LLAMA_8B | {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
SHAPES = {"135M": SMOLLM2_135M, "8B": LLAMA_8B}


def made_model(shape: str) -> CausalLM:
    config = config_from_json(SHAPES[shape], source=f"the {shape} shape")
    backend = select_backend(
        "auto",
        head_size=config.head_size,
        dtype=torch.bfloat16,
        block_size=16,
        device="cuda",
    )
    return random_weights(
        config, std=0.02, dtype=torch.bfloat16, device="cuda", attention_backend=backend
    )


def engine_of(model: CausalLM, draft: Any, k: int, **fields: Any) -> specdec.Engine:
    sizes = {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": 1024, "num_kv_blocks": 4096}
    return specdec.Engine(model, draft, k, device="cuda", **(sizes | fields))  # type: ignore[arg-type]


def measure_capture(model: CausalLM) -> list[dict[str, Any]]:
    """One row per kind of graph: role, mode, k, how many, seconds, bytes."""
    with engine_of(model, truncate_layers(model, 2), 4, extra_k=[2]) as engine:
        groups: dict[tuple, list] = defaultdict(list)
        for row in engine.graph_table():
            k = row.descriptor.query_len - 1 if row.descriptor.uniform else None
            groups[row.role, row.mode, k].append(row)
        rows = [
            {
                "role": role,
                "mode": mode,
                "k": k,
                "graphs": len(group),
                "capture_seconds": round(sum(row.capture_seconds for row in group), 3),
                "mib": round(sum(row.num_bytes for row in group) / 2**20, 1),
            }
            for (role, mode, k), group in groups.items()
        ]
        rows.append({"role": "start-up, with warm-up", "capture_seconds": engine.capture_seconds})
    return rows


def step_ms(engine: specdec.Engine, num_reqs: int) -> tuple[float, str]:
    """Milliseconds of a decode step of ``num_reqs`` rows, and the mode it ran as."""
    params = specdec.SamplingParams(max_new_tokens=900, ignore_eos=True)
    prompts = [[(i * 131 + j * 7) % 40000 for j in range(PROMPT_LEN)] for i in range(num_reqs)]
    requests = [engine.add_request(prompt, params)[0] for prompt in prompts]
    while not _all_decode(engine, num_reqs):
        engine.step()
    for _ in range(WARM_UP_STEPS):
        engine.step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - started
    records = engine.recent_steps(STEPS)
    modes = {record.mode for record in records}
    assert len(modes) == 1 and all(r.num_reqs == num_reqs for r in records), records
    for request in requests:
        engine.abort(request.id)
    engine.step()
    return 1000 * elapsed / STEPS, modes.pop()


def _all_decode(engine: specdec.Engine, num_reqs: int) -> bool:
    last = engine.recent_steps(1)
    return bool(last) and last[0].num_reqs == num_reqs and "prefill" not in (last[0].reason or "")


def measure_latency(shape: str, model: CausalLM) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for k in (0, 4):
        rows += [{"shape": shape, "k": k, "requests": count} for count in REQUEST_COUNTS]
        for mode in MODES:
            sizes = {MAX_NUM_SEQS, *(count * (1 + k) for count in REQUEST_COUNTS)}
            with engine_of(
                model,
                "ngram" if k else None,
                k,
                cudagraph_mode=mode,
                cudagraph_capture_sizes=sorted(sizes),
            ) as engine:
                for row in rows[-len(REQUEST_COUNTS) :]:
                    milliseconds, served = step_ms(engine, row["requests"])
                    row[served] = round(milliseconds, 3)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default=None)
    arguments = parser.parse_args()
    report: dict[str, Any] = describe(torch.device("cuda"), arguments.commit)
    report["latency_unit"] = "ms per decode step"
    report["latency"] = []
    for shape in SHAPES:
        model = made_model(shape)
        if shape == "8B":
            report["capture"] = measure_capture(model)
            print_rows(report["capture"])
        rows = measure_latency(shape, model)
        print_rows(rows)
        report["latency"] += rows
        del model
        torch.cuda.empty_cache()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def print_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
