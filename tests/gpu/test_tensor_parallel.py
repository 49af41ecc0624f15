"""Two ranks on two GPUs: bits of graphs and eager runs, of every k and way to add; a lost rank."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from adapters import write_adapter
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, greedy
from tiny import blended, make_tiny

import specdec
from specdec.parallel.ranks import RankLostError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SHAPE = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 640, "vocab": 300}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    target = make_tiny(root / "target", seed=3, std=0.15, layers=4, **SHAPE)
    return {
        "target": str(target),
        "blend": str(blended(target, root / "blend", 0.1)),
        "adapter": write_adapter(root / "adapter", target, seed=1),
    }


def engine_of(models, draft, k=4, *, size=2, **options):
    defaults = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_num_seqs": 6,
        "max_model_len": 256,
        "num_kv_blocks": 512,
        "tensor_parallel_size": size,
        "debug": True,
    }
    return specdec.Engine(models["target"], models.get(draft, draft), k, **(defaults | options))


def texts(engine, params, **options):
    return [each.token_ids for each in engine.generate(PROMPTS, params, **options)]


SAMPLED = ({"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "seed": 4, "top_p": 0.8})


@pytest.mark.parametrize("draft", ["ngram", "blend", "layer_skip:1"])
def test_k_and_graphs_move_no_token(models, draft):
    with engine_of(models, draft, lora={"a": models["adapter"]}) as engine:
        expected = texts(engine, greedy(48, k=0))
        assert texts(engine, greedy(48)) == expected
        adapted = texts(engine, greedy(48, k=0), lora="a")
        assert texts(engine, greedy(48), lora="a") == adapted != expected
        for fields in SAMPLED:
            assert texts(engine, greedy(32, **fields)) == texts(engine, greedy(32, k=0, **fields))
        assert_decodes_replayed(engine)
        assert_no_leak(engine)
    with engine_of(models, draft, cudagraph_mode="NONE") as eager:
        assert texts(eager, greedy(48)) == expected


def test_several_rounds_and_piecewise_graphs(models):
    expected = None
    for options in (
        {},
        {"steps_per_replay": 4},
        {"cudagraph_mode": "PIECEWISE"},
        {"draft_tensor_parallel_size": 1},
        {"async_scheduling": False},
    ):
        with engine_of(models, "blend", **options) as engine:
            got = texts(engine, greedy(40))
            expected = expected or got
            assert got == expected, options


def test_shared_memory_is_used_and_gives_the_bits_of_nccl(models):
    """The engine took it only where a test at start-up found it equal; here whole texts do."""
    with engine_of(models, "blend") as engine:
        communicator = engine._ranks._communicator
        assert communicator.symmetric is not None
        expected = texts(engine, greedy(48))
        logprobs = engine.generate(PROMPTS, greedy(8, logprobs=5))
    with engine_of(models, "blend", symmetric_memory=False) as engine:
        assert engine._ranks._communicator.symmetric is None
        assert texts(engine, greedy(48)) == expected
        for got, wanted in zip(
            engine.generate(PROMPTS, greedy(8, logprobs=5)), logprobs, strict=True
        ):
            assert [each.logprob for each in got.logprobs] == [
                each.logprob for each in wanted.logprobs
            ]


def test_unseeded_sampling_keeps_the_ranks_together(models):
    """C60: T=1 without a seed, batches of three and five beside each other; debug compares."""
    with engine_of(models, "blend") as engine:
        for count in (3, 5):
            prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
            for each in engine.generate(prompts, greedy(64, temperature=1.0)):
                assert len(each.token_ids) == 64


CODE = """
import os, signal, sys, threading, time
import specdec
from specdec.parallel.ranks import RankLostError
engine = specdec.Engine(sys.argv[1], "ngram", 4, device="cuda", dtype="bfloat16",
                        tensor_parallel_size=2, max_num_seqs=2, max_model_len=256)
engine.add_request([5, 17, 99], specdec.SamplingParams(max_new_tokens=200, ignore_eos=True))
for _ in range(3):
    engine.step()
os.kill(engine._ranks._followers[0].process.pid, signal.SIGKILL)
started = time.monotonic()
try:
    while True:
        engine.step()
except RankLostError as error:
    print(error, flush=True)
engine.close()
print(time.monotonic() - started, flush=True)
"""


def test_a_rank_that_is_killed_is_named_within_thirty_seconds(models):
    """In a process of its own: a GPU that hangs would take the other tests with it."""
    run = subprocess.run(
        [sys.executable, "-P", "-c", CODE, models["target"]],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    error, seconds = run.stdout.strip().splitlines()
    assert "rank 1 of 2 was lost" in error and "signal 9" in error
    assert float(seconds) < 30


def test_a_rank_that_is_killed_while_the_host_waits_for_it(models):
    """The kernels that wait for it go on, so that the device is not left hanging."""
    engine = engine_of(models, "ngram", debug=False)
    engine.add_request(PROMPTS[0], greedy(200))
    engine.step()
    process = engine._ranks._followers[0].process
    # It hears nothing more, so that rank 0's device waits for it; a second later it is gone.
    process.send_signal(signal.SIGSTOP)
    threading.Timer(1.0, process.kill).start()
    started = time.monotonic()
    with pytest.raises(RankLostError, match="rank 1"):
        while True:
            engine.step()
    torch.cuda.synchronize()
    assert time.monotonic() - started < 30
    engine.close()
    assert not Path(f"/proc/{process.pid}").exists()
