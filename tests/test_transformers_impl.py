"""model_impl="transformers": any causal LM on our attention and graphs, or a refusal by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, cpu_engine, greedy
from oracle import Oracle, expect, speculate
from paged import logits_of, relative_error
from tiny import blended, make_tiny, read_tensors, write_checkpoint

from specdec.verifier.attention.sdpa import SdpaBackend
from specdec.verifier.loading import load_any_model, read_config
from specdec.verifier.models.fields import UnsupportedModelError
from specdec.verifier.models.transformers_probe import LayerCall, _windows, _without_memory

HF = {"model_impl": "transformers"}
ONE_RUNG = {"uniform_request_counts": [5]}
IDS = [5, 17, 99, 3, 3, 42, 127, 0, 64, 11, 8, 90, 33]

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GRANITE = {
    "logits_scaling": 3.0,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.1,
}
# Families that we have no implementation of.
FOREIGN = {
    "gpt2": {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "granite": GRANITE,
    "olmo2": {},
    "phi3": {},
    "starcoder2": {"sliding_window": 6},
    "cohere": {"logit_scale": 0.3},
    "gpt_neox": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "exaone4": {"sliding_window": 6, "head_dim": 16},
    # Its window stands in its masks alone.
    "phimoe": {"sliding_window": 6, "num_local_experts": 4},
}


def made(folder, model_type: str, **fields) -> str:
    """A random model of transformers' own, saved by it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SMALL | fields)))
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
    model.save_pretrained(folder)
    return str(folder)


def load(folder):
    config = read_config(folder, implementation="transformers")
    backend = SdpaBackend("cpu")
    return load_any_model(
        folder, config, dtype=torch.float32, device="cpu", attention_backend=backend
    )


@pytest.mark.parametrize("model_type", FOREIGN)
def test_logits_of_foreign_families(tmp_path, model_type):
    folder = made(tmp_path, model_type, **FOREIGN[model_type])
    expected = Oracle(folder).logits(IDS)
    assert relative_error(logits_of(load(folder), IDS, chunks=[7, 1, 5]), expected) < 1e-4


@pytest.mark.parametrize("draft", ["own", "ngram", "layer_skip:1", None])
@pytest.mark.parametrize("model_type", ["granite", "olmoe", "starcoder2"])
def test_text_and_counts_of_foreign_families(tmp_path, model_type, draft):
    folder = made(tmp_path / "target", model_type, **FOREIGN[model_type])
    k, proposer, oracle = 3, None, Oracle(folder)
    name = draft
    if draft == "own":
        name = made(tmp_path / "draft", "olmo2", num_hidden_layers=1)
        proposer = Oracle(name)
    elif draft == "layer_skip:1":
        proposer = Oracle(folder, num_layers=1)
    with cpu_engine(folder, name, k, **HF, **ONE_RUNG) as engine:
        outs = engine.generate(PROMPTS, greedy(16))
        assert_decodes_replayed(engine)
        assert_no_leak(engine)
    for prompt, out in zip(PROMPTS, outs, strict=True):
        expected = speculate(oracle, proposer, prompt, k=k, max_new_tokens=16)
        expect(out, expected, counts=draft != "ngram")


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 6}),
        ("qwen3", {}),
        ("mixtral", {}),
        ("qwen2_moe", {}),
        # Its layers keep their window from their attention.
        ("qwen2_moe", {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 2}),
        ("gemma2", {}),
        ("gemma3_text", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tokens_equal_ours(tmp_path, family, fields):
    """The families that we have, on either implementation, with the same draft."""
    target = str(make_tiny(tmp_path / "target", family=family, seed=5, **fields))
    draft = str(blended(target, tmp_path / "draft", 0.1))
    results = []
    for options in ({}, HF):
        with cpu_engine(target, draft, 4, **ONE_RUNG, **options) as engine:
            outs = engine.generate(PROMPTS, greedy(20))
            results.append([(out.token_ids, out.stats.accepted_per_step) for out in outs])
    assert results[0] == results[1]


def test_prompts_in_chunks_and_sampled_rows(tmp_path):
    target = str(make_tiny(tmp_path / "target", seed=5))
    options = {"max_num_batched_tokens": 10, "max_num_seqs": 2}
    params = [greedy(12), greedy(12, temperature=0.8, seed=3), greedy(12, logprobs=2)] * 2
    texts = []
    for own in ({}, HF):
        with cpu_engine(target, "ngram", 4, **options, **own) as engine:
            outs = engine.generate([*PROMPTS, PROMPTS[0]], params)
            texts.append([out.token_ids for out in outs])
    assert texts[0] == texts[1]


def test_piecewise_graphs_are_not_promised(tmp_path, caplog):
    target = str(make_tiny(tmp_path / "target"))
    with cpu_engine(target, None, 0, cudagraph_mode="PIECEWISE", **HF) as engine:
        engine.generate(PROMPTS[0], greedy(4))
        assert engine.stats().steps_by_mode["PIECEWISE"] == 0
    assert "PIECEWISE" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("mamba2", {"num_heads": 4, "head_dim": 32, "state_size": 16}, "recurrent state"),
        ("bloom", {"n_head": 4, "n_layer": 2}, "bypasses the attention interface"),
        ("stablelm", {}, "bypasses the attention interface"),
        ("falcon", {}, "bypasses the attention interface"),
        (
            "gpt_oss",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
            "GptOssAttention gives its attention s_aux",
        ),
        ("llama4_text", {"head_dim": 16}, "chunked_attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_that_bypass_the_interface(tmp_path, model_type, fields, named):
    """Before their weights are looked at: there are none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **(SMALL | fields))
    with torch.device("meta"):
        name = type(AutoModelForCausalLM.from_config(config)).__name__
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: .*{named}"):
        cpu_engine(str(tmp_path), **HF)


def test_a_window_that_the_mask_denies(tmp_path):
    """transformers would show the layer all keys, its own kernels only the last ones."""
    hf = _without_memory(make_tiny(tmp_path, family="mistral", sliding_window=6))
    call = LayerCall(num_heads=4, num_kv_heads=2, head_size=16, sliding_window=9, soft_cap=None)
    named = "layer 1 of MistralForCausalLM .*sliding_window=6, and asks .*sliding_window=9"
    with pytest.raises(UnsupportedModelError, match=named):
        _windows(hf, {0: replace(call, sliding_window=6), 1: call})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "no_such_type"}, "transformers does not know it"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"auto_map": {"AutoModelForCausalLM": "m.Model"}}, "trust_remote_code"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "'dynamic'",
        ),
    ],
    ids=str,
)
def test_configs_that_are_refused(tmp_path, fields, named):
    folder = make_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=named):
        cpu_engine(str(folder), **HF)


def test_a_latent_model_is_refused(tmp_path):
    folder = make_tiny(tmp_path, family="deepseek_v2")
    with pytest.raises(UnsupportedModelError, match="keys and values of different sizes"):
        read_config(folder, implementation="transformers")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_loras": 2}, "adapters"),
        ({"compilation_config": {"mode": 3}}, "compilation"),
        ({"exact": True}, "exact=True"),
        ({"model_impl": "vllm"}, "model_impl must be one of specdec, transformers"),
    ],
    ids=str,
)
def test_fields_that_do_not_go_with_it(models, options, named):
    with pytest.raises(ValueError, match=named):
        cpu_engine(models["target"], **(HF | options))


def test_an_adapter_is_refused_later_too(models, tmp_path):
    from adapters import write_adapter

    adapter = write_adapter(tmp_path / "adapter", models["target"])
    with (
        cpu_engine(models["target"], **HF) as engine,
        pytest.raises(ValueError, match="model_impl='transformers' has no adapters"),
    ):
        engine.add_lora("one", adapter)


def test_weights_that_do_not_fit(tmp_path):
    """transformers would draw what is missing at random, and say so in a warning."""
    folder = make_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    tensors = read_tensors(folder)
    missing = tensors.pop("model.layers.1.mlp.up_proj.weight")
    write_checkpoint(folder, config, tensors)
    with pytest.raises(ValueError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj"):
        cpu_engine(str(folder), **HF)
    tensors |= {"model.layers.1.mlp.up_proj.weight": missing, "model.extra.weight": missing.clone()}
    write_checkpoint(folder, config, tensors)
    with pytest.raises(ValueError, match=r"unexpected keys: model\.extra"):
        cpu_engine(str(folder), **HF)
    (Path(folder) / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises((ValueError, OSError), match=r"(?i)safetensors|pickle"):
        cpu_engine(str(folder), **HF)


def test_a_gguf_file_is_refused(tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(UnsupportedModelError, match="reads no GGUF file"):
        read_config(file, implementation="transformers")


def test_heads_need_hidden_states_that_it_does_not_give(models, tmp_path):
    from eagle_heads import make_head

    head = make_head(models["target"], tmp_path / "head")
    with pytest.raises(ValueError, match="model_impl='transformers' does not give"):
        cpu_engine(models["target"], f"eagle:{head}", 2, **HF)
