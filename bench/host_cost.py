"""Host time of one engine step, with a stub in place of the device's work.

    python bench/host_cost.py [--device cuda] [--requests 1 8 64] [--profile]

A tiny random model prefills; from then on every decode step returns at once, with three of four
drafts accepted. What is left is the loop: scheduling, blocks, dispatch, results, commit, events.
On a GPU the copies to and from the device are real.
"""

import argparse
import cProfile
import json
import pstats
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

import specdec
from specdec.bench.environment import describe
from specdec.verifier.batch import PassResult
from specdec.verifier.modes import GraphKey

K, ACCEPTED = 4, 3
PROMPT, STEPS = 200, 100
TARGETS_US = {1: 200, 64: 1000}


def make_model(folder: Path) -> str:
    """A model small enough that its prefill does not matter."""
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "intermediate_size": 32, "vocab_size": 128, "tie_word_embeddings": True,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "torch_dtype": "float32",
    }  # fmt: skip
    shapes = {
        "self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32), "mlp.gate_proj": (32, 32), "mlp.up_proj": (32, 32),
        "mlp.down_proj": (32, 32), "input_layernorm": (32,), "post_attention_layernorm": (32,),
    }  # fmt: skip
    tensors = {f"model.layers.0.{n}.weight": torch.randn(shape) for n, shape in shapes.items()}
    tensors |= {"model.embed_tokens.weight": torch.randn(128, 32)}
    tensors |= {"model.norm.weight": torch.ones(32)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


class StubGraphs:
    """In place of the decode pass's graphs: each replay has the same results, made once."""

    def __init__(self, num_reqs: int, device: torch.device) -> None:
        row = [*range(ACCEPTED + 1), *[-1] * (K - ACCEPTED), ACCEPTED + 1, K, ACCEPTED, 0]
        self._result = PassResult(torch.tensor([row] * num_reqs, device=device), None)

    def has_graph(self, key: GraphKey) -> bool:
        return True

    def __call__(self, *args: object) -> PassResult:
        return self._result

    def clear(self) -> None:
        """It holds no memory."""


def measure(engine: specdec.Engine, num_reqs: int, profile: bool) -> list[float]:
    """Seconds of the thread's own time of each step in which all requests decode."""
    random.seed(0)
    params = specdec.SamplingParams(max_new_tokens=STEPS * (ACCEPTED + 1) + 1)
    requests = [
        engine.add_request([random.randrange(128) for _ in range(PROMPT)], params)[0]
        for _ in range(num_reqs)
    ]
    while not all(request.output_ids for request in requests):
        engine.step()
    profiler = cProfile.Profile(time.thread_time)
    seconds = []
    for _ in range(STEPS - 5):
        if profile:
            profiler.enable()
        started = time.thread_time()
        engine.step()
        seconds.append(time.thread_time() - started)
        profiler.disable()
        for request in requests:
            request.events.clear()
    for request in requests:
        engine.abort(request.id)
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(28)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        for num_reqs in options.requests:
            with specdec.Engine(
                model, "ngram", K, device=options.device, max_num_seqs=num_reqs,
                max_model_len=1024, uniform_request_counts=[num_reqs], steps_per_replay=1,
                async_scheduling=True,
            ) as engine:  # fmt: skip
                engine._runner._decode.wrapper = StubGraphs(num_reqs, engine.device)
                seconds = measure(engine, num_reqs, options.profile)
            micros = [1e6 * each for each in seconds]
            row = {
                "requests": num_reqs,
                "median_us": round(statistics.median(micros), 1),
                "mean_us": round(statistics.fmean(micros), 1),
                "target_us": TARGETS_US.get(num_reqs),
            }
            rows.append(row)
            print(row)
    report = {"environment": describe(torch.device(options.device)), "rows": rows}
    print(json.dumps(report))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
