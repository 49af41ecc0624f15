"""Medusa heads: texts and accepted counts against an oracle without a cache, and refusals."""

import json
import shutil

import pytest
import torch
from adapters import write_adapter
from eagle_heads import whispering
from harness import (
    PROMPTS,
    assert_decodes_replayed,
    assert_no_leak,
    chi_square_p_value,
    cpu_engine,
    greedy,
    histogram,
)
from medusa_heads import MedusaOracle, make_medusa, speculate
from oracle import Oracle, expect
from safetensors.torch import load_file, save_file
from tiny import constant_model

ONE_RUNG = {"uniform_request_counts": [5]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target and heads of one and of two blocks."""
    root = tmp_path_factory.mktemp("medusa")
    target = str(whispering(root / "target", loud=0.006, habit=0.0))
    oracle = Oracle(target)
    heads = {
        "one": make_medusa(oracle, target, root / "one", PROMPTS, noise=0.3),
        "two": make_medusa(oracle, target, root / "two", PROMPTS, num_heads=4, num_layers=2),
    }
    return target, oracle, {name: str(path) for name, path in heads.items()}


@pytest.fixture(params=["graphs", "eager"])
def mode(request):
    return ONE_RUNG if request.param == "graphs" else {"cudagraph_mode": "NONE"}


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("name", ["one", "two"])
def test_texts_and_counts_are_the_oracle_s(engines, made, name, k, mode):
    """P1; a k above the number of heads drafts as many tokens as there are heads."""
    target, oracle, heads = made
    medusa = MedusaOracle(oracle, heads[name])
    engine = engines(target, f"medusa:{heads[name]}", k, **mode)
    outs = engine.generate(PROMPTS, greedy(40))
    for prompt, out in zip(PROMPTS, outs, strict=True):
        expect(out, speculate(medusa, prompt, k=k, max_new_tokens=40))
    stats = engine.stats()
    assert 0.1 < stats.accepted / stats.drafted < 0.95
    assert stats.by_source["medusa"].accepted == stats.accepted
    if mode is ONE_RUNG:
        assert_decodes_replayed(engine)
    assert_no_leak(engine)


def test_steps_without_drafts_cached_prompts_and_preemption_cost_nothing(made):
    """Each row's own k, 0 too; prompts in chunks, beside others, from the cache and once more."""
    target, oracle, heads = made
    medusa = MedusaOracle(oracle, heads["two"])
    with cpu_engine(
        target, f"medusa:{heads['two']}", 4, max_num_seqs=3, num_kv_blocks=20,
        max_num_batched_tokens=20,
    ) as engine:  # fmt: skip
        for _ in range(2):
            own_k = [None, 0, 4, 2, 4]
            params = [greedy(40, k=k) for k in own_k]
            outs = engine.generate(PROMPTS, params)
            for prompt, k, out in zip(PROMPTS, own_k, outs, strict=True):
                own = 4 if k is None else k
                expect(out, speculate(medusa, prompt, k=own, max_new_tokens=40))
        assert engine.stats().preemptions > 0
        assert_no_leak(engine)


def test_lookup_before_heads(made, engines):
    """A second time lookup has seen the text; the text is the same and all of it is accepted."""
    target, oracle, heads = made
    engine = engines(target, f"suffix+medusa:{heads['one']}", 4, **ONE_RUNG)
    for _ in range(2):
        for prompt in PROMPTS[:3]:
            out = engine.generate(prompt, greedy(40))
            assert out.token_ids == oracle.greedy(prompt, 40)[0]
    counts = engine.stats().by_source
    assert counts["suffix"].accepted > 40
    assert counts["medusa"].accepted > 0


def test_rows_with_adapters_keep_their_texts(made, tmp_path):
    target, _, heads = made
    paths = {"a": write_adapter(tmp_path / "a", target, std=0.02)}
    with (
        cpu_engine(target, None, 0, lora=paths) as plain,
        cpu_engine(target, f"medusa:{heads['one']}", 3, lora=paths, **ONE_RUNG) as engine,
    ):
        names = ["a", None, "a"]
        wanted = plain.generate(PROMPTS[:3], greedy(30), lora=names)
        got = engine.generate(PROMPTS[:3], greedy(30), lora=names)
        assert [out.token_ids for out in got] == [out.token_ids for out in wanted]
        assert engine.stats().accepted > 0


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_sampled_texts_follow_the_target(tmp_path, acceptance):
    """900 tokens by three heads of other distributions; one seed in a million fails."""
    probs = (0.6, 0.3, 0.1)
    target = constant_model(tmp_path / "target", probs)
    heads = make_medusa(Oracle(target), target, tmp_path / "heads", [[0, 1, 2, 2, 1, 0, 1]])
    with cpu_engine(
        str(target), f"medusa:{heads}", 3, acceptance=acceptance, max_model_len=310, **ONE_RUNG
    ) as engine:
        params = [greedy(300, temperature=1.0, seed=seed) for seed in range(3)]
        outs = engine.generate([[0]] * 3, params)
        assert 0.2 < engine.stats().accepted / engine.stats().drafted < 0.98
    ids = [token for out in outs for token in out.token_ids]
    assert chi_square_p_value(histogram(ids, 3), probs) > 1e-6


CONFIGS = [
    ({"medusa_num_heads": None}, "medusa_num_heads"),
    ({"medusa_num_layers": 0}, "medusa_num_layers"),
    ({"medusa_num_heads": 4}, "lacks the tensor 3.0.linear.weight"),
    ({"medusa_num_heads": 2}, "no use for: 2."),
    ({"hidden_size": 128}, "hidden_size is 128"),
    ({"vocab_size": 99}, "vocab_size is 99"),
]


@pytest.mark.parametrize(("change", "message"), CONFIGS, ids=lambda v: str(v))
def test_a_config_that_does_not_fit_is_refused(made, tmp_path, change, message):
    target, _, heads = made
    copy = shutil.copytree(heads["one"], tmp_path / "heads")
    config = json.loads((copy / "config.json").read_text()) | change
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        cpu_engine(target, f"medusa:{copy}", 3)


def test_tensors_that_do_not_fit_are_refused(made, tmp_path):
    target, _, heads = made
    copy = shutil.copytree(heads["one"], tmp_path / "heads")
    path = copy / "medusa_lm_head.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"1.1.weight": torch.zeros(7, 64)}, path)
    with pytest.raises(ValueError, match=r"1\.1\.weight has the shape \[7, 64\]"):
        cpu_engine(target, f"medusa:{copy}", 3)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged"):
        cpu_engine(target, f"medusa:{copy}", 3)
    path.rename(copy / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="pickled"):
        cpu_engine(target, f"medusa:{copy}", 3)
    (copy / "medusa_lm_head.pt").unlink()
    with pytest.raises(FileNotFoundError, match="medusa_lm_head"):
        cpu_engine(target, f"medusa:{copy}", 3)
    with pytest.raises(ValueError, match="names no heads"):
        cpu_engine(target, "medusa:", 3)
    with pytest.raises(FileNotFoundError, match=r"draft 'medusa:\./nowhere'"):
        cpu_engine(target, "medusa:./nowhere", 3)
