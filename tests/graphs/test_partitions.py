"""``use_inductor_graph_partition``: the model compiled as a whole, and cut by Inductor.

Inductor cuts code for GPUs only. Here it is told that a node on the CPU is one on a GPU, which it
asks where it decides about partitions; all else is as it is.
"""

import gc
import os
import shutil
import weakref

import pytest
import torch
from flat import FULL, LIVE, MAX_TOKENS, NONE, PIECEWISE, capture, flat, run, same
from harness import PROMPTS, cpu_engine, greedy
from paged import load
from tiny import make_tiny

from specdec.verifier import compile as compile_module
from specdec.verifier.compile import CompilationConfig
from specdec.verifier.lora import LoraSlots

pytest.importorskip("torch._inductor")
if shutil.which("g++") is None or "CXX" in os.environ:
    pytest.skip("needs g++, and CXX unset", allow_module_level=True)

LAYERS = 3
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
MIXES = ([0, -1, 2], [1, 1, -1])


@pytest.fixture(scope="module", autouse=True)
def cut_on_the_cpu():
    from torch._inductor.scheduler import BaseSchedulerNode

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseSchedulerNode, "is_gpu", lambda self: True)
        patch.setattr(CompilationConfig, "unsupported_on", lambda self, device: None)
        yield


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A model, and the folder that holds what was compiled of it."""
    root = tmp_path_factory.mktemp("partitions")
    make_tiny(root / "model", layers=LAYERS, family="qwen2")
    model = load(root / "model")
    return root, model, partitioned(model, root / "cache")


def partitioned(model, cache, **options):
    return flat(
        model,
        use_inductor_graph_partition=True,
        backend="inductor",
        cache_dir=str(cache),
        **options,
    )


def test_all_modes_give_what_no_compilation_gives(compiled):
    """A partition before, between and after the layers' attention; a FULL graph holds the whole."""
    _, model, runner = compiled
    assert runner.num_pieces == LAYERS + 1
    for mode in (PIECEWISE, FULL):
        for size in (MAX_TOKENS, LIVE):
            capture(runner, mode, size)
    for seed in (0, 1):
        expected = run(flat(model), NONE, seed=seed)
        for mode in (NONE, PIECEWISE, FULL, PIECEWISE):
            for size in (MAX_TOKENS, LIVE):
                assert same(run(runner, mode, size, seed), expected), (mode, size)
    replays = {(row.mode, row.descriptor.num_tokens): row.replays for row in runner.table()}
    assert replays == {
        ("PIECEWISE", MAX_TOKENS): 4,
        ("PIECEWISE", LIVE): 4,
        ("FULL", MAX_TOKENS): 2,
        ("FULL", LIVE): 2,
    }


def test_verified_graphs_show_no_error(compiled):
    root, model, _ = compiled
    runner = partitioned(model, root / "cache", verify=True)
    for mode in (PIECEWISE, FULL):
        capture(runner, mode, MAX_TOKENS)
        assert same(run(runner, mode, MAX_TOKENS), run(flat(model), NONE))
    assert [row.max_error for row in runner.table()] == [0.0, 0.0]


def test_a_folder_gives_partitions_without_compiling(compiled, tmp_path):
    """Other weights, and a copy of the folder: what is loaded is wrapped as what was compiled."""
    from specdec.verifier import inductor

    root, _, _ = compiled
    shutil.copytree(root / "cache", tmp_path / "copy")
    model = load(make_tiny(tmp_path / "other", layers=LAYERS, family="qwen2", seed=9))
    before = inductor.counts["compiled"]
    runner = partitioned(model, tmp_path / "copy")
    assert inductor.counts["compiled"] == before
    assert runner.num_pieces == LAYERS + 1
    capture(runner, PIECEWISE, MAX_TOKENS)
    assert same(run(runner, PIECEWISE, MAX_TOKENS), run(flat(model), NONE))
    (row,) = runner.table()
    assert row.mode == "PIECEWISE" and row.replays == 1


def test_static_sizes_have_partitions_of_their_own(compiled):
    root, model, _ = compiled
    runner = partitioned(model, root / "cache", compile_sizes=[MAX_TOKENS])
    expected = run(flat(model), NONE)
    capture(runner, PIECEWISE, MAX_TOKENS, 16)
    for size in (MAX_TOKENS, 16):
        assert same(run(runner, PIECEWISE, size), expected)
    assert {row.descriptor.num_tokens: row.replays for row in runner.table()} == {
        MAX_TOKENS: 1,
        16: 1,
    }


def test_adapters_are_inputs_of_the_partitions(compiled):
    root, _, _ = compiled
    model = load(make_tiny(root / "adapted", layers=LAYERS, family="qwen2"))
    slots = LoraSlots(model, max_loras=3, max_rank=4, vocabulary=True)
    slots.attach()
    slots.data.normal_(std=0.2, generator=torch.Generator().manual_seed(5))
    runner = partitioned(model, root / "cache")
    runner.enable_lora(3)
    for mode in (PIECEWISE, FULL):
        capture(runner, mode, MAX_TOKENS, has_lora=True)
    for seed, each in enumerate(MIXES):
        expected = run(flat(model), NONE, seed=seed, slots=each)
        for mode in (NONE, PIECEWISE, FULL):
            assert same(run(runner, mode, MAX_TOKENS, seed, each), expected)
    memory = weakref.ref(slots.data)
    slots.detach()
    runner.clear()
    del slots
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_gives_the_same_text_in_every_mode(compiled, mode):
    root, _, _ = compiled
    model = str(root / "model")
    with cpu_engine(model, "layer_skip:1", 3, cudagraph_mode="NONE") as engine:
        expected = [out.token_ids for out in engine.generate(PROMPTS, greedy(14))]
    config = {"use_inductor_graph_partition": True, "backend": "inductor"}
    with cpu_engine(
        model, "layer_skip:1", 3, cudagraph_mode=mode, debug=True, uniform_request_counts=[2, 5],
        compilation_config={**config, "cache_dir": str(root / "cache")},
    ) as engine:  # fmt: skip
        assert [out.token_ids for out in engine.generate(PROMPTS, greedy(14))] == expected
        modes = {name for name, count in engine.stats().steps_by_mode.items() if count}
        wanted = {"FULL_DECODE_ONLY": {"FULL", "NONE"}, "FULL_AND_PIECEWISE": {"FULL", "PIECEWISE"}}
        assert modes == wanted.get(mode, {mode})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": 0}, "mode 0 compiles nothing"),
        ({"mode": 1}, "needs mode 3 and backend inductor, not mode 1"),
        ({"backend": "eager"}, "needs mode 3 and backend inductor, not mode 3 and backend eager"),
        ({"use_inductor_graph_partition": 1}, "must be true or false, not 1"),
    ],
)
def test_what_it_cannot_go_with_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        CompilationConfig.parse({"use_inductor_graph_partition": True} | values)


def test_a_torch_without_it_is_refused_with_what_it_lacks(monkeypatch):
    config = CompilationConfig(use_inductor_graph_partition=True)
    assert config.level == 3 and config.no_piecewise is None
    monkeypatch.setattr(
        compile_module, "_exists", lambda name: not name.endswith("custom_should_partition_ops")
    )
    with pytest.raises(ValueError, match=r"custom_should_partition_ops, which torch .* lacks"):
        CompilationConfig(use_inductor_graph_partition=True)


def test_every_name_that_is_asked_for_is_looked_up():
    assert all(compile_module._exists(name) for name in compile_module._PARTITION_API)
    assert not compile_module._exists("torch._inductor.config.no_such_option")
