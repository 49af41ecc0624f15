"""LoRA adapters for tests: written by PEFT or by hand, and their merged models as oracles."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from oracle import Oracle
from safetensors.torch import load_file, save_file
from tiny import read_tensors

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SETTINGS = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": list(ALL),
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "init_lora_weights": True,
    "inference_mode": True,
}


def write_adapter(
    folder: str | Path, model: str | Path, *, seed: int = 0, std: float = 0.1, **settings: Any
) -> str:
    """A random adapter of ``model`` (a folder). ``settings`` go into adapter_config.json."""
    settings = SETTINGS | settings
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in read_tensors(model).items():
        site = name.removesuffix(".weight")
        if weight.dim() != 2 or site.rpartition(".")[2] not in settings["target_modules"]:
            continue
        rank = settings["r"]
        for pattern, special in settings["rank_pattern"].items():
            if re.match(rf"(.*\.)?({pattern})$", site):
                rank = special
        key = f"base_model.model.{site}.lora_"
        a = torch.randn(rank, weight.shape[1], generator=generator)
        b = torch.randn(weight.shape[0], rank, generator=generator)
        if site == "model.embed_tokens":
            a, b = (
                torch.randn(rank, weight.shape[0], generator=generator),
                torch.randn(weight.shape[1], rank, generator=generator),
            )
            key += "embedding_"
        ends = ("A", "B") if "embedding" in key else ("A.weight", "B.weight")
        for end, tensor in zip(ends, (a, b), strict=True):
            tensors[key + end] = std * tensor
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def changed(folder: str | Path, out: str | Path, **settings: Any) -> Path:
    """A copy of an adapter with other settings and the same weights."""
    folder, out = Path(folder), Path(out)
    out.mkdir(parents=True)
    own = json.loads((folder / "adapter_config.json").read_text()) | settings
    (out / "adapter_config.json").write_text(json.dumps(own))
    weights = (folder / "adapter_model.safetensors").read_bytes()
    (out / "adapter_model.safetensors").write_bytes(weights)
    return out


def adapter_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "adapter_model.safetensors")


def merged(model: str | Path, adapter: str | Path, *, num_layers: int | None = None) -> Oracle:
    """The model with an adapter merged into its weights by PEFT."""
    from peft import PeftModel

    oracle = Oracle(model)
    peft = PeftModel.from_pretrained(oracle.model, adapter)
    oracle.model = peft.merge_and_unload().eval()
    if num_layers is not None:
        oracle.model.model.layers = oracle.model.model.layers[:num_layers]
    return oracle


def trained_by_peft(folder: str | Path, model: str | Path, seed: int = 0, **config: Any) -> str:
    """An adapter that PEFT itself has made and saved, with random weights in place of training."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config))
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    peft.save_pretrained(str(folder))
    return str(folder)
