"""Graphs of batches with prompts and adapters: the model in pieces, and whole.

The adapters' slots and the rows sorted by slot are inputs of a piece, as its weights are.
"""

import gc
import weakref

import pytest
import torch
from flat import FULL, LIVE, MAX_TOKENS, NONE, PIECEWISE, capture, flat, run, same
from harness import PROMPTS, cpu_engine, greedy
from oracle import expect
from paged import load
from tiny import make_tiny

from specdec.verifier.lora import LoraSlots
from specdec.verifier.split import PieceCall, split, trace_model

ATTENTION = "specdec::attention"
# Of the three requests of a batch.
MIXES = ([0, -1, 2], [1, 1, -1], [2, 0, 1], [-1, -1, -1])
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


def with_slots(model, *, vocabulary=False, std=0.2):
    slots = LoraSlots(model, max_loras=3, max_rank=4, vocabulary=vocabulary)
    slots.attach()
    slots.data.normal_(std=std, generator=torch.Generator().manual_seed(5))
    return slots


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A model of four layers with three adapters, on its embedding and head too."""
    model = load(make_tiny(tmp_path_factory.mktemp("adapted"), layers=4))
    return model, with_slots(model, vocabulary=True)


def lora_flat(model, **options):
    runner = flat(model, **options)
    runner.enable_lora(3)
    return runner


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("layers", [3, 6])
def test_a_homogeneous_stack_has_three_pieces_with_adapters_too(tmp_path, family, layers):
    """Neither a layer's number nor its adapters' weights are in a piece, and no size is."""
    model = load(make_tiny(tmp_path, layers=layers, family=family))
    slots = with_slots(model)
    before = set(vars(model))
    chain = split(trace_model(model, has_lora=True), model, {ATTENTION})
    assert set(vars(model)) == before
    pieces = [call.piece for call in chain.calls if isinstance(call, PieceCall)]
    assert pieces == [0] + [1] * (layers - 1) + [2] and len(chain.pieces) == 3
    assert chain.inputs[3:] == ("adapter_slots", "adapter_tiles")
    addresses = {slots.data.untyped_storage().data_ptr()}
    for call in chain.calls:
        if isinstance(call, PieceCall):
            piece = chain.pieces[call.piece]
            assert not [node for node in piece.module.graph.nodes if node.op == "get_attr"]
            stacks = [w for w in call.weights if w.untyped_storage().data_ptr() in addresses]
            # Two for each adapted layer: all four, the first alone, all but the first.
            assert len(stacks) == {0: 2, 1: 8, 2: 6}[call.piece]
            assert "size" not in piece.text and "shape" not in piece.text.partition("weights")[0]


@pytest.mark.parametrize("compilation", [{}, {"mode": 3, "backend": "eager"}], ids=["", "compiled"])
@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_graph_equals_eager(adapted, mode, compilation):
    """Padded or not, on other adapters than those of the capture, which were none."""
    model, _ = adapted
    runner = lora_flat(model, **compilation)
    for size in (MAX_TOKENS, LIVE):
        capture(runner, mode, size, has_lora=True)
    base = run(flat(model), NONE)
    for seed, slots in enumerate(MIXES):
        expected = run(flat(model), NONE, seed=seed, slots=slots)
        for size in (MAX_TOKENS, LIVE):
            assert same(run(runner, mode, size, seed, slots), expected)
        assert same(run(runner, NONE, seed=seed, slots=slots), expected)
        assert same(expected, base) == (seed == 0 and max(slots) < 0)
    for row in runner.table():
        assert row.mode == mode.name and row.descriptor.has_lora and row.replays == len(MIXES)
        assert row.num_bytes > 0


def test_graphs_with_and_without_adapters_live_side_by_side(adapted):
    """C42: one shape, both kinds of both modes; only the one that matches fires."""
    model, _ = adapted
    runner = lora_flat(model)
    for mode in (PIECEWISE, FULL):
        for has_lora in (False, True):
            capture(runner, mode, MAX_TOKENS, has_lora=has_lora)
    for mode in (FULL, PIECEWISE, FULL):
        for slots in (None, MIXES[0], None, MIXES[1]):
            got = run(runner, mode, MAX_TOKENS, slots=slots)
            assert same(got, run(flat(model), NONE, slots=slots))
    replays = {(row.mode, row.descriptor.has_lora): row.replays for row in runner.table()}
    assert replays == {
        ("PIECEWISE", False): 2,
        ("PIECEWISE", True): 2,
        ("FULL", False): 4,
        ("FULL", True): 4,
    }


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_an_adapter_loaded_after_the_capture_is_used(adapted, mode):
    """C35, C42: weights are read where they lie, not as they were."""
    model, slots = adapted
    runner = lora_flat(model)
    capture(runner, mode, MAX_TOKENS, has_lora=True)
    before = run(runner, mode, MAX_TOKENS, slots=MIXES[0])
    kept = slots.data.clone()
    try:
        slots.load(2, kept[1])
        got = run(runner, mode, MAX_TOKENS, slots=MIXES[0])
        assert same(got, run(flat(model), NONE, slots=[0, -1, 1])) and not same(got, before)
    finally:
        slots.data.copy_(kept)


def test_a_lora_kernel_may_be_a_splitting_operator(adapted):
    model, _ = adapted
    runner = lora_flat(model, mode=3, splitting_ops=[ATTENTION, "specdec.lora_linear_silu_mul"])
    capture(runner, PIECEWISE, MAX_TOKENS, has_lora=True)
    for slots in MIXES[:2]:
        expected = run(flat(model), NONE, slots=slots)
        assert same(run(runner, PIECEWISE, MAX_TOKENS, slots=slots), expected)


def test_released_graphs_let_go_of_the_adapters(tmp_path):
    model = load(make_tiny(tmp_path, layers=2))
    slots = with_slots(model)
    runner = lora_flat(model)
    capture(runner, PIECEWISE, MAX_TOKENS, has_lora=True)
    slots.detach()
    memory = weakref.ref(slots.data)
    del slots
    gc.collect()
    assert memory() is not None
    runner.clear()
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize(
    "compilation", [None, {"mode": 3, "backend": "eager"}], ids=["", "compiled"]
)
@pytest.mark.parametrize("mode", MODES)
def test_every_step_runs_as_its_mode_promises(models, lora, mode, compilation):
    """Prompts of mixed adapters arrive while others decode: text, counts and graphs as without."""
    decode, mixed = {
        "FULL_DECODE_ONLY": ("FULL", "NONE"),
        "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
    }.get(mode, (mode, mode))
    names = ["a", None, "b", "c", "a"]
    with cpu_engine(
        models["target"], models["blend.1"], 3, lora=lora.paths, cudagraph_mode=mode, debug=True,
        uniform_request_counts=[5], compilation_config=compilation,
    ) as engine:  # fmt: skip
        groups = []
        for prompt, name in zip(PROMPTS, names, strict=True):
            groups.append(engine.add_request(prompt, greedy(12), name))
            engine.step()
        while any(group[0].finish_reason is None for group in groups):
            engine.step()
        for group, prompt, name in zip(groups, PROMPTS, names, strict=True):
            out = engine.generation(group)
            expect(out, lora.expected(name, "blend.1", prompt, 3, 12))
        records = engine.recent_steps(1000)
        with_prompts = [r for r in records if r.num_tokens != r.num_reqs * (1 + r.k)]
        assert {r.mode for r in with_prompts} == {mixed}
        assert {r.mode for r in records if r not in with_prompts} == {decode}
        assert any(r.descriptor.has_lora for r in with_prompts)
        flat_rows = [
            row
            for row in engine.graph_table()
            if row.role == "target" and not row.descriptor.uniform
        ]
        replayed = [r for r in records if r.mode != "NONE" and not r.descriptor.uniform]
        for has_lora in (False, True):
            of_kind = [row for row in flat_rows if row.descriptor.has_lora == has_lora]
            count = sum(r.descriptor.has_lora == has_lora for r in replayed)
            assert sum(row.replays for row in of_kind) == count


def test_the_planner_and_the_start_up_line_count_them(models, lora, monkeypatch):
    """As on a GPU, where graphs of batches with prompts are captured at start-up."""
    from specdec.graph_keys import CaptureKey
    from specdec.graph_report import start_up_line
    from specdec.graphs import EngineGraphs

    def missing(self):
        mixed = [
            CaptureKey(None, *each)
            for each in self.dispatcher.capture_list()
            if not each[1].uniform
        ]
        return [key for key in mixed if not self._has_graph(key, "greedy")] + original(self)

    original = EngineGraphs._missing
    monkeypatch.setattr(EngineGraphs, "_missing", missing)
    options = {"lora": lora.paths, "uniform_request_counts": [2, 5]}
    with cpu_engine(models["target"], "ngram", 3, **options) as engine:
        rows = engine.graph_table()
        shapes = {has_lora: set() for has_lora in (False, True)}
        for row in rows:
            shapes[row.descriptor.has_lora].add((row.mode, row.descriptor._replace(has_lora=False)))
        assert shapes[True] == {s for s in shapes[False] if s[1].num_reqs == 0 or s[1].uniform}
        line = start_up_line(rows, 1.0)
        assert (
            "FULL up to 5 requests at k=0 and k=3; PIECEWISE with prompts up to 64 tokens" in line
        )
        assert "; all of it with adapters too; 1.0 s" in line
        without = [r for r in rows if not (r.descriptor.has_lora and r.mode == "PIECEWISE")]
        assert "; with adapters FULL up to 5 requests at k=0 and k=3; " in start_up_line(without, 1)
    limit = sum(row.num_bytes for row in rows) // 2
    with cpu_engine(models["target"], "ngram", 3, graph_memory_limit=limit, **options) as engine:
        fewer = engine.graph_table()
        assert sum(row.num_bytes for row in fewer) <= limit
        kinds = {(row.mode, row.descriptor.has_lora) for row in fewer}
        assert kinds == {(m, has_lora) for m in ("FULL", "PIECEWISE") for has_lora in (False, True)}


@pytest.mark.parametrize("family", ["gemma3_text", "mixtral", "deepseek_v3"])
def test_other_families(tmp_path, family):
    """Experts, latents, norms around a layer's parts: what has adapters is cut as all else is.

    Without padding, which on a CPU changes the bits of what experts multiply.
    """
    model = load(make_tiny(tmp_path, layers=4, family=family))
    with_slots(model)
    runner = lora_flat(model)
    for mode in (PIECEWISE, FULL):
        capture(runner, mode, LIVE, has_lora=True)
        for seed, slots in enumerate(MIXES[:2]):
            expected = run(flat(model), NONE, seed=seed, slots=slots)
            assert same(run(runner, mode, LIVE, seed, slots), expected)
            assert not same(expected, run(flat(model), NONE, seed=seed))
