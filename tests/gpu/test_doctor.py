"""The doctor on a GPU, in bfloat16: predictions are counts to the step, and texts are equal."""

import pytest
import torch
from faulty_drafters import OldKeys, UnreadPrompt
from harness import PROMPTS
from tiny import blended, make_tiny

from specdec.doctor.run import Settings, run_doctor
from specdec.verifier.attention.select import select_backend
from specdec.verifier.loading import load_model

pytestmark = pytest.mark.gpu

SHAPE = {"hidden": 192, "heads": 3, "kv_heads": 1, "head_dim": 64, "ffn": 320, "vocab": 300}
ENGINE = {
    "device": "cuda",
    "max_num_seqs": 8,
    "max_model_len": 256,
    "num_kv_blocks": 512,
    "uniform_request_counts": [1, 8],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("doctor")
    target = make_tiny(root / "target", seed=3, std=0.15, dtype=torch.bfloat16, **SHAPE)
    return {"target": str(target), "blend": str(blended(target, root / "blend", 0.1))}


def doctor(model, draft, **options):
    settings = Settings(
        model=model,
        draft=draft,
        engine=ENGINE | options.pop("engine", {}),
        prompt_ids=PROMPTS,
        max_new_tokens=64,
        **options,
    )
    report = run_doctor(settings)
    return report, {check.name: check for check in report.checks}


@pytest.mark.parametrize("draft", ["blend", "ngram", "layer_skip:1"])
def test_the_prediction_is_the_count_in_bfloat16(models, draft):
    """One row's bits are the same in a prefill and in a step, so that no near tie is left over."""
    report, checks = doctor(models["target"], models.get(draft, draft), acceptance=True)
    assert report.exit_code == 0, report.checks
    assert checks["plan"].status == "ok"
    assert checks["target's text"].status == "ok"
    assert report.acceptance["differing_steps"] == 0
    assert report.acceptance["predicted"] == report.acceptance["measured"]
    if draft == "blend":
        assert checks["draft KV"].status == "ok"


@pytest.mark.parametrize("fault", [OldKeys, UnreadPrompt])
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
def test_a_stale_draft_kv_is_named(models, fault, mode):
    backend = select_backend(
        "auto", head_size=64, dtype=torch.bfloat16, block_size=16, device="cuda"
    )
    draft = load_model(models["target"], device="cuda", attention_backend=backend)
    drafter = fault(draft, vocab_size=300)
    report, checks = doctor(
        models["target"], drafter, acceptance=True, engine={"cudagraph_mode": mode}
    )
    assert report.exit_code == 1
    assert checks["draft KV"].status == "fault", checks["draft KV"]
    assert checks["acceptance"].status == "fault", checks["acceptance"]


def test_texts_are_equal_bit_for_bit(models):
    report, checks = doctor(models["target"], models["blend"], lossless=True, seconds=20)
    assert checks["lossless"].status == "ok", checks["lossless"]
    assert report.lossless["exact"] and report.lossless["dtype"] == "bfloat16"
    assert report.lossless["compared"] >= 2 * 64 * len(PROMPTS)


def test_memory_is_planned_as_it_is_found(models):
    """The pool is left to the memory that there is, and the graphs to the mode."""
    engine = {"num_kv_blocks": None, "max_model_len": 512}
    report, checks = doctor(models["target"], "ngram", load=True, engine=engine)
    assert [checks[name].status for name in ("memory", "plan", "capture")] == ["ok"] * 3
    facts = {fact.name: fact.value for fact in report.plan}
    # Eight texts of 512 tokens are all that it can use: 256 blocks of 16.
    assert "256 blocks of 16, 4,096 tokens, 8 texts of 512" in facts["KV cache"]
    assert "in 256 blocks" in facts["KV made"]
