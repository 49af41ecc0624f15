"""Mamba-2 hybrids: configurations, states beside the cache, saving, adapters, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import merged, write_adapter
from oracle import Oracle
from paged import load, logits_of, relative_error
from tiny import make_tiny, read_json

from specdec.verifier.attention.sdpa import SdpaBackend
from specdec.verifier.compile import CompilationConfig
from specdec.verifier.loading import (
    random_weights,
    read_config,
    save_first_layers,
    save_model,
    silence_layers,
    truncate_layers,
)
from specdec.verifier.lora import LoraSlots
from specdec.verifier.models.config import UnsupportedModelError
from specdec.verifier.models.support import graph_support, model_state_bytes
from specdec.verifier.modes import AttentionCGSupport
from specdec.verifier.peft_format import AdapterError, read_adapter
from specdec.verifier.split import PieceCall, split, trace_model

IDS = [5, 17, 99, 3, 3, 42, 127, 0, 64, 11, 8, 90, 33]


def check(folder: Path, num_layers: int | None = None) -> None:
    expected = Oracle(folder, num_layers=num_layers).logits(IDS)
    own = logits_of(load(folder), IDS, chunks=[7, 1, 5], num_layers=num_layers)
    assert relative_error(own, expected) < 1e-4


@pytest.mark.parametrize(
    "fields",
    [
        {"mamba_n_groups": 1, "mamba_conv_bias": False},
        {"mamba_n_groups": 8, "mamba_proj_bias": True, "mlp_bias": True, "attention_bias": True},
        {"mamba_d_conv": 2, "mamba_d_state": 5},
        {"mamba_d_head": "auto", "mamba_n_heads": 2},
        {"time_step_limit": [0.05, 0.4]},
        {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
        {"attn_layer_indices": [0, 2]},
        {"attn_layer_indices": None},
        {"attn_layer_indices": [0, 1, 2, 9]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": None},
    ],
    ids=str,
)
def test_fields_that_change_the_model(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = make_tiny(tmp_path / "model", family="bamba", layers=3, **fields)
    check(folder)
    # And what is written of it reads the same, in transformers too.
    saved = save_model(load(folder), tmp_path / "saved")
    assert read_config(saved) == read_config(folder)
    check(saved)


def test_the_decays_are_slow_enough_to_matter(tmp_path: Path) -> None:
    """The tests' models remember: another first token changes the last logits by much."""
    model = load(make_tiny(tmp_path, family="bamba", attn_layer_indices=[]))
    one, other = (logits_of(model, [first, *IDS[1:]])[-1:] for first in (5, 90))
    assert relative_error(one, other) > 0.05


def test_a_state_per_request_and_keys_of_attention_alone(tmp_path: Path) -> None:
    model = load(make_tiny(tmp_path, family="bamba", layers=4, attn_layer_indices=[1, 3]))
    cache = model.make_kv_cache(3, 4, max_num_seqs=5, run_length=6)
    assert cache.data.shape == (2, 2, 4, 4, 2, 16)
    assert model.kv_bytes_per_block(4) == 2 * 2 * 4 * 2 * 16 * 4
    states = cache.recurrent
    assert states is not None
    # Two layers, five requests and the padding's row; the kept tokens do not grow the states.
    assert states.ssm.shape == (2, 6, 8, 16, 24)
    assert states.inputs.shape[:3] == (2, 6, 6 + 3)
    assert states.num_bytes == model_state_bytes(model, 5, 6)


def test_support_is_the_least_of_the_layers(tmp_path: Path) -> None:
    config = read_config(make_tiny(tmp_path, family="bamba", layers=3))
    backend = SdpaBackend("cpu")
    assert backend.cg_support is AttentionCGSupport.ALWAYS
    assert graph_support(config, backend) is AttentionCGSupport.UNIFORM_BATCH
    backend.cg_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert graph_support(config, backend) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert config.mamba is not None
    mamba = replace(config.mamba, attention_layers=())
    pure = replace(config, mamba=mamba)
    assert graph_support(pure, backend) is AttentionCGSupport.UNIFORM_BATCH
    mamba = replace(config.mamba, attention_layers=(0, 1, 2))
    whole = replace(config, mamba=mamba)
    assert graph_support(whole, SdpaBackend("cpu")) is AttentionCGSupport.ALWAYS


@pytest.mark.parametrize("num_layers", [1, 2])
def test_fewer_layers_are_the_shorter_model(tmp_path: Path, num_layers: int) -> None:
    folder = make_tiny(tmp_path / "model", family="bamba", layers=3)
    check(folder, num_layers)
    expected = Oracle(folder, num_layers=num_layers).logits(IDS)
    short = truncate_layers(load(folder), num_layers)
    assert relative_error(logits_of(short, IDS), expected) < 1e-4
    saved = save_first_layers(folder, tmp_path / "short", num_layers)
    assert relative_error(logits_of(load(saved), IDS), expected) < 1e-4


def test_silenced_layers_add_nothing(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, family="bamba", layers=3)
    model = load(folder)
    silence_layers(model, 1)
    expected = Oracle(folder, num_layers=1).logits(IDS)
    assert relative_error(logits_of(model, IDS), expected) < 1e-4


def test_random_weights_are_sound(tmp_path: Path) -> None:
    config = read_config(make_tiny(tmp_path, family="bamba", layers=3))
    model = random_weights(config, std=0.1, attention_backend=SdpaBackend("cpu"))
    logits = logits_of(model, IDS)
    assert logits.isfinite().all() and logits.std() > 0.01


def test_a_stack_of_recurrent_layers_has_three_pieces(tmp_path: Path) -> None:
    model = load(make_tiny(tmp_path, family="bamba", layers=4, attn_layer_indices=[]))
    chain = split(trace_model(model), model, CompilationConfig().split_at)
    pieces = [call.piece for call in chain.calls if isinstance(call, PieceCall)]
    assert pieces == [0, 1, 1, 1, 2]


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_attention_and_mlp(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", family="bamba", layers=3, std=0.15)
    adapter = write_adapter(tmp_path / "a", folder)
    model = load(folder)
    slots = LoraSlots(model, max_loras=2, max_rank=8)
    slots.attach()
    slots.load(1, slots.pack(read_adapter(adapter, model.config)))
    on_slot = torch.full((len(IDS),), 1)
    expected = merged(folder, adapter).logits(IDS)
    assert relative_error(logits_of(model, IDS, adapter_slots=on_slot), expected) < 1e-4


@pytest.mark.parametrize("name", ["in_proj", "out_proj"])
def test_projections_of_mamba_cannot_be_adapted(tmp_path: Path, name: str) -> None:
    folder = make_tiny(tmp_path / "m", family="bamba")
    adapter = write_adapter(tmp_path / "a", folder, target_modules=["o_proj", name])
    with pytest.raises(AdapterError, match=f"'{name}'"):
        read_adapter(adapter, read_config(folder))


@pytest.mark.parametrize(
    ("fields", "kind", "named"),
    [
        ({"mamba_n_groups": 3}, UnsupportedModelError, "mamba_n_groups=3"),
        ({"mamba_d_head": 12}, ValueError, "mamba_n_heads=8 of 12"),
        ({"mamba_n_heads": 7, "mamba_d_head": "auto"}, ValueError, "mamba_n_heads=7"),
        ({"mamba_d_state": 0}, ValueError, "mamba_d_state"),
        ({"mamba_d_conv": 1}, ValueError, "mamba_d_conv"),
        ({"mamba_conv_bias": "yes"}, ValueError, "mamba_conv_bias"),
        ({"attn_layer_indices": 1}, ValueError, "attn_layer_indices"),
        ({"attn_layer_indices": [True]}, ValueError, "attn_layer_indices"),
        ({"time_step_limit": [1.0]}, ValueError, "time_step_limit"),
        ({"time_step_limit": [2.0, 1.0]}, ValueError, "time_step_limit"),
        ({"time_step_limit": ["a", "b"]}, ValueError, "time_step_limit"),
        ({"partial_rotary_factor": 1.0}, UnsupportedModelError, "partial_rotary_factor=1.0"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act 'gelu'"),
        ({"sliding_window": 16}, UnsupportedModelError, "sliding_window=16"),
        ({"architectures": ["FalconH1ForCausalLM"]}, UnsupportedModelError, "FalconH1ForCausalLM"),
    ],
    ids=str,
)
def test_bad_and_unsupported_fields(
    tmp_path: Path, fields: dict[str, Any], kind: type[ValueError], named: str
) -> None:
    folder = make_tiny(tmp_path, family="bamba")
    config = read_json(folder / "config.json") | fields
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(kind, match=rf"config\.json.*{named}"):
        read_config(folder)
