"""Formats of EAGLE-3 heads, and what does not fit the target: refused by name before it loads."""

import json

import pytest
import torch
from eagle_heads import LAYER, make_head
from harness import PROMPTS, cpu_engine, greedy
from safetensors.torch import load_file, save_file
from tiny import make_tiny

from specdec.drafters.eagle_checkpoint import open_eagle
from specdec.drafters.eagle_config import default_feature_layers
from specdec.drafters.shipped import TARGET, auto_draft, describe_target
from specdec.verifier.loading import read_config

SIZE, VOCAB = 64, 128
EVEN = list(range(0, VOCAB, 2))
QKV = LAYER + "self_attn.q_proj.weight"


def refused(monkeypatch, target, head, *words):
    """The engine says why, with these words in it, and loads no weights of the target."""
    from specdec import build

    monkeypatch.setattr(build, "load_source", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError, match="(?s)" + ".*".join(words)):
        cpu_engine(target, f"eagle:{head}")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("architectures", ["LlamaForCausalLM"], ["architectures"]),
        ("model_type", "qwen3", ["model_type"]),
        ("hidden_size", 32, ["hidden_size is 32", "64"]),
        ("target_hidden_size", 96, ["target_hidden_size is 96", "64"]),
        ("vocab_size", 100, ["vocab_size is 100", "128"]),
        ("draft_vocab_size", 200, ["draft_vocab_size", "200"]),
        ("draft_vocab_size", 64, ["lacks the tensor d2t"]),
        ("draft_vocab_size", "many", ["draft_vocab_size"]),
        ("num_hidden_layers", 2, ["num_hidden_layers must be 1"]),
        ("eagle_aux_hidden_state_layer_ids", [0, 1], ["eagle_aux_hidden_state_layer_ids"]),
        ("eagle_aux_hidden_state_layer_ids", [0, 1, 3], ["eagle_aux_hidden_state_layer_ids", "2"]),
        ("eagle_aux_hidden_state_layer_ids", [0, -1, 1], ["eagle_aux_hidden_state_layer_ids"]),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1]}, ["eagle_config"]),
        ("norm_before_residual", 1, ["norm_before_residual"]),
        ("norm_before_fc", True, ["norm_before_fc"]),
        ("specdec_parallel_drafting", True, ["mask_embedding"]),
        ("quantization_config", {"quant_method": "awq"}, ["quantization_config"]),
        ("rope_scaling", {"rope_type": "longrope"}, ["longrope"]),
        ("hidden_act", "gelu", ["hidden_act"]),
        ("head_dim", 8, ["_proj", "has the shape"]),
        ("attention_bias", False, ["no use for", "bias"]),
    ],
    ids=str,
)
def test_a_bad_field_is_named(tmp_path, models, monkeypatch, field, value, words):
    head = make_head(models["target"], tmp_path, config_overrides={field: value})
    refused(monkeypatch, models["target"], head, *words)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"fc.weight": None}, ["lacks the tensor fc.weight"]),
        ({QKV: None, "norm.weight": None}, ["lacks", "q_proj.weight", "norm.weight"]),
        ({"fc.weight": torch.zeros(SIZE, 2 * SIZE)}, ["fc.weight has the shape", "64, 192"]),
        ({QKV: torch.zeros(SIZE, SIZE)}, ["q_proj.weight has the shape"]),
        ({"input_norm.weight": torch.ones(3 * SIZE)}, ["no use for", "input_norm.weight"]),
        ({"lm_head.weight": torch.zeros(5, SIZE)}, ["lm_head.weight has the shape"]),
        ({"d2t": torch.zeros(len(EVEN), dtype=torch.int64)}, ["d2t and|t2d and"]),
        ({"d2t": torch.full((len(EVEN),), 90)}, ["d2t", "outside"]),
        ({"d2t": -torch.arange(len(EVEN))}, ["d2t maps two"]),
        ({"d2t": torch.zeros(3, dtype=torch.int64)}, ["d2t has the shape"]),
        ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, ["t2d and d2t"]),
        ({"d2t": torch.zeros(len(EVEN))}, ["d2t is stored as F32"]),
        ({"fc.weight": torch.zeros(SIZE, 3 * SIZE, dtype=torch.int8)}, ["fc.weight", "I8"]),
        ({"layers.0.hidden_norm.weight": torch.ones(SIZE)}, ["two tensors for", "hidden_norm"]),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_tensor_is_named(tmp_path, models, monkeypatch, tensors, words):
    head = make_head(models["target"], tmp_path, draft_ids=EVEN, tensor_overrides=tensors)
    refused(monkeypatch, models["target"], head, *words)


def test_files_that_are_missing_pickled_or_damaged(tmp_path, models, monkeypatch):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        cpu_engine(models["target"], f"eagle:{tmp_path / 'nowhere'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        cpu_engine(models["target"], f"eagle:{tmp_path / 'empty'}")
    head = make_head(models["target"], tmp_path / "head")
    weights = head / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refused(monkeypatch, models["target"], head, "damaged")
    weights.unlink()
    torch.save({}, head / "pytorch_model.bin")
    refused(monkeypatch, models["target"], head, "pickled")
    (head / "config.json").write_text("[1]")
    refused(monkeypatch, models["target"], head, "config.json", "JSON object")
    with pytest.raises(ValueError, match="eagle:PATH"):
        cpu_engine(models["target"], "eagle:")


def test_speculators_layout(tmp_path, models, monkeypatch):
    """The layer's config may leave out what is LlamaConfig's default; the norm's place may not."""
    options = {"layout": "speculators", "draft_ids": EVEN}
    head = make_head(models["target"], tmp_path / "head", **options)
    opened = open_eagle(head, read_config(models["target"]))
    assert opened.config.draft_vocab_size == len(EVEN)
    assert opened.target_ids.tolist() == EVEN
    assert opened.config.norm_before_residual
    for field, value, words in (
        ("speculators_model_type", "eagle", ["speculators_model_type", "eagle3"]),
        ("norm_before_residual", None, ["norm_before_residual is missing"]),
        ("transformer_layer_config", {}, ["num_hidden_layers must be 1, got 32"]),
        ("transformer_layer_config", {"num_hidden_layers": 1}, ["vocab_size is 32000"]),
    ):
        other = make_head(
            models["target"], tmp_path / "other", config_overrides={field: value}, **options
        )
        refused(monkeypatch, models["target"], other, *words)


def test_a_head_of_another_width_brings_its_embedding_and_head(tmp_path, monkeypatch):
    """target_hidden_size: the features are as wide as the target, the layer is not."""
    narrow = make_tiny(tmp_path / "narrow", hidden=64)
    wide = make_tiny(tmp_path / "wide", hidden=96)
    fields = {"target_hidden_size": 96}
    tensors = {"fc.weight": torch.randn(64, 3 * 96)}
    head = make_head(
        narrow,
        tmp_path / "head",
        own_embedding=True,
        config_overrides=fields,
        tensor_overrides=tensors,
    )
    with (
        cpu_engine(str(wide), f"eagle:{head}", 2, uniform_request_counts=[5]) as engine,
        cpu_engine(str(wide), None, uniform_request_counts=[5]) as plain,
    ):
        mine, theirs = (each.generate(PROMPTS, greedy(8)) for each in (engine, plain))
        assert [out.token_ids for out in mine] == [out.token_ids for out in theirs]
        assert mine[0].stats.drafted > 0
    for missing in ("embed_tokens.weight", "lm_head.weight"):
        poor = make_head(
            narrow,
            tmp_path / "poor",
            own_embedding=True,
            config_overrides=fields,
            tensor_overrides=tensors | {missing: None},
        )
        refused(monkeypatch, str(wide), poor, f"lacks the tensor {missing}")


def test_the_order_of_the_map_does_not_matter(tmp_path, models):
    """A map in another order, with the rows of the head in that order, drafts the same tokens."""
    target = models["target"]
    head = make_head(target, tmp_path / "head", draft_ids=EVEN)
    turned = make_head(target, tmp_path / "turned", draft_ids=EVEN[::-1])
    texts = []
    for path in (head, turned):
        with cpu_engine(target, f"eagle:{path}", 3, uniform_request_counts=[5]) as engine:
            drafter = engine.drafter
            assert drafter.target_ids.tolist() == EVEN
            texts.append(drafter.head.lm_head.clone())
    assert torch.equal(*texts)


def test_ids_past_the_tokenizer_are_never_drafted(tmp_path):
    """C19: the head knows padding rows of the vocabulary; they are masked in the draft too."""
    target = make_tiny(tmp_path / "target", tokenizer="words", tokenizer_vocab=100)
    head = make_head(target, tmp_path / "head", draft_ids=EVEN)
    with cpu_engine(str(target), f"eagle:{head}", 4, uniform_request_counts=[5]) as engine:
        assert engine.drafter.num_ids == 50
        assert int(engine.drafter.target_ids.max()) < 100
        for fields in ({}, {"temperature": 1.0, "seed": 3}):
            outs = engine.generate([[1, 2, 3]] * 3, greedy(20, **fields))
            assert all(token < 100 for out in outs for token in out.token_ids)
    padding = make_head(target, tmp_path / "padding", draft_ids=list(range(100, 128)))
    with pytest.raises(ValueError, match="drafts none of the 100 ids"):
        cpu_engine(str(target), f"eagle:{padding}")


def test_a_value_that_the_target_s_dtype_does_not_hold_is_refused(tmp_path, models):
    """C21: cast to half precision a weight would be infinite, and every draft wrong in silence."""
    head = make_head(models["target"], tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    tensors["fc.weight"][0, 0] = 1e6
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc\.weight .*float16"):
        cpu_engine(models["target"], f"eagle:{head}", dtype="float16")


def test_default_feature_layers_are_those_of_public_heads():
    assert default_feature_layers(32) == (2, 16, 29)
    assert default_feature_layers(30) == (2, 15, 27)
    assert default_feature_layers(2) == (2, 1, 0)
    assert default_feature_layers(1) == (1, 0, 0)


def test_adapters_of_a_draft_model_are_not_a_head_s(tmp_path, models):
    head = make_head(models["target"], tmp_path / "head")
    with pytest.raises(ValueError, match="draft_lora"):
        cpu_engine(models["target"], f"eagle:{head}", draft_lora={"a": str(tmp_path)}, lora={})


class Words:
    def __init__(self, *strings):
        self.strings = strings


def test_auto_picks_the_head_shipped_for_the_model(tmp_path, models):
    """The weights' shapes and the tokenizer's content must both be those of the trained target."""
    config = read_config(models["target"])
    other = read_config(str(make_tiny(tmp_path / "other", layers=1)))
    head = make_head(models["target"], tmp_path / "heads" / "tiny")
    words = Words("a", None, "b")
    (head / TARGET).write_text(json.dumps(describe_target(config, words)))
    (tmp_path / "heads" / "unfinished").mkdir()
    heads = tmp_path / "heads"
    assert auto_draft(config, words, heads) == f"eagle:{head}"
    assert auto_draft(config, Words("a", None, "c"), heads) == "ngram"
    assert auto_draft(other, words, heads) == "ngram"
    assert auto_draft(config, None, heads) == "ngram"
    assert auto_draft(config, words, tmp_path / "none") == "ngram"


def test_auto_runs_the_shipped_head(tmp_path, monkeypatch):
    from specdec.drafters import shipped
    from specdec.tokenizer import load_tokenizer

    target = make_tiny(tmp_path / "target", tokenizer="words")
    head = make_head(target, tmp_path / "heads" / "tiny")
    described = describe_target(read_config(target), load_tokenizer(target))
    (head / TARGET).write_text(json.dumps(described))
    monkeypatch.setattr(shipped, "HEADS", tmp_path / "heads")
    with cpu_engine(str(target), "auto", 2, uniform_request_counts=[5]) as engine:
        assert engine.drafter.name == "eagle"
        assert engine.generate([1, 2, 3], greedy(8)).stats.drafted > 0
