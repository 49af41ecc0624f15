"""Medusa heads and a target's own module on a real GPU: texts, counts, graphs."""

import medusa_heads
import mtp_modules
import pytest
from eagle_heads import whispering
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, greedy
from oracle import Oracle

import specdec

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Head size 64, a group of three; by draft: model, name of the draft, expectation by oracle."""
    root = tmp_path_factory.mktemp("heads")
    shape = {"hidden": 192, "heads": 3, "kv_heads": 1, "head_dim": 64, "ffn": 320, "vocab": 300}
    plain = whispering(root / "plain", family="qwen2", loud=0.006, habit=0.0, **shape)
    oracle = Oracle(plain)
    heads = medusa_heads.make_medusa(oracle, plain, root / "heads", PROMPTS)
    with_module = mtp_modules.add_module(plain, root / "mtp", "mimo")
    medusa = medusa_heads.MedusaOracle(oracle, heads)
    module = mtp_modules.MtpOracle(oracle, with_module, "mimo")
    return {
        "medusa": (
            str(plain),
            f"medusa:{heads}",
            lambda prompt, k: medusa_heads.speculate(medusa, prompt, k=k, max_new_tokens=32),
        ),
        "mtp": (
            str(with_module),
            "mtp",
            lambda prompt, k: mtp_modules.speculate(module, prompt, k=k, max_new_tokens=32),
        ),
    }


def gpu_engine(model, draft, k, **options):
    defaults = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_num_seqs": 8,
        "max_model_len": 256,
        "num_kv_blocks": 512,
    }
    return specdec.Engine(model, draft, k, **(defaults | options))


def ids(outs):
    return [out.token_ids for out in outs]


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("name", ["medusa", "mtp"])
def test_float32_counts_are_the_oracle_s(made, name, k, mode):
    model, draft, expected_of = made[name]
    with gpu_engine(model, draft, k, dtype="float32", cudagraph_mode=mode) as engine:
        for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(32)), strict=True):
            expected = expected_of(prompt, k)
            certain = expected.num_certain
            assert out.token_ids[:certain] == expected.token_ids[:certain]
            if certain == 32:
                assert out.stats.drafted_per_step == expected.drafted
                assert out.stats.accepted_per_step == expected.accepted
        assert engine.stats().accepted > 0
        assert_no_leak(engine)


@pytest.mark.parametrize("before", ["", "suffix+"])
@pytest.mark.parametrize("name", ["medusa", "mtp"])
def test_bfloat16_texts_are_those_without_a_drafter(made, name, before):
    """P1, bit for bit, greedy and seeded; and graphs draft what eager drafts."""
    model, draft, _ = made[name]
    params = [greedy(64), greedy(32, temperature=0.9, seed=11)]
    with gpu_engine(model, None, 4) as engine:
        expected = [ids(engine.generate(PROMPTS, each)) for each in params]
    for k in (1, 4, 7):
        with gpu_engine(model, before + draft, k, debug=True) as engine:
            assert [ids(engine.generate(PROMPTS, each)) for each in params] == expected
            assert engine.stats().accepted > 0
            assert_decodes_replayed(engine)
            assert_no_leak(engine)
    with (
        gpu_engine(model, before + draft, 4) as graphs,
        gpu_engine(model, before + draft, 4, cudagraph_mode="NONE") as eager,
    ):
        for prompt in PROMPTS:
            one, other = graphs.generate(prompt, greedy(32)), eager.generate(prompt, greedy(32))
            assert one.stats.drafted_per_step == other.stats.drafted_per_step
            assert one.stats.accepted_per_step == other.stats.accepted_per_step
