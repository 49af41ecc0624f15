"""A target's own module for multi-token prediction: texts, counts, layouts, refusals."""

import pytest
import torch
from eagle_heads import whispering
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, cpu_engine, greedy
from mtp_modules import LAYOUTS, MtpOracle, add_module, speculate
from oracle import Oracle, expect
from tiny import read_json, read_tensors, write_checkpoint

from specdec.verifier.models.mtp_names import mtp_tensors

ONE_RUNG = {"uniform_request_counts": [5]}
# MiMo's layers are Qwen2's; the others are tried with Llama's and with Qwen3's norms.
FAMILY = {"mimo": "qwen2", "qwen": "qwen3", "deepseek": "llama"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Of each layout a target with a module, and the oracles of both."""
    root = tmp_path_factory.mktemp("mtp")
    found = {}
    for layout in LAYOUTS:
        plain = whispering(root / f"{layout}-plain", family=FAMILY[layout], loud=0.006, habit=0.0)
        folder = add_module(plain, root / layout, layout)
        found[layout] = str(folder), MtpOracle(Oracle(plain), folder, layout)
    return found


@pytest.fixture(params=["graphs", "eager"])
def mode(request):
    return ONE_RUNG if request.param == "graphs" else {"cudagraph_mode": "NONE"}


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_and_counts_are_the_oracle_s(engines, made, layout, k, mode):
    """P1; a lost hidden state or a stale key of the module's changes the counts."""
    folder, module = made[layout]
    engine = engines(folder, "mtp", k, **mode)
    for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(32)), strict=True):
        expect(out, speculate(module, prompt, k=k, max_new_tokens=32))
    stats = engine.stats()
    assert 0.1 < stats.accepted / stats.drafted < 0.95
    assert set(stats.by_source) == {"mtp"}
    if mode is ONE_RUNG:
        assert_decodes_replayed(engine)
    assert_no_leak(engine)


def test_chunks_cache_preemption_and_own_k(made):
    folder, module = made["mimo"]
    with cpu_engine(
        folder, "mtp", 4, max_num_seqs=3, num_kv_blocks=20, max_num_batched_tokens=20
    ) as engine:
        own_k = [4, 0, 4, 2, 4]
        for _ in range(2):
            outs = engine.generate(PROMPTS, [greedy(32, k=k) for k in own_k])
            for prompt, k, out in zip(PROMPTS, own_k, outs, strict=True):
                expect(out, speculate(module, prompt, k=k, max_new_tokens=32))
        assert engine.stats().preemptions > 0
        assert_no_leak(engine)


def test_without_asking_for_it_the_module_is_left_alone(made):
    folder, module = made["deepseek"]
    with cpu_engine(folder, "ngram", 2, cudagraph_mode="NONE") as engine:
        out = engine.generate(PROMPTS[0], greedy(12))
    assert out.token_ids == module.target.greedy(PROMPTS[0], 12)[0]


def test_only_modules_are_left_out():
    """Layers past the last that are no module are a mistake, and stay in sight."""
    names = ["model.layers.2.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"]
    assert mtp_tensors(names, 3) == set()
    assert mtp_tensors([*names, "model.layers.3.eh_proj.weight"], 3) == {
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.3.eh_proj.weight",
    }


def test_further_modules_are_not_read(made, tmp_path):
    folder, module = made["mimo"]
    tensors = read_tensors(folder)
    second = {n.replace("mtp_layers.0", "mtp_layers.1"): t + 9 for n, t in tensors.items()}
    copy = write_checkpoint(tmp_path / "two", read_json(f"{folder}/config.json"), second | tensors)
    with cpu_engine(str(copy), "mtp", 3, cudagraph_mode="NONE") as engine:
        out = engine.generate(PROMPTS[3], greedy(20))
    expect(out, speculate(module, PROMPTS[3], k=3, max_new_tokens=20))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.mtp_layers.0.self_attn.kv_a_proj.weight": torch.zeros(2, 2)}, "kv_a_proj"),
        ({"model.mtp_layers.0.hidden_layernorm.weight": None}, "lacks the tensor .*hidden_layern"),
        ({"model.mtp_layers.0.input_proj.weight": torch.zeros(64, 64)}, r"shape \[64, 64\]"),
        ({"model.mtp_layers.0.": None}, "holds no module"),
    ],
    ids=["another kind of layer", "missing", "misshapen", "none"],
)
def test_a_module_that_cannot_be_read_is_refused(made, tmp_path, change, message):
    folder, _ = made["mimo"]
    tensors = read_tensors(folder)
    for name, tensor in change.items():
        tensors = {n: t for n, t in tensors.items() if not n.startswith(name)}
        if tensor is not None:
            tensors[name] = tensor
    write_checkpoint(tmp_path, read_json(f"{folder}/config.json"), tensors)
    with pytest.raises(ValueError, match=message):
        cpu_engine(str(tmp_path), "mtp", 3)
