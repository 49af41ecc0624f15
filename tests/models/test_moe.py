"""Mixture-of-experts models: configurations, saving, shortening, adapters, pieces."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import merged, write_adapter
from oracle import Oracle
from paged import load, logits_of, relative_error
from tiny import make_tiny

from specdec.kernels.moe import apply_experts, route_experts
from specdec.verifier.loading import (
    read_config,
    save_first_layers,
    save_model,
    silence_layers,
    truncate_layers,
)
from specdec.verifier.lora import LoraSlots
from specdec.verifier.peft_format import AdapterError, read_adapter
from specdec.verifier.split import PieceCall, split, trace_model

IDS = [5, 17, 99, 3, 3, 42, 127, 0, 64, 11, 8, 90, 33]
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")


def check(folder: Path) -> None:
    expected = Oracle(folder).logits(IDS)
    assert relative_error(logits_of(load(folder), IDS, chunks=[7, 1, 5]), expected) < 1e-4


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mixtral", {"num_experts_per_tok": 1}),
        ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("qwen2_moe", {"layers": 3, "decoder_sparse_step": 2}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
        ("qwen3_moe", {"attention_bias": True}),
    ],
    ids=str,
)
def test_fields_that_change_the_model(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    folder = make_tiny(tmp_path / "model", family=family, **fields)
    check(folder)
    # And what is written of it reads the same, in transformers too.
    check(save_model(load(folder), tmp_path / "saved"))


def test_qwen2_moe_without_biases(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, family="qwen2_moe", qkv_bias=False)
    with pytest.raises(ValueError, match=r"no use for: .*k_proj\.bias"):
        load(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stack_of_sparse_layers_has_three_pieces(tmp_path: Path, family: str) -> None:
    model = load(make_tiny(tmp_path, layers=4, family=family))
    chain = split(trace_model(model), model, {"specdec::attention"})
    pieces = [call.piece for call in chain.calls if isinstance(call, PieceCall)]
    assert pieces == [0, 1, 1, 1, 2]


def test_first_layers_keep_their_kinds(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", family="qwen3_moe", layers=4, mlp_only_layers=[0, 2])
    model, expected = load(folder), Oracle(folder, num_layers=2).logits(IDS)
    assert relative_error(logits_of(truncate_layers(model, 2), IDS), expected) < 1e-4
    check(save_first_layers(folder, tmp_path / "short", 2))
    silence_layers(model, 2)
    assert relative_error(logits_of(model, IDS), expected) < 1e-4


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ("qwen3_moe", {"num_experts": None}, "num_experts is missing"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ("qwen2_moe", {"mlp_only_layers": "0"}, "mlp_only_layers"),
    ],
    ids=str,
)
def test_refused(tmp_path: Path, family: str, fields: dict[str, Any], named: str) -> None:
    folder = make_tiny(tmp_path, family=family)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(json.loads(text) | fields))
    with pytest.raises(ValueError, match=rf"config\.json.*{named}"):
        read_config(folder)


def test_missing_expert(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, family="mixtral", num_local_experts=3)
    config = json.loads((folder / "config.json").read_text()) | {"num_local_experts": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"lacks the tensor .*experts\.3\.w1\.weight"):
        load(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_can_be_adapted(tmp_path: Path, family: str) -> None:
    folder = make_tiny(tmp_path / "m", family=family)
    targets = ["q_proj", "v_proj", "o_proj"]
    adapter = write_adapter(tmp_path / "a", folder, target_modules=targets)
    model = load(folder)
    slots = LoraSlots(model, max_loras=2, max_rank=8)
    slots.attach()
    slots.load(1, slots.pack(read_adapter(adapter, model.config)))
    on_slot = torch.full((len(IDS),), 1)
    expected = merged(folder, adapter).logits(IDS)
    assert relative_error(logits_of(model, IDS, adapter_slots=on_slot), expected) < 1e-4
    slots.warm_up()


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_cannot_be_adapted(tmp_path: Path, family: str) -> None:
    folder = make_tiny(tmp_path / "m", family=family, layers=3)
    target = "w2" if family == "mixtral" else "down_proj"
    adapter = write_adapter(tmp_path / "a", folder, target_modules=["q_proj", target])
    with pytest.raises(AdapterError, match=rf"{target}"):
        read_adapter(adapter, read_config(folder))


def test_rows_do_not_depend_on_each_other() -> None:
    """P3 of the parts: a row with NaN, and other experts beside it, change nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 32, generator=generator)
    gate_up = torch.randn(6, 40, 32, generator=generator) / 6
    down = torch.randn(6, 32, 20, generator=generator) / 5
    logits = torch.randn(9, 6, generator=generator)
    logits[4], x[4] = torch.nan, torch.nan
    experts, weights = route_experts(logits, None, 2, False, True, 1.0, 1, 1)
    out = apply_experts(x, gate_up, down, experts, weights)
    assert experts[4].tolist() == [0, 1]
    assert out[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    alone = apply_experts(x[others], gate_up, down, experts[others], weights[others])
    torch.testing.assert_close(out[others], alone, rtol=1e-5, atol=1e-5)
