"""Pieces compiled by Inductor, and the folder that keeps them."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flat import FULL, MAX_TOKENS, NONE, PIECEWISE, capture, flat, run, same
from harness import PROMPTS, cpu_engine, greedy
from paged import load
from tiny import make_tiny

from specdec.verifier.lora import LoraSlots

pytest.importorskip("torch._inductor")
if shutil.which("g++") is None or "CXX" in os.environ:
    pytest.skip("needs g++, and CXX unset", allow_module_level=True)

# Stands before the C++ compiler and notes each call that compiles something.
SPY = """#!/bin/sh
case " $* " in *" -o "*) echo "$*" >> {log} ;; esac
exec {compiler} "$@"
"""
# What another process does: builds from the folder, and runs one mixed batch.
ELSEWHERE = """
import json, sys
sys.path.insert(0, {tests!r})
import torch
from flat import NONE, PIECEWISE, MAX_TOKENS, capture, flat, run, same
from paged import load
from specdec.verifier import inductor
from torch._dynamo.utils import counters

model = load({model!r})
runner = flat(model, backend="inductor", cache_dir={folder!r})
capture(runner, PIECEWISE, MAX_TOKENS)
equal = same(run(runner, PIECEWISE, MAX_TOKENS), run(flat(model), NONE))
misses = counters["inductor"]["fxgraph_cache_miss"]
print(json.dumps([equal, inductor.counts["compiled"], inductor.counts["loaded"], misses]))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A model of three distinct pieces (qwen2 has biases), compiled into a folder."""
    from specdec.verifier import inductor

    root = tmp_path_factory.mktemp("inductor")
    make_tiny(root / "model", layers=3, family="qwen2")
    model = load(root / "model")
    before = inductor.counts["compiled"]
    runner = flat(model, backend="inductor", cache_dir=str(root / "cache"))
    assert inductor.counts["compiled"] == before + 3 == before + runner.num_pieces
    return root, model, runner


def test_compiled_pieces_give_the_same_in_every_mode(compiled):
    """A FULL graph holds the compiled pieces as opaque operators; both kinds nest."""
    _, model, runner = compiled
    expected = [run(flat(model), NONE, seed=seed) for seed in (0, 1)]
    capture(runner, PIECEWISE, MAX_TOKENS)
    capture(runner, FULL, MAX_TOKENS)
    for mode in (NONE, PIECEWISE, FULL):
        for seed in (0, 1):
            assert same(run(runner, mode, MAX_TOKENS, seed), expected[seed])


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma3_text"])
def test_kernels_of_other_families_stay_operators(tmp_path, family):
    """Experts, latents, norms of one plus the weight: what they promise of their layout holds."""
    model = load(make_tiny(tmp_path / "model", layers=3, family=family))
    runner = flat(model, backend="inductor", cache_dir=str(tmp_path / "cache"))
    assert same(run(runner, NONE), run(flat(model), NONE))


def test_pieces_with_adapters_are_compiled_once_each(compiled):
    """Three more, whatever the adapters and layers; all modes give what no compilation gives."""
    from specdec.verifier import inductor

    root, _, _ = compiled
    model = load(make_tiny(root / "adapted", layers=5, family="qwen2"))
    slots = LoraSlots(model, max_loras=3, max_rank=4, vocabulary=True)
    slots.attach()
    slots.data.normal_(std=0.2, generator=torch.Generator().manual_seed(5))
    runner = flat(model, backend="inductor", cache_dir=str(root / "cache"))
    before = inductor.counts["compiled"]
    runner.enable_lora(3)
    assert inductor.counts["compiled"] == before + 3
    for mode in (PIECEWISE, FULL):
        capture(runner, mode, MAX_TOKENS, has_lora=True)
    for seed, each in enumerate(([0, -1, 2], [1, 1, -1])):
        expected = run(flat(model), NONE, seed=seed, slots=each)
        for mode in (NONE, PIECEWISE, FULL):
            assert same(run(runner, mode, MAX_TOKENS, seed, each), expected)
    again = flat(model, backend="inductor", cache_dir=str(root / "cache"))
    again.enable_lora(3)
    assert inductor.counts["compiled"] == before + 3


def test_nothing_is_compiled_from_a_copied_folder(compiled, tmp_path):
    """In a process whose own cache of Inductor's is empty: no piece, and no C++ kernel of one."""
    root, _, _ = compiled
    shutil.copytree(root / "cache", tmp_path / "copy")
    tests = Path(__file__).resolve().parents[1]
    script = ELSEWHERE.format(
        tests=str(tests),
        model=str(root / "model"),
        folder=str(tmp_path / "copy"),
    )
    spy = tmp_path / "bin" / "g++"
    spy.parent.mkdir()
    spy.write_text(SPY.format(log=tmp_path / "log", compiler=shutil.which("g++")))
    spy.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{spy.parent}:{os.environ['PATH']}",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "empty"),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    equal, num_compiled, num_loaded, misses = json.loads(process.stdout.splitlines()[-1])
    assert equal and (num_compiled, num_loaded, misses) == (0, 3, 0)
    # Inductor tries out what the CPU can do, in a folder of its own; a kernel's file ends in .main.
    log = tmp_path / "log"
    assert not log.exists() or ".main." not in log.read_text()


def test_what_is_kept_depends_on_content(compiled):
    """Same model, same folder: loaded. Other weights of the same shapes: loaded too."""
    from specdec.verifier import inductor

    root, model, _ = compiled
    other = load(make_tiny(root / "other", layers=5, family="qwen2", seed=9))
    for each in (model, other):
        before = dict(inductor.counts)
        runner = flat(each, backend="inductor", cache_dir=str(root / "cache"))
        assert inductor.counts["compiled"] == before["compiled"]
        assert inductor.counts["loaded"] == before.get("loaded", 0) + 3
        assert same(run(runner, NONE), run(flat(each), NONE))


def test_static_sizes_are_compiled_beside_the_general_piece(compiled):
    from specdec.verifier import inductor

    root, model, _ = compiled
    before = inductor.counts["compiled"]
    runner = flat(
        model, backend="inductor", compile_sizes=[MAX_TOKENS], cache_dir=str(root / "cache")
    )
    assert inductor.counts["compiled"] == before + 3
    capture(runner, PIECEWISE, MAX_TOKENS, 16)
    expected = run(flat(model), NONE)
    for size in (MAX_TOKENS, 16):
        assert same(run(runner, PIECEWISE, size), expected)


def test_the_cache_can_be_switched_off(compiled, tmp_path, monkeypatch):
    from specdec.verifier import inductor
    from specdec.verifier.compile import CompilationConfig

    _, model, _ = compiled
    monkeypatch.setenv("SPECDEC_DISABLE_COMPILE_CACHE", "1")
    config = CompilationConfig(mode=3, cache_dir=str(tmp_path))
    assert inductor.CompileCache.of(config, model.device).folder is None
    monkeypatch.setenv("SPECDEC_DISABLE_COMPILE_CACHE", "0")
    assert inductor.CompileCache.of(config, model.device).folder == tmp_path
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "elsewhere"))
    of = inductor.CompileCache.of(CompilationConfig(mode=3), torch.device("cpu"))
    assert of.folder == tmp_path / "elsewhere"


def test_a_damaged_folder_is_compiled_again(compiled, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "specdec")
    from specdec.verifier import inductor

    root, model, _ = compiled
    shutil.copytree(root / "cache", tmp_path / "damaged")
    for path in (tmp_path / "damaged").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    before = inductor.counts["compiled"]
    flat(model, backend="inductor", cache_dir=str(tmp_path / "damaged"))
    assert inductor.counts["compiled"] == before + 3
    assert "compiling again" in "".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_AND_PIECEWISE"])
def test_an_engine_on_compiled_pieces_compiles_nothing_later(compiled, mode):
    """Greedy text with drafts, prompts of 16 tokens among them: as without compilation."""
    from torch._dynamo.utils import counters

    from specdec.verifier import inductor

    root, _, _ = compiled
    prompts = [[3] * 16, *PROMPTS]
    with cpu_engine(str(root / "model"), "layer_skip:1", 3, cudagraph_mode="NONE") as engine:
        expected = [out.token_ids for out in engine.generate(prompts, greedy(14))]
    with cpu_engine(
        str(root / "model"),
        "layer_skip:1",
        3,
        cudagraph_mode=mode,
        compilation_config={"backend": "inductor", "cache_dir": str(root / "cache")},
        uniform_request_counts=[2, 5],
    ) as engine:
        done = inductor.counts["compiled"]
        before = {name: dict(values) for name, values in counters.items()}
        got = [out.token_ids for out in engine.generate(prompts, greedy(14))]
        assert {name: dict(values) for name, values in counters.items()} == before
        assert inductor.counts["compiled"] == done
        assert got == expected
        modes = engine.stats().steps_by_mode
        assert (modes["NONE"] > 0) == (mode == "NONE") and (modes["FULL"] > 0) == (mode != "NONE")
