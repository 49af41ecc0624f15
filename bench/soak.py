"""Many requests of every kind for minutes: each text must be its solo text, and no block may leak.

A pool of requests (greedy and seeded, with penalties, stop tokens, biases, minimum lengths, their
own k) is first run one by one without a drafter. Then hundreds run at a time with a drafter, arrive
and are aborted at random, share a block pool that is too small for all of them, and every finished
text is compared. Then the engine's loop is timed with and without asynchronous scheduling.

    python bench/soak.py --seconds 180 --out bench/results/soak.json
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import specdec
from specdec.bench.environment import describe
from specdec.verifier.attention.select import select_backend
from specdec.verifier.loading import random_weights, truncate_layers
from specdec.verifier.models.config import config_from_json
from specdec.verifier.models.llama import CausalLM

NUM_CONCURRENT = 200
POOL = 96
LOOP_REPEATS = 9


def small_model(device: str) -> CausalLM:
    """SmolLM2's heads at eight layers, with weights that keep greedy texts varied."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = config_from_json(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 4096,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "tie_word_embeddings": False,
        },
        source="the soak test",
    )
    backend = select_backend("auto", head_size=64, dtype=dtype, block_size=16, device=device)
    model = random_weights(config, std=0.1, dtype=dtype, device=device, attention_backend=backend)
    for layer in model.first_layers()[3:]:
        for output in (layer.attention.o_proj, layer.mlp.down_proj):
            output.weight.mul_(0.1)
    return model


def make_request(rng: random.Random) -> tuple[list[int], specdec.SamplingParams]:
    """A request whose text is determined: greedy, or sampled with a seed."""
    prompt = [rng.randrange(4096) for _ in range(rng.choice([1, 5, 16, 40, 120, 300]))]
    if rng.random() < 0.3:
        prompt = (prompt[:7] * 60)[: len(prompt)]
    fields: dict[str, Any] = {"max_new_tokens": rng.choice([1, 8, 33, 64, 100])}
    if rng.random() < 0.5:
        fields |= {"temperature": rng.choice([0.5, 1.0]), "seed": rng.randrange(2**64)}
        fields |= {"top_k": rng.choice([0, 20]), "top_p": rng.choice([1.0, 0.9])}
    if rng.random() < 0.25:
        fields |= {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
    if rng.random() < 0.25:
        fields |= {"logit_bias": {rng.randrange(4096): 5.0}}
    if rng.random() < 0.25:
        fields |= {"stop_token_ids": [rng.randrange(4096) for _ in range(8)]}
        fields |= {"min_tokens": min(4, fields["max_new_tokens"])}
    return prompt, specdec.SamplingParams(**fields)


def solo_texts(model: CausalLM, requests: list, device: str) -> list[tuple[list[int], str]]:
    with specdec.Engine(model, None, device=device, max_num_seqs=1, max_model_len=512) as engine:
        outs = [engine.generate(prompt, params) for prompt, params in requests]
    return [(out.token_ids, out.finish_reason) for out in outs]


def soak(
    model: CausalLM, draft: Any, requests: list, expected: list, seconds: float, device: str
) -> dict[str, Any]:
    """Random traffic for a while. Raises AssertionError at the first difference or leak."""
    rng = random.Random(7)
    with specdec.Engine(
        model,
        draft,
        4,
        device=device,
        max_num_seqs=NUM_CONCURRENT,
        max_model_len=512,
        max_num_batched_tokens=1024,
        # Two thirds of what these requests hold on average: some are preempted.
        num_kv_blocks=NUM_CONCURRENT * 5,
        uniform_request_counts=[8, 32, 64, 128, NUM_CONCURRENT],
    ) as engine:
        live: dict[Any, int] = {}
        compared = aborted = tokens = 0
        deadline = time.monotonic() + seconds
        while live or time.monotonic() < deadline:
            while len(live) < NUM_CONCURRENT + 40 and time.monotonic() < deadline:
                number = rng.randrange(len(requests))
                live[engine.add_request(*requests[number])[0]] = number
            engine.step()
            if rng.random() < 0.02:
                engine.abort(rng.choice(list(live)).id)
            for request in [r for r in live if r.finish_reason is not None]:
                ids, reason = expected[live.pop(request)]
                if request.finish_reason == "abort":
                    aborted += 1
                    assert request.output_ids == ids[: len(request.output_ids)]
                    continue
                compared += 1
                tokens += len(ids)
                assert request.output_ids == ids, (request.params, request.output_ids, ids)
                assert request.finish_reason == reason
        engine.check_integrity()
        stats = engine.stats()
        assert stats.free_kv_blocks == stats.total_kv_blocks
    return {
        "draft": draft if isinstance(draft, str) else "model",
        "seconds": seconds,
        "texts_compared": compared,
        "tokens_compared": tokens,
        "differences": 0,
        "aborted": aborted,
        "preemptions": stats.preemptions,
        "steps_by_mode": stats.steps_by_mode,
        "acceptance_rate": stats.accepted / max(stats.drafted, 1),
    }


def loop_speed(model: CausalLM, draft: Any, device: str) -> list[dict[str, Any]]:
    """Tokens per second of 64 requests, reading each step at once and one step late."""
    rows = []
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 4096, (64, 64), generator=generator).tolist()
    params = specdec.SamplingParams(max_new_tokens=256, ignore_eos=True)
    for asynchronous in (False, True, False, True):
        with specdec.Engine(
            model,
            draft,
            4,
            device=device,
            max_num_seqs=64,
            max_model_len=512,
            uniform_request_counts=[64],
            async_scheduling=asynchronous,
            enable_prefix_caching=False,
        ) as engine:
            engine.generate(prompts, specdec.SamplingParams(max_new_tokens=8, ignore_eos=True))
            rates = []
            for _ in range(LOOP_REPEATS):
                started = time.perf_counter()
                outs = engine.generate(prompts, params)
                seconds = time.perf_counter() - started
                rates.append(sum(len(out.token_ids) for out in outs) / seconds)
        row: dict[str, Any] = {"async_scheduling": asynchronous}
        row |= {"tokens_per_second": statistics.median(rates), "all": rates}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=("soak", "loop"), help="one half; --out keeps the other")
    arguments = parser.parse_args()
    report: dict[str, Any] = {}
    if arguments.only and arguments.out is not None and arguments.out.exists():
        report = json.loads(arguments.out.read_text())
    model = small_model(arguments.device)
    draft = truncate_layers(model, 3)
    report |= {
        "schema": 1,
        "environment": describe(torch.device(arguments.device)),
        "command": f"python bench/soak.py --seconds {arguments.seconds:g}",
        "concurrent_requests": NUM_CONCURRENT,
    }
    if arguments.only != "loop":
        report["soak"] = soak_all(model, draft, arguments.seconds, arguments.device)
    if arguments.only != "soak":
        report["loop"] = loop_speed(model, draft, arguments.device)
        for row in report["loop"]:
            print(row)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


def soak_all(model: CausalLM, draft: CausalLM, seconds: float, device: str) -> list[dict[str, Any]]:
    """Half the time with a draft model, half with n-gram lookup."""
    rng = random.Random(3)
    requests = [make_request(rng) for _ in range(POOL)]
    started = time.perf_counter()
    expected = solo_texts(model, requests, device)
    print(f"solo texts: {time.perf_counter() - started:.1f} s", flush=True)
    runs = []
    for each in (draft, "ngram"):
        run = soak(model, each, requests, expected, seconds / 2, device)
        print(run, flush=True)
        runs.append(run)
    return runs


if __name__ == "__main__":
    main()
