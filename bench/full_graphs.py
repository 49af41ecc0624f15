"""Every decode step on a FULL graph, text unchanged by speculation: the main job on one GPU.

Runs an 8B-shaped pair (the target's layers from the third on add nothing; the draft is its first
two layers, so every draft is accepted at full cost) on random prompts, and the bundled SmolLM2 on
the package's prompts under its chat template: with an n-gram drafter, with its trained head, with
lookup before that head, and with its own first layers as a checkpoint; at several request counts,
with k drafts and without. For each: the graph modes of all decode steps, whether the text equals
the text without a drafter, and the time per step and per token beside the time that reading the
weights takes.

    python bench/full_graphs.py --out bench/results/full_graphs.json
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import specdec
from specdec.api import chat_prompts
from specdec.bench.environment import describe
from specdec.bench.prompts import load_prompts, spread
from specdec.request import Request
from specdec.verifier.attention.select import select_backend
from specdec.verifier.loading import (
    random_weights,
    save_first_layers,
    silence_layers,
    truncate_layers,
)
from specdec.verifier.models.config import ModelConfig, config_from_json
from specdec.verifier.models.llama import CausalLM

REQUEST_COUNTS = (1, 3, 8, 33)
# Runs of each point; the time given is the median, so that a stall of the host does not count.
REPEATS = 3
# Measured device-to-device copy of the H200, bytes read and written.
BANDWIDTH = 4.25e12

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


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    model: str | CausalLM | None
    draft: str | CausalLM | None
    prompt_len: int | None  # random tokens; None: the package's prompts
    new_tokens: int


def llama_8b() -> ModelConfig:
    return config_from_json(LLAMA_8B, source="the 8B shape")


def made_pair() -> tuple[CausalLM, CausalLM]:
    """An 8B-shaped target at full cost, and a draft of two layers that always agrees with it."""
    backend = select_backend(
        "auto", head_size=128, dtype=torch.bfloat16, block_size=16, device="cuda"
    )
    # The embedding's spread decides how varied greedy text is; 0.02 falls into a loop at once.
    target = random_weights(
        llama_8b(), std=0.02, dtype=torch.bfloat16, device="cuda", attention_backend=backend
    )
    silence_layers(target, 2)
    return target, truncate_layers(target, 2)


def weight_bytes(model: CausalLM) -> int:
    """Bytes of the weights that a forward pass reads: all but an untied embedding."""
    total = sum(slot.numel() * slot.element_size() for slot in model.weight_slots().values())
    tied = model.config.tie_word_embeddings
    return total if tied else total - model.embed_tokens.numel() * model.dtype.itemsize


def cases(wanted: set[str]) -> Iterator[Case]:
    if "smollm2" in wanted:
        folder = Path(tempfile.mkdtemp()) / "first-layers"
        from specdec.tokenizer import load_tokenizer

        save_first_layers(None, folder, 8, dtype=torch.bfloat16)
        tokenizer = load_tokenizer(None)
        assert tokenizer is not None
        tokenizer.save(folder)
        yield Case("SmolLM2, ngram", None, "ngram", None, 128)
        yield Case("SmolLM2, its trained head", None, "auto", None, 128)
        yield Case("SmolLM2, suffix + head", None, "suffix+auto", None, 128)
        yield Case("SmolLM2, its first 8 layers", None, str(folder), None, 128)
    if "8b" in wanted:
        target, draft = made_pair()
        yield Case("8B shape, made pair", target, draft, 900, 128)


@dataclass(frozen=True, slots=True)
class Decoded:
    requests: list[Request]
    seconds: float  # from when every request has its first token
    tokens: int  # in that time


def decode(
    engine: specdec.Engine, prompts: list[list[int]], params: specdec.SamplingParams
) -> Decoded:
    """Run the prompts together, and time the steps after the prefill."""
    requests = [engine.add_request(prompt, params)[0] for prompt in prompts]
    while any(not request.output_ids for request in requests):
        engine.step()
    torch.cuda.synchronize()
    begun = sum(len(request.output_ids) for request in requests)
    started = time.perf_counter()
    while any(request.finish_reason is None for request in requests):
        engine.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return Decoded(requests, seconds, sum(len(r.output_ids) for r in requests) - begun)


def prompts_of(
    engine: specdec.Engine, case: Case, count: int, generator: torch.Generator
) -> list[list[int]]:
    if case.prompt_len is not None:
        return torch.randint(3, 40_000, (count, case.prompt_len), generator=generator).tolist()
    texts = [prompt.text for prompt in spread(load_prompts(), count)]
    return [chat_prompts(engine, texts[i % len(texts)]) for i in range(count)]


def run(case: Case, k: int) -> tuple[list[dict[str, Any]], dict[int, list[list[int]]]]:
    generator = torch.Generator().manual_seed(0)
    rows, texts = [], {}
    with specdec.Engine(
        case.model,
        case.draft if k else None,
        k,
        device="cuda",
        max_num_seqs=max(REQUEST_COUNTS),
        max_model_len=2048,
        enable_prefix_caching=False,
        # The same prompts run several times: "suffix" would find what they were answered before.
        suffix_history=0,
    ) as engine:
        params = specdec.SamplingParams(max_new_tokens=case.new_tokens, ignore_eos=True)
        for count in REQUEST_COUNTS:
            prompts = prompts_of(engine, case, count, generator)
            engine.generate(prompts, specdec.SamplingParams(max_new_tokens=8, ignore_eos=True))
            seen = len(engine.recent_steps(10_000))
            timed = [decode(engine, prompts, params) for _ in range(REPEATS)]
            records = engine.recent_steps(10_000)[seen:]
            decodes = [r for r in records if r.reason is None or "prefill" not in r.reason]
            groups = timed[0].requests
            assert all(
                [request.output_ids for request in each.requests]
                == [request.output_ids for request in groups]
                for each in timed
            ), "two runs of the same prompts differ"
            seconds = statistics.median(each.seconds for each in timed)
            tokens = timed[0].tokens
            steps = max(request.stats.steps for request in groups)
            drafted = sum(request.stats.drafted for request in groups)
            accepted = sum(request.stats.accepted for request in groups)
            texts[count] = [request.output_ids for request in groups]
            rows.append(
                {
                    "case": case.name,
                    "k": k,
                    "num_reqs": count,
                    "decode_steps_by_mode": {
                        mode: sum(r.mode == mode for r in decodes)
                        for mode in ("FULL", "PIECEWISE", "NONE")
                    },
                    "steps": steps,
                    "drafted": drafted,
                    "accepted": accepted,
                    "ms_per_step": 1e3 * seconds / steps,
                    "ms_per_step_of_each_run": [1e3 * each.seconds / steps for each in timed],
                    "tokens_per_second_and_user": tokens / count / seconds,
                    "ms_per_token_and_user": 1e3 * seconds * count / tokens,
                    "distinct_tokens": len({t for ids in texts[count] for t in ids}),
                }
            )
        model = engine._runner.step.model
        floor = 1e3 * weight_bytes(model) / BANDWIDTH
        if k and isinstance(case.draft, CausalLM):
            floor += k * 1e3 * weight_bytes(case.draft) / BANDWIDTH
        for row in rows:
            row["floor_ms_per_step"] = floor
        rows[0]["capture_seconds"] = engine.capture_seconds
        rows[0]["graphs"] = len(engine.graph_table())
        rows[0]["graph_bytes"] = sum(row.num_bytes for row in engine.graph_table())
    return rows, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", default=["smollm2", "8b"])
    parser.add_argument("-k", type=int, default=4)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "schema": 1,
        "environment": describe(torch.device("cuda")),
        "command": f"python bench/full_graphs.py --cases {' '.join(arguments.cases)}",
        "bandwidth_bytes_per_second": BANDWIDTH,
        "results": [],
    }
    for case in cases(set(arguments.cases)):
        plain, reference = run(case, 0)
        drafted, texts = run(case, arguments.k)
        for row in drafted:
            count = row["num_reqs"]
            row["texts_equal_without_drafter"] = texts[count] == reference[count]
            baseline = next(r for r in plain if r["num_reqs"] == count)
            row["speedup"] = baseline["ms_per_token_and_user"] / row["ms_per_token_and_user"]
        for row in plain + drafted:
            print(
                f"{row['case']:28} k={row['k']} reqs={row['num_reqs']:2} "
                f"{row['decode_steps_by_mode']} {row['ms_per_step']:7.3f} ms/step "
                f"(floor {row['floor_ms_per_step']:.3f}) "
                f"{row['tokens_per_second_and_user']:8.1f} tok/s/user "
                f"acc {row['accepted']}/{row['drafted']} equal "
                f"{row.get('texts_equal_without_drafter', '-')} distinct {row['distinct_tokens']}",
                flush=True,
            )
        report["results"] += plain + drafted
        # What there is stays, should the run be stopped.
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
