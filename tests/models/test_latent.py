"""Latent attention and DeepSeek's experts: configurations, the cache, saving, adapters, pieces."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import merged, write_adapter
from oracle import Oracle
from paged import load, logits_of, relative_error
from tiny import make_tiny, read_json, read_tensors, write_checkpoint

from specdec.verifier.loading import read_config, save_model
from specdec.verifier.lora import LoraSlots
from specdec.verifier.models.config import UnsupportedModelError
from specdec.verifier.peft_format import AdapterError, read_adapter
from specdec.verifier.split import PieceCall, split, trace_model

IDS = [5, 17, 99, 3, 3, 42, 127, 0, 64, 11, 8, 90, 33]
FAMILIES = ("deepseek_v2", "deepseek_v3")
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}


def check(folder: Path) -> None:
    expected = Oracle(folder).logits(IDS)
    assert relative_error(logits_of(load(folder), IDS, chunks=[7, 1, 5]), expected) < 1e-4


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("deepseek_v2", {"q_lora_rank": None}),
        ("deepseek_v2", {"topk_method": "greedy", "n_group": None, "topk_group": None}),
        ("deepseek_v2", {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
        ("deepseek_v2", {"mlp_bias": False, "first_k_dense_replace": 0, "n_shared_experts": 1}),
        ("deepseek_v3", {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
        ("deepseek_v3", {"rope_scaling": YARN}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"attention_bias": True}),
        ("deepseek_v3", {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
        ("deepseek_v3", {"first_k_dense_replace": 3}),
    ],
    ids=str,
)
def test_fields_that_change_the_model(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    folder = make_tiny(tmp_path / "model", family=family, layers=3, **fields)
    check(folder)
    # And what is written of it reads the same, in transformers too.
    saved = save_model(load(folder), tmp_path / "saved")
    assert read_config(saved).latent == read_config(folder).latent
    check(saved)


def test_the_cache_holds_latents_alone(tmp_path: Path) -> None:
    model = load(make_tiny(tmp_path, family="deepseek_v2"))
    cache = model.make_kv_cache(3, 4)
    assert cache.data.shape == (1, 2, 4, 4, 1, 24 + 8)
    assert model.kv_bytes_per_block(4) == 2 * 4 * (24 + 8) * 4
    assert cache.num_bytes == 4 * model.kv_bytes_per_block(4)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, family="deepseek_v3")
    expected = logits_of(load(folder), IDS)
    config, tensors = read_json(folder / "config.json"), read_tensors(folder)
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(64, 128)
    write_checkpoint(folder, config | {"num_nextn_predict_layers": 1}, tensors)
    assert torch.equal(logits_of(load(folder), IDS), expected)


def test_the_code_that_files_name_is_not_needed(tmp_path: Path) -> None:
    """DeepSeek's published configurations have an auto_map."""
    folder = make_tiny(
        tmp_path, family="deepseek_v3", auto_map={"AutoConfig": "configuration_deepseek.Config"}
    )
    assert read_config(folder).num_layers == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stack_of_sparse_layers_has_three_pieces(tmp_path: Path, family: str) -> None:
    model = load(make_tiny(tmp_path, layers=4, family=family, first_k_dense_replace=0))
    chain = split(trace_model(model), model, {"specdec::attention"})
    pieces = [call.piece for call in chain.calls if isinstance(call, PieceCall)]
    assert pieces == [0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True}, "q_lora_rank null"),
        ("deepseek_v3", {"sliding_window": 16}, "sliding_window=16"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
    ],
    ids=str,
)
def test_unsupported(tmp_path: Path, family: str, fields: dict[str, Any], named: str) -> None:
    folder = make_tiny(tmp_path, family=family)
    config = read_json(folder / "config.json") | fields
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=named):
        read_config(folder)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n_group": 5}, "n_group=5"),
        ({"topk_group": 5}, "topk_group=5"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7"),
        ({"n_group": 12, "topk_group": 4}, "n_group=12"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
    ],
    ids=str,
)
def test_bad_fields(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    folder = make_tiny(tmp_path, family="deepseek_v3")
    config = read_json(folder / "config.json") | fields
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"config\.json.*{named}"):
        read_config(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rank", [40, None], ids=["bottleneck", "direct"])
def test_adapters(tmp_path: Path, rank: int | None) -> None:
    folder = make_tiny(tmp_path / "m", family="deepseek_v2", q_lora_rank=rank, std=0.15)
    queries = ["q_proj"] if rank is None else ["q_a_proj", "q_b_proj"]
    adapter = write_adapter(
        tmp_path / "a", folder, target_modules=[*queries, "kv_a_proj_with_mqa", "o_proj"]
    )
    model = load(folder)
    slots = LoraSlots(model, max_loras=2, max_rank=8)
    slots.attach()
    slots.load(1, slots.pack(read_adapter(adapter, model.config)))
    on_slot = torch.full((len(IDS),), 1)
    expected = merged(folder, adapter).logits(IDS)
    assert relative_error(logits_of(model, IDS, adapter_slots=on_slot), expected) < 1e-4
    slots.warm_up()


def test_what_is_absorbed_cannot_be_adapted(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", family="deepseek_v3")
    adapter = write_adapter(tmp_path / "a", folder, target_modules=["o_proj", "kv_b_proj"])
    with pytest.raises(AdapterError, match="'kv_b_proj'"):
        read_adapter(adapter, read_config(folder))
