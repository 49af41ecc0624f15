"""Logits of every family equal transformers' to 1e-4 relative in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle
from paged import load, logits_of, relative_error
from tiny import (
    ARCHITECTURES,
    EMBEDDING,
    HEAD,
    make_tiny,
    read_json,
    read_tensors,
    write_checkpoint,
)

from specdec.verifier.models.rope import RopeConfig, cos_sin_table

TOLERANCE = 1e-4
IDS = [5, 17, 99, 3, 3, 42, 127, 0, 64, 11, 8, 90, 33]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def check(folder: Path, ids: list[int] = IDS) -> None:
    expected = Oracle(folder).logits(ids)
    model = load(folder)
    whole = logits_of(model, ids)
    assert relative_error(whole, expected) < TOLERANCE
    chunks = [len(ids) - 6, 1, 5]
    assert relative_error(logits_of(model, ids, chunks=chunks), expected) < TOLERANCE


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_families(tmp_path: Path, family: str, tie: bool) -> None:
    check(make_tiny(tmp_path, family=family, tie=tie))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_biases_that_the_config_asks_for(tmp_path: Path, family: str) -> None:
    extra = {"mlp_bias": True} if family == "llama" else {}
    check(make_tiny(tmp_path, family=family, attention_bias=True, **extra))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_head_sizes(tmp_path: Path, head_dim: int) -> None:
    check(make_tiny(tmp_path, head_dim=head_dim, std=0.15))


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(3, 3), (6, 2), (9, 3), (7, 1), (28, 4), (24, 1)], ids=str
)
def test_groups(tmp_path: Path, heads: int, kv_heads: int) -> None:
    """C50 on the model: no query head reads a neighbour's keys."""
    check(make_tiny(tmp_path, heads=heads, kv_heads=kv_heads, hidden=8 * heads))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": YARN},
        {"rope_scaling": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.2}},
        {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
        {"rope_scaling": YARN | {"truncate": False}},
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
        {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        {"rope_theta": None, "rope_parameters": YARN | {"rope_theta": 1e6}},
    ],
    ids=[
        "linear",
        "llama3",
        "yarn",
        "yarn-factors",
        "yarn-mscale",
        "yarn-untruncated",
        "theta",
        "v5-default",
        "v5-llama3",
        "v5-yarn",
    ],
)
def test_rope(tmp_path: Path, rope: dict[str, Any]) -> None:
    """Long enough that every frequency turns."""
    folder = make_tiny(tmp_path, head_dim=32, **rope)
    ids = torch.randint(128, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    check(folder, ids)


@pytest.mark.parametrize("spelling", ["torch_dtype", "dtype"])
def test_bfloat16_files_load_as_float32(tmp_path: Path, spelling: str) -> None:
    folder = make_tiny(tmp_path, dtype=torch.bfloat16)
    config = read_json(folder / "config.json")
    config[spelling] = config.pop("torch_dtype")
    write_checkpoint(folder, config, read_tensors(folder))
    model = load(folder, dtype=None)
    assert model.dtype == model.config.dtype == torch.bfloat16
    check(folder)


def test_shards(tmp_path: Path) -> None:
    one, many = make_tiny(tmp_path / "one"), make_tiny(tmp_path / "many", shards=3)
    assert not (many / "model.safetensors").exists()
    check(many)
    assert torch.equal(logits_of(load(many), IDS), logits_of(load(one), IDS))


def test_redundant_equal_head(tmp_path: Path) -> None:
    """C24 (b): a tied checkpoint that also stores its head."""
    folder = make_tiny(tmp_path, tie=True)
    tensors = read_tensors(folder)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    write_checkpoint(folder, read_json(folder / "config.json"), tensors)
    model = load(folder)
    assert model.lm_head is model.embed_tokens
    check(folder)


def test_tied_by_name_but_not_by_value(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    config = read_json(folder / "config.json") | {"tie_word_embeddings": True}
    write_checkpoint(folder, config, read_tensors(folder))
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        model = load(folder)
    expected = Oracle(folder).logits(IDS)
    assert relative_error(logits_of(model, IDS), expected) < TOLERANCE


def test_fewer_layers_is_the_shorter_model(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, layers=4)
    expected = Oracle(folder, num_layers=2).logits(IDS)
    assert relative_error(logits_of(load(folder), IDS, num_layers=2), expected) < TOLERANCE


def test_a_rotation_of_part_of_a_head(tmp_path: Path) -> None:
    """As GGUF files may have it; zeroed frequencies of a full rotation are the same."""
    model = load(make_tiny(tmp_path, head_dim=16))
    model.cos_sin = cos_sin_table(RopeConfig(rotary_dim=8), 512, "cpu")
    full = load(make_tiny(tmp_path / "full", head_dim=16))
    # Rotating features (0..3, 8..11) of a head by the same angles, and the others by none.
    table = torch.zeros(512, 16)
    table[:, :8] = 1
    part = cos_sin_table(RopeConfig(rotary_dim=8), 512, "cpu")
    table[:, :4], table[:, 8:12] = part[:, :4], part[:, 4:]
    full.cos_sin = table
    order = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    for layer in full.layers:
        rows = layer.attention.qkv_proj.weight[: 6 * 16].view(6, 16, -1)
        rows.copy_(rows[:, order].clone())
    assert relative_error(logits_of(model, IDS), logits_of(full, IDS)) < 1e-5


def test_greedy_tokens_are_the_argmax(tmp_path: Path) -> None:
    model = load(make_tiny(tmp_path))
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    logits = model.compute_logits(hidden)
    assert torch.equal(model.greedy_tokens(hidden)[0], logits.argmax(-1))
    assert torch.equal(model.greedy_tokens(hidden, 30)[0], logits[:, :30].argmax(-1))
