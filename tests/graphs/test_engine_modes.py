"""The five modes at run time: one text, and each batch on the graph that its mode promises."""

import logging

import pytest
from harness import PROMPTS, cpu_engine, greedy

from specdec.verifier.attention.sdpa import SdpaBackend
from specdec.verifier.modes import AttentionCGSupport

MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
GRID = {"uniform_request_counts": [2, 5]}
# What a batch of decode rows, and one with prompts in it, runs as.
SERVED = {
    "NONE": ("NONE", "NONE"),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE"),
    "FULL": ("FULL", "FULL"),
    "FULL_DECODE_ONLY": ("FULL", "NONE"),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
}


def traffic(engine, params=None):
    """Requests that arrive while others decode, prompts of 16 and of 1 + k tokens among them."""
    source = (PROMPTS[4] * 3)[:40]
    prompts = [source[:16], source[:5], PROMPTS[3], source[:40], PROMPTS[1]]
    texts = [[] for _ in prompts]
    streams = []
    for i, prompt in enumerate(prompts):
        streams.append(engine.stream(prompt, params or greedy(14)))
        for j, stream in enumerate(streams[: i + 1]):
            event = next(stream, None)
            texts[j] += event.token_ids if event else []
    for i, stream in enumerate(streams):
        texts[i] += [token for event in stream for token in event.token_ids]
    return texts


def check_modes(engine, mode):
    decode, mixed = SERVED[mode]
    records = engine.recent_steps(1000)
    kinds = set()
    for record in records:
        with_prompts = "prefill" in (record.reason or "") or (
            record.mode == "FULL" and not record.descriptor.uniform
        )
        kinds.add(with_prompts)
        assert record.mode == (mixed if with_prompts else decode), record
        assert record.num_tokens <= record.descriptor.num_tokens
        assert (record.reason is None) == (record.mode == "FULL")
    assert kinds == {True, False}


@pytest.mark.parametrize("draft", ["blend.1", "ngram", None])
def test_five_modes_one_text(models, draft):
    texts = {}
    for mode in MODES:
        with cpu_engine(
            models["target"], models.get(draft, draft), 4, cudagraph_mode=mode, debug=True, **GRID
        ) as engine:
            texts[mode] = traffic(engine)
            check_modes(engine, mode)
            counted = engine.stats().steps_by_mode
            records = engine.recent_steps(1000)
            assert counted == {
                m: sum(r.mode == m for r in records) for m in ("FULL", "PIECEWISE", "NONE")
            }
            flat = [
                row
                for row in engine.graph_table()
                if row.role == "target" and not row.descriptor.uniform
            ]
            with_prompts = sum(not r.descriptor.uniform and r.mode != "NONE" for r in records)
            assert sum(row.replays for row in flat) == with_prompts
    assert all(text == texts["NONE"] for text in texts.values())


@pytest.mark.parametrize("mode", MODES)
def test_sampled_rows_too(models, mode):
    params = greedy(12, temperature=0.8, seed=11, top_p=0.9)
    with (
        cpu_engine(models["target"], models["blend.3"], 3, cudagraph_mode=mode, **GRID) as engine,
        cpu_engine(models["target"], None, 0, cudagraph_mode="NONE") as plain,
    ):
        assert traffic(engine, params) == traffic(plain, params)


@pytest.mark.parametrize("config", [{"mode": 3}, {"mode": 1}, {"mode": 3, "splitting_ops": []}])
def test_compiled_pieces_give_the_same_text(models, config, caplog):
    with cpu_engine(models["target"], models["blend.1"], 4, cudagraph_mode="NONE") as engine:
        expected = traffic(engine)
    with cpu_engine(
        models["target"], models["blend.1"], 4, compilation_config=config, debug=True, **GRID
    ) as engine:
        assert traffic(engine) == expected
        served = "FULL_AND_PIECEWISE" if config == {"mode": 3} else "FULL_DECODE_ONLY"
        check_modes(engine, served)
    downgrades = [r for r in caplog.records if "is served" in r.getMessage()]
    assert len(downgrades) == (served != "FULL_AND_PIECEWISE")


@pytest.mark.parametrize(("draft", "reads"), [("blend.1", True), ("ngram", False), (None, False)])
def test_the_reason_of_a_step_with_prompts(models, draft, reads):
    """What was asked for, and what a drafter that reads prompts runs them on."""
    with cpu_engine(
        models["target"], models.get(draft, draft), 2 if draft else 0, **GRID
    ) as engine:
        engine.generate(PROMPTS[1], greedy(3))
        first = engine.recent_steps(10)[0]
    why = "prefill: cudagraph_mode FULL_AND_PIECEWISE has FULL graphs of uniform batches only"
    assert first.mode == "PIECEWISE"
    assert first.reason == why + "; the drafter reads prompts on no graph" * reads


def test_no_warning_by_default(models, caplog):
    with cpu_engine(models["target"], "ngram", 2, **GRID) as engine:
        traffic(engine)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_vllms_form_on_the_engine(models):
    config = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [5, 25, 40], "mode": 0}
    with cpu_engine(models["target"], models["same"], 4, compilation_config=config) as engine:
        traffic(engine)
        check_modes(engine, "FULL")
        shapes = {row.descriptor for row in engine.graph_table() if row.role == "target"}
        assert {shape.num_tokens for shape in shapes} <= {5, 25, 40}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"modes": 3}, "modes not supported; known keys are cudagraph_mode"),
        ({"mode": 7}, "mode must be 0, 1, 2 or 3"),
        ({"use_inductor_graph_partition": True}, "use_inductor_graph_partition.* device is cpu"),
    ],
)
def test_compilation_config_is_checked_before_anything(config, message):
    with pytest.raises(ValueError, match=message):
        cpu_engine("/nonexistent", compilation_config=config)


@pytest.mark.parametrize(
    ("support", "asked", "served"),
    [
        (AttentionCGSupport.UNIFORM_BATCH, "FULL", "FULL_AND_PIECEWISE"),
        (AttentionCGSupport.NEVER, "FULL_AND_PIECEWISE", "PIECEWISE"),
    ],
)
def test_a_backend_that_supports_less(models, monkeypatch, caplog, support, asked, served):
    original = SdpaBackend.__init__

    def limited(self, device):
        original(self, device)
        self.cg_support = support

    monkeypatch.setattr(SdpaBackend, "__init__", limited)
    with cpu_engine(models["target"], models["blend.1"], 4, cudagraph_mode=asked, **GRID) as engine:
        traffic(engine)
        check_modes(engine, served)
    (record,) = [r for r in caplog.records if "is served" in r.getMessage()]
    assert f"{asked} was asked for, {served} is served" in record.getMessage()


def test_single_token_support_keeps_the_graphs_of_k_0(models, monkeypatch):
    original = SdpaBackend.__init__

    def limited(self, device):
        original(self, device)
        self.cg_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    monkeypatch.setattr(SdpaBackend, "__init__", limited)
    with cpu_engine(models["target"], models["blend.1"], 4, **GRID) as engine:
        traffic(engine)
        by_k = {r.k: r.mode for r in engine.recent_steps(1000) if r.descriptor.uniform or r.k}
        assert by_k[4] == "PIECEWISE"
        engine.generate(PROMPTS, greedy(5, k=0))
        assert engine.recent_steps(1)[0].mode == "FULL"


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "FULL"])
def test_a_property_of_the_batch_forbids_full(models, monkeypatch, mode):
    """As cascade attention does: down to PIECEWISE, or NONE, with the backend's reason."""
    monkeypatch.setattr(
        SdpaBackend,
        "forbids_full",
        lambda self, batch: "its rows share a prefix" if batch.num_reqs == 3 else None,
    )
    with cpu_engine(models["target"], models["same"], 2, cudagraph_mode=mode, **GRID) as engine:
        engine.generate(PROMPTS[:3], greedy(8))
        engine.generate(PROMPTS[:2], greedy(8))
        below = "PIECEWISE" if mode == "FULL_AND_PIECEWISE" else "NONE"
        for record in engine.recent_steps(1000):
            if record.num_reqs == 3:
                # Batches with prompts have no FULL graph under FULL_AND_PIECEWISE anyway.
                had_full = mode == "FULL" or not (record.reason or "").startswith("prefill")
                why = "share a prefix" if had_full else "FULL graphs of uniform batches only"
                assert record.mode == below and why in record.reason
            elif record.descriptor.uniform:
                assert record.mode == "FULL" and record.reason is None


def test_verified_graphs_show_no_error(models):
    with cpu_engine(
        models["target"], models["blend.1"], 3, verify_graphs=True, cudagraph_mode="FULL", **GRID
    ) as engine:
        traffic(engine)
        errors = {row.max_error for row in engine.graph_table() if row.replays}
        assert errors == {0.0}
        assert all(row.max_error is None for row in engine.graph_table() if not row.replays)


def test_a_budget_leaves_sizes_out_and_every_batch_is_covered(models):
    options = {"max_num_seqs": 24, "max_model_len": 64}
    with cpu_engine(models["target"], models["same"], 3, **options) as engine:
        rows = engine.graph_table()
    limit = sum(row.num_bytes for row in rows) * 7 // 10
    with cpu_engine(
        models["target"], models["same"], 3, graph_memory_limit=limit, **options
    ) as engine:
        fewer = engine.graph_table()
        assert sum(row.num_bytes for row in fewer) <= limit and len(fewer) < len(rows)
        for num_reqs in (1, 7, 24):
            engine.generate([PROMPTS[0]] * num_reqs, greedy(6))
        decodes = [r for r in engine.recent_steps(1000) if r.descriptor.uniform]
        assert decodes and {r.mode for r in decodes} == {"FULL"}
        assert len(engine.graph_table()) >= len(fewer)
    with pytest.raises(ValueError, match=r"graph_memory_limit is 100 bytes.*take \d+"):
        cpu_engine(models["target"], models["same"], 3, graph_memory_limit=100, **options)


def test_the_start_up_line(models, caplog):
    with (
        caplog.at_level(logging.INFO, "specdec"),
        cpu_engine(models["target"], models["same"], 4, **GRID),
    ):
        pass
    assert "FULL up to 5 requests at k=0 and k=4; " in caplog.text and " MiB" in caplog.text


def test_nothing_of_torch_compile_is_imported_or_compiled(models):
    """By default no step costs a compilation: there is nothing that could compile."""
    import subprocess
    import sys

    script = (
        "import sys, torch, specdec\n"
        f"e = specdec.Engine({models['target']!r}, 'ngram', 2, device='cpu', max_num_seqs=2)\n"
        "e.generate([[1] * 16, [2, 3]], specdec.SamplingParams(max_new_tokens=4))\n"
        "assert e.stats().steps_by_mode['PIECEWISE'] > 0\n"
        "print([m for m in ('torch._dynamo', 'torch._inductor', 'triton') if m in sys.modules])\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/")
    assert out.stdout.strip() == "[]", out.stderr


def test_plot_of_coverage(models, tmp_path):
    pytest.importorskip("matplotlib")
    from specdec.graph_report import padded_size, plot_graphs

    with cpu_engine(models["target"], models["same"], 4, **GRID) as engine:
        traffic(engine)
        plot_graphs(engine.graph_table(), tmp_path / "graphs.png")
    assert (tmp_path / "graphs.png").read_bytes().startswith(b"\x89PNG")
    assert [padded_size([2, 5], size) for size in (1, 2, 3, 5)] == [2, 2, 5, 5]
    with pytest.raises(ValueError, match="no graphs"):
        plot_graphs([], tmp_path / "none.png")


@pytest.mark.parametrize("draft", ["blend.1", "ngram"])
def test_warming_up_leaves_no_trace(models, draft):
    """It runs on a GPU alone, before the captures: here it is called for what it may not change."""
    with cpu_engine(models["target"], models.get(draft, draft), 2, **GRID) as engine:
        runner = engine._runner
        before = [tensor.clone() for tensor in (runner.state.tokens, runner.state.ints)]
        cache = runner.step.kv_cache.data[:, :, :-1].clone()
        runner.warm_up()
        assert (runner.step.kv_cache.data[:, :, :-1] == cache).all()
        for old, new in zip(before, (runner.state.tokens, runner.state.ints), strict=True):
            assert (old[:-1] == new[:-1]).all()
        assert runner.state.seq_len[-1] == 0
        assert len(engine.generate(PROMPTS, greedy(5))) == len(PROMPTS)
