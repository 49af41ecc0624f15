"""The engine on a real GPU: P1 with counts, P3, P4, in float32 and in bfloat16."""

import pytest
import torch
from harness import PROMPTS, assert_no_leak, greedy
from oracle import Oracle, speculate
from tiny import blended, make_tiny, negated

import specdec

pytestmark = pytest.mark.gpu

KS = (1, 2, 4, 7)
BACKENDS = ("triton", "sdpa")
# A bfloat16 logit carries 8 bits: two logits of size 10 are told apart from 0.06 on.
BF16_MARGIN = 0.25


def gpu_engine(model, draft=None, k=4, **options):
    defaults = {
        "device": "cuda",
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_model_len": 256,
        "num_kv_blocks": 512,
        "kv_block_size": 16,
    }
    return specdec.Engine(model, draft, k, **(defaults | options))


def ids(outs):
    return [out.token_ids for out in outs]


@pytest.fixture(scope="module")
def wide_models(tmp_path_factory):
    """Head size 64 and a group of three: the shape of the bundled model, and real tiles."""
    root = tmp_path_factory.mktemp("wide")
    shape = {"hidden": 192, "heads": 3, "kv_heads": 1, "head_dim": 64, "ffn": 320, "vocab": 300}
    target = make_tiny(root / "target", seed=3, std=0.15, **shape)
    return {
        "target": str(target),
        "same": str(target),
        "negated": str(negated(target, root / "negated")),
        "blend": str(blended(target, root / "blend", 0.1)),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("draft", ["same", "negated", "blend.1"])
def test_greedy_and_counts_are_the_oracle_s(models, oracles, draft, mode, backend):
    """P1 in float32: a stale draft KV or a lost position changes the counts, if not the text."""
    for k in KS:
        with gpu_engine(
            models["target"], models[draft], k, cudagraph_mode=mode, attention_backend=backend
        ) as engine:
            outs = engine.generate(PROMPTS, greedy(24))
            for prompt, out in zip(PROMPTS, outs, strict=True):
                expected = speculate(
                    oracles["target"], oracles[draft], prompt, k=k, max_new_tokens=24
                )
                certain = expected.num_certain
                assert out.token_ids[:certain] == expected.token_ids[:certain]
                if certain == 24:
                    assert out.stats.drafted_per_step == expected.drafted
                    assert out.stats.accepted_per_step == expected.accepted
            assert_no_leak(engine)


@pytest.mark.parametrize("draft", ["same", "negated", "blend", "ngram", "layer_skip:1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_does_not_depend_on_the_drafter(wide_models, draft, dtype):
    """P1 against the same engine without a drafter; bfloat16 by the margin rule."""
    target = wide_models["target"]
    reference = None
    for k in (0, *KS):
        with gpu_engine(target, wide_models.get(draft, draft) if k else None, k, dtype=dtype) as e:
            got = ids(e.generate(PROMPTS, greedy(64)))
            seeded = ids(e.generate(PROMPTS, greedy(32, temperature=1.0, seed=11)))
        if reference is None:
            reference, reference_seeded = got, seeded
            oracle = Oracle(target)
        for prompt, text, expected in zip(PROMPTS, got, reference, strict=True):
            _same_or_close_call(
                oracle, prompt, text, expected, 1e-4 if dtype == "float32" else BF16_MARGIN
            )
        if dtype == "float32":
            assert seeded == reference_seeded


def _same_or_close_call(oracle, prompt, text, expected, margin):
    """Equal, or different first where the float32 reference's two best logits are close."""
    if text == expected:
        return
    at = next(i for i, (a, b) in enumerate(zip(text, expected, strict=True)) if a != b)
    best = oracle.logits([*prompt, *expected[:at]])[-1].topk(2).values
    assert best[0] - best[1] < margin, (at, text[at], expected[at], best.tolist())


@pytest.mark.parametrize("draft", ["same", "blend", "ngram", None])
def test_a_result_does_not_depend_on_its_neighbours(wide_models, draft):
    """P3, float32: alone (padded to nothing), among others, and beside a row that ends early."""
    with gpu_engine(wide_models["target"], wide_models.get(draft, draft), 4) as engine:
        alone = [engine.generate(prompt, greedy(40)) for prompt in PROMPTS]
        together = engine.generate(PROMPTS, greedy(40))
        uneven = engine.generate(PROMPTS, [greedy(3 + 9 * i) for i in range(len(PROMPTS))])
        assert ids(together) == ids(alone)
        for out, whole in zip(uneven, alone, strict=True):
            assert out.token_ids == whole.token_ids[: len(out.token_ids)]
        for out, whole in zip(together, alone, strict=True):
            assert out.stats.accepted_per_step == whole.stats.accepted_per_step
        assert_no_leak(engine)


@pytest.mark.parametrize("k", [0, 2, 4])
@pytest.mark.parametrize("shape", ["tiny", "wide"])
def test_every_captured_key_equals_eager(models, wide_models, shape, k):
    """P4 for every request count up to the largest, greedy and sampled, of two models."""
    target = {"tiny": models["target"], "wide": wide_models["target"]}[shape]
    draft = {"tiny": models["blend.1"], "wide": wide_models["blend"]}[shape]
    params = [greedy(12), greedy(12, temperature=0.8, seed=5)]
    with (
        gpu_engine(target, draft, k, debug=True, steps_per_replay=1) as graphs,
        gpu_engine(target, draft, k, cudagraph_mode="NONE") as eager,
    ):
        for count in range(1, 9):
            prompts = [PROMPTS[i % 5][: 1 + i] for i in range(count)]
            for each in params:
                got, expected = graphs.generate(prompts, each), eager.generate(prompts, each)
                assert ids(got) == ids(expected)
                assert [o.stats.accepted_per_step for o in got] == [
                    o.stats.accepted_per_step for o in expected
                ]
        assert graphs.stats().steps_by_mode["FULL"] > 0
        assert eager.stats().steps_by_mode["FULL"] == 0
        unused = [row for row in graphs.graph_table() if row.role == "step" and not row.replays]
        assert not [row for row in unused if row.descriptor.query_len == 1 + k]


def test_decode_steps_replay_full_graphs(wide_models):
    with gpu_engine(wide_models["target"], "ngram", 4, max_num_seqs=9) as engine:
        for count in range(1, 10):
            engine.generate([[7, 8, 9, i + 1] for i in range(count)], greedy(16))
        for record in engine.recent_steps(1000):
            assert record.mode == "FULL" or "prefill" in record.reason


def test_capture_is_the_first_cuda_work_of_a_process(models, tmp_path):
    """C31: a fresh process, sampling on, an unseen pair of batch and k, then a second engine."""
    import subprocess
    import sys

    code = f"""
import specdec
for _ in range(2):
    engine = specdec.Engine({models["target"]!r}, {models["blend.1"]!r}, 3, device="cuda",
                            max_num_seqs=3, max_model_len=128, num_kv_blocks=64)
    outs = engine.generate([[5, 17], [7, 7, 7]],
                           specdec.SamplingParams(max_new_tokens=20, temperature=1.0, seed=7))
    assert engine.stats().steps_by_mode["FULL"] > 0
    print([out.token_ids for out in outs])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second


def test_graphs_draw_fresh_numbers(models):
    """C32: draws differ from step to step, repeat with the seed, and differ with another."""
    with gpu_engine(models["target"], models["blend.1"], 4) as engine:
        sample = [greedy(100, temperature=8.0, seed=seed) for seed in (7, 7, 8)]
        a, b, c = ids(engine.generate([[5, 17]] * 3, sample))
        assert a == b != c
        assert len(set(a)) > 40
        unseeded = ids(engine.generate([[5, 17]] * 2, greedy(100, temperature=8.0)))
        assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_draft_keeps_its_own_dtype(models, tmp_path, dtype):
    """C21: a float32 draft beside a half-precision target drafts as it does alone."""
    with gpu_engine(models["target"], models["same"], 4, dtype=dtype) as engine:
        assert engine.drafter.model.dtype == torch.float32
        outs = engine.generate(PROMPTS, greedy(40))
        drafted = sum(out.stats.drafted for out in outs)
        assert sum(out.stats.accepted for out in outs) / drafted > 0.8
