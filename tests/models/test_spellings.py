"""What files of a family may say in more than one way, or leave out, means what transformers reads.

The reference reads the same folder.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle
from paged import load, logits_of, relative_error
from tiny import make_tiny, read_json

from specdec.verifier.loading import read_config
from specdec.verifier.models.config import config_from_json, config_to_json

DROPPED = object()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
PLAIN = {"rope_type": "default", "rope_theta": 777.0}
LINEAR = {"rope_type": "linear", "factor": 3.0}
TWO_KINDS = ["sliding_attention", "full_attention"]


def rewrite(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    config = read_json(path) | fields
    kept = {name: value for name, value in config.items() if value is not DROPPED}
    path.write_text(json.dumps(kept))
    return folder


def check(folder: Path) -> None:
    ids = torch.randint(128, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = Oracle(folder).logits(ids)
    assert relative_error(logits_of(load(folder), ids), expected) < 1e-4
    chunks = [39, 1, 5, 15]
    assert relative_error(logits_of(load(folder), ids, chunks=chunks), expected) < 1e-4
    # What is written back reads the same.
    config = read_config(folder)
    assert config_from_json(config_to_json(config), source="") == config


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_number_of_experts(tmp_path: Path, family: str, name: str) -> None:
    """transformers 5 writes num_local_experts for Qwen3-MoE, whose files say num_experts."""
    folder = make_tiny(tmp_path, family=family)
    config = read_json(folder / "config.json")
    count = config.get("num_experts") or config["num_local_experts"]
    rewrite(folder, **{"num_experts": DROPPED, "num_local_experts": DROPPED} | {name: count})
    check(folder)


def test_two_numbers_of_experts(tmp_path: Path) -> None:
    folder = rewrite(make_tiny(tmp_path, family="qwen3_moe"), num_local_experts=5)
    with pytest.raises(ValueError, match="num_experts=6 and num_local_experts=5 differ"):
        read_config(folder)


def test_a_folder_that_transformers_wrote(tmp_path: Path) -> None:
    """The round trip through ``save_pretrained`` of the version at hand."""
    folder = make_tiny(tmp_path / "ours", family="qwen3_moe")
    Oracle(folder).model.save_pretrained(tmp_path / "theirs")
    check(tmp_path / "theirs")


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": DROPPED, "rms_norm_eps": DROPPED},
        {"rope_theta": DROPPED, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": DROPPED, "rope_scaling": LINEAR},
    ],
    ids=["dropped", "v5", "v4"],
)
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "gemma2", "bamba"])
def test_defaults_are_the_familys(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    check(rewrite(make_tiny(tmp_path, family=family), **fields))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "bamba"])
def test_two_rope_objects(tmp_path: Path, family: str) -> None:
    folder = make_tiny(tmp_path, family=family)
    check(rewrite(folder, rope_theta=50.0, rope_parameters=PLAIN, rope_scaling=LINEAR))


def test_two_rope_objects_of_two_kinds_of_layers(tmp_path: Path) -> None:
    ropes = {kind: PLAIN | {"rope_theta": 10.0 + len(kind)} for kind in TWO_KINDS}
    folder = make_tiny(tmp_path, family="gemma3_text", layers=4)
    check(rewrite(folder, rope_theta=DROPPED, rope_parameters=ropes, rope_scaling=LINEAR))


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_two_original_contexts(tmp_path: Path, name: str) -> None:
    folder = make_tiny(tmp_path, head_dim=32)
    check(rewrite(folder, original_max_position_embeddings=64, **{name: YARN}))


@pytest.mark.parametrize("window", [512, 4096, DROPPED], ids=["context", "longer", "default"])
def test_a_window_that_hides_nothing_leaves_gemma3_its_two_ropes(
    tmp_path: Path, window: Any
) -> None:
    folder = make_tiny(tmp_path, family="gemma3_text", layers=4)
    check(rewrite(folder, sliding_window=window))


@pytest.mark.parametrize(
    "kinds",
    [TWO_KINDS, TWO_KINDS[::-1], TWO_KINDS[:1] * 2, TWO_KINDS[1:] * 2],
    ids=["first", "second", "both", "none"],
)
def test_mistral_with_a_list_of_kinds(tmp_path: Path, kinds: list[str]) -> None:
    """As Ministral's files have it."""
    check(rewrite(make_tiny(tmp_path, family="mistral"), sliding_window=5, layer_types=kinds))


def test_mixtral_makes_nothing_of_a_list_of_kinds(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, family="mixtral")
    check(rewrite(folder, sliding_window=None, layer_types=["full_attention"] * 2))


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window must be an integer of at least 1"),
        ("mixtral", {"sliding_window": 0}, "sliding_window must be an integer of at least 1"),
        ("gemma2", {"sliding_window": None}, "no sliding_window"),
        ("gemma3_text", {"sliding_window": None}, "no sliding_window"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping must be positive"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping must be positive"),
        ("gemma3_text", {"rope_scaling": [1]}, "rope_scaling must be an object"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 1}}, "rope_parameters.full_att"),
        ("deepseek_v2", {"n_group": DROPPED}, "n_group is missing"),
        ("deepseek_v2", {"topk_group": DROPPED}, "topk_group is missing"),
        ("llama", {"rope_scaling": "yarn"}, "rope_scaling must be an object"),
    ],
)
def test_what_transformers_cannot_run_either_is_refused(
    tmp_path: Path, family: str, fields: dict[str, Any], named: str
) -> None:
    folder = rewrite(make_tiny(tmp_path, family=family), **fields)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"config\.json.*{named}"):
        read_config(folder)
