"""Sliding windows and Gemma's own parts: what configurations say, and the logits that follow."""

import json
from pathlib import Path
from typing import Any

import pytest
from oracle import Oracle
from paged import load, logits_of, relative_error
from tiny import make_tiny, read_json

from specdec.verifier.loading import read_config, save_model
from specdec.verifier.models.config import ModelConfig, UnsupportedModelError

IDS = [5, 17, 99, 3, 3, 42, 127, 0, 64, 11, 8, 90, 33, 71, 25, 16]
ALTERNATING = ["sliding_attention", "full_attention"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def edited(folder: Path, *, drop: str = "", **fields: Any) -> ModelConfig:
    config = read_json(folder / "config.json") | fields
    config.pop(drop, None)
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)


def check(folder: Path) -> None:
    """The whole text at once, and in chunks whose windows reach back into earlier ones."""
    expected = Oracle(folder).logits(IDS)
    model = load(folder)
    for chunks in (None, [3, 1, 5, 7]):
        assert relative_error(logits_of(model, IDS, chunks=chunks), expected) < 1e-4


@pytest.mark.parametrize(
    ("family", "fields", "layers"),
    [
        ("mistral", {"sliding_window": 5}, (0, 1, 2)),
        ("mixtral", {"sliding_window": 5}, (0, 1, 2)),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True}, ()),
        (
            "qwen2",
            {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
            (1, 2),
        ),
        (
            "qwen3",
            {
                "sliding_window": 5,
                "use_sliding_window": True,
                "layer_types": [*ALTERNATING, "sliding_attention"],
            },
            (0, 2),
        ),
        (
            "qwen2_moe",
            {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 2},
            (0,),
        ),
        ("qwen3_moe", {"sliding_window": 5, "use_sliding_window": True}, (0, 1, 2)),
        ("gemma2", {"sliding_window": 5}, (0, 2)),
        ("gemma2", {"layer_types": [*ALTERNATING, "full_attention"]}, (0,)),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, (0, 2)),
        ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 7, "attention_bias": True}, (0, 2)),
        ("gemma3_text", {"sliding_window_pattern": 3}, (0, 1)),
        ("gemma3_text", {"final_logit_softcapping": 5.0, "tie": True}, (0, 2)),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, (0, 2)),
        (
            "gemma3_text",
            {
                "rope_theta": None,
                "rope_local_base_freq": None,
                "rope_parameters": {
                    "full_attention": LLAMA3 | {"rope_theta": 3e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                },
            },
            (0, 2),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_logits(
    tmp_path: Path, family: str, fields: dict[str, Any], layers: tuple[int, ...]
) -> None:
    folder = make_tiny(tmp_path / "model", family=family, layers=3, **fields)
    assert read_config(folder).sliding_layers == layers
    check(folder)
    # And what is written of it reads the same, in transformers too.
    saved = save_model(load(folder), tmp_path / "saved")
    assert read_config(saved) == read_config(folder)
    check(saved)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral", {"sliding_window": 512}),
        ("mistral", {"sliding_window": None, "max_position_embeddings": 8192}),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}),
        ("qwen3", {"sliding_window": None, "use_sliding_window": True}),
        ("gemma2", {"sliding_window": 512}),
    ],
)
def test_windows_that_hide_nothing(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    config = edited(make_tiny(tmp_path, family=family), **fields)
    assert (config.sliding_window, config.sliding_layers) == (None, ())


def test_window_that_a_mistral_config_leaves_out(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, family="mistral", max_position_embeddings=8192)
    config = edited(folder, drop="sliding_window")
    assert (config.sliding_window, config.sliding_layers) == (4096, (0, 1))


def test_what_a_gemma_config_may_leave_out(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, family="gemma2")
    names = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
    for name in (*names, "hidden_activation", "tie_word_embeddings"):
        config = edited(folder, drop=name)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert config.attention_scale == 1 / 16
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0"),
        (
            "gemma3_text",
            {"rope_parameters": {"chunked_attention": {}}},
            "rope_parameters: chunked_attention",
        ),
        (
            "gemma3_text",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic'",
        ),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("gemma2", {"architectures": ["Gemma3ForConditionalGeneration"]}, "ConditionalGeneration"),
    ],
    ids=str,
)
def test_unsupported(tmp_path: Path, family: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        edited(make_tiny(tmp_path, family=family), **fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sliding_window": -1}, "sliding_window"),
        ({"sliding_window": None, "layer_types": ALTERNATING}, "no sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types must name 2 layers"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"attn_logit_softcapping": "5"}, "attn_logit_softcapping"),
    ],
    ids=str,
)
def test_bad_fields(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.json.*{named}"):
        edited(make_tiny(tmp_path, family="gemma2"), **fields)
