"""What the same text for the same seed costs: acceptance of coupled against rejection sampling.

The draft is the target's first layers; the later ones are scaled from whispering to speaking, so
that the draft goes from nearly right to poor. Both rules draw from the same distributions.

    python bench/coupling.py --out bench/results/coupling.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import specdec
from specdec.bench.environment import describe
from specdec.verifier.attention.select import select_backend
from specdec.verifier.loading import random_weights, truncate_layers
from specdec.verifier.models.config import config_from_json
from specdec.verifier.models.llama import CausalLM


def make_target(scale: float) -> CausalLM:
    config = config_from_json(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        source="the benchmark",
    )
    backend = select_backend("sdpa", head_size=32, dtype=torch.float32, block_size=16, device="cpu")
    model = random_weights(config, std=0.2, dtype=torch.float32, attention_backend=backend)
    for layer in model.first_layers()[2:]:
        for output in (layer.attention.o_proj, layer.mlp.down_proj):
            output.weight.mul_(scale)
    return model


def acceptance(target: CausalLM, rule: str, temperature: float, **fields: Any) -> dict[str, Any]:
    with specdec.Engine(
        target, truncate_layers(target, 2), 4, device="cpu", max_num_seqs=8, acceptance=rule
    ) as engine:
        prompts = [[i + 1, 3 * i + 2, 7] for i in range(32)]
        params = [
            specdec.SamplingParams(max_new_tokens=100, temperature=temperature, seed=i, **fields)
            for i in range(len(prompts))
        ]
        outs = engine.generate(prompts, params)
    drafted = sum(out.stats.drafted for out in outs)
    accepted = sum(out.stats.accepted for out in outs)
    steps = sum(out.stats.steps for out in outs)
    tokens = sum(len(out.token_ids) - 1 for out in outs)
    return {
        "rule": rule,
        "drafted": drafted,
        "acceptance_rate": accepted / drafted,
        "mean_tokens_per_step": tokens / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for scale in (0.05, 0.1, 0.2, 0.4):
        target = make_target(scale)
        for temperature in (0.5, 1.0):
            for rule in ("rejection", "coupled"):
                row = {"later_layers_scaled_by": scale, "temperature": temperature}
                row |= acceptance(target, rule, temperature)
                rows.append(row)
                print(row, flush=True)
    if arguments.out is not None:
        report = {
            "schema": 1,
            "environment": describe(torch.device("cpu")),
            "command": "python bench/coupling.py",
            "k": 4,
            "results": rows,
        }
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
