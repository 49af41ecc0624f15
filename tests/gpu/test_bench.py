"""The benchmark on a GPU: simulated acceptance in graphs, parts timed by events, a whole point."""

import pytest
from tiny import make_tiny

import specdec
from specdec.bench.parts import PartTimer
from specdec.bench.settings import Settings
from specdec.bench.sweep import run_sweep

pytestmark = pytest.mark.gpu

RATES = [0.9, 0.6, 0.8, 0.7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    shape = {"hidden": 192, "heads": 3, "kv_heads": 1, "head_dim": 64, "ffn": 320}
    return str(make_tiny(folder, vocab=300, tokenizer="bytes", max_position=1024, **shape))


def engine_on(device: str, model: str, draft: str) -> specdec.Engine:
    return specdec.Engine(
        model, draft, 4, device=device, dtype="float32", max_num_seqs=2, max_model_len=512,
        num_kv_blocks=128, simulated_acceptance=RATES, capture="lazy",
    )  # fmt: skip


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", ["ngram", "layer_skip:1", "model"])
def test_draws_are_those_of_the_cpu(model: str, draft: str, params: dict) -> None:
    """They depend on the row and the position alone, whatever the device computes."""
    wanted = specdec.SamplingParams(max_new_tokens=120, ignore_eos=True, **params)
    counts = []
    for device in ("cpu", "cuda"):
        with engine_on(device, model, model if draft == "model" else draft) as engine:
            out = engine.generate([[5, 6, 7, 8, 9]], wanted)[0]
            assert out.simulated
            stats = engine.stats()
            assert stats.steps_by_mode["FULL"] >= out.stats.steps
        counts.append((out.stats.drafted_per_step, out.stats.accepted_per_step))
    assert counts[0] == counts[1]
    assert 0 < sum(counts[1][1]) < sum(counts[1][0])


def test_parts_are_full_graphs_and_add_up_roughly(model: str) -> None:
    """Draft and verify alone are each shorter than the step; a chain's acceptance much shorter."""
    with engine_on("cuda", model, model) as engine:
        timer = PartTimer(engine, replays=20)
        for num_reqs, k in ((1, 0), (1, 4), (2, 4)):
            parts = timer.parts(num_reqs, k, 100)
            step, draft, verify, accept = (
                parts[name] for name in ("step", "draft", "verify", "accept")
            )
            assert step is not None and draft is not None
            assert verify is not None and accept is not None
            assert 0 < accept < verify < 1.5 * step
            assert (0 < draft < step) == (k > 0)
        roles = {(row.role, row.mode) for row in engine.graph_table()}
        assert {("step", "FULL"), ("target", "FULL"), ("draft_decode", "FULL")} <= roles
        # The engine serves as before.
        params = specdec.SamplingParams(max_new_tokens=20, ignore_eos=True)
        assert len(engine.generate([[5, 6, 7]], params)[0].token_ids) == 20
        engine.check_integrity()


def test_a_sweep(model: str) -> None:
    settings = Settings(
        model=model, drafts=("ngram",), ks=(0, 2, "auto"), num_reqs=(1, 4), num_prompts=4,
        max_new_tokens=24, ignore_eos=True, simulate=((0.8,),), device="cuda",
    )  # fmt: skip
    got = run_sweep(settings)
    assert len(got["points"]) == 12
    # Of any GPU: from 0.1 to 20 TB a second.
    assert 1e11 < got["bandwidth_bytes_per_second"] < 2e13
    for point in got["points"]:
        assert set(point["decode_steps_by_mode"]) == {"FULL"}
        assert point["peak_gpu_memory_bytes"] > 0
        assert 0 < point["share_of_floor"] < 1
        assert point["texts_equal_to_k0"] in (None, point["texts"])
        if point["k"] != "auto":
            assert point["parts_ms"]["step"] > 0
