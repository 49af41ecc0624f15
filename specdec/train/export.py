"""A trained head as a folder in the layout of the public EAGLE-3 checkpoints, and back."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.train.head import DraftHead, HeadConfig
from specdec.train.vocab import DraftVocab
from specdec.verifier.models.rope import rope_json

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
SCALE = "feature_scale"


def head_config_json(config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a head. Raises ValueError for a rotary embedding it cannot spell."""
    rope = rope_json(config.rope)
    if config.rope.rotary_dim != config.head_size:
        rope["partial_rotary_factor"] = config.rope.rotary_dim / config.head_size
    content: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": rope,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": list(config.layers),
    }
    if config.parallel:
        content["specdec_parallel_drafting"] = True
    return content


def head_tensors(head: DraftHead, vocab: DraftVocab, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of the file. No embedding, and no head where the target's is used."""
    tensors = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    scale = tensors.pop(SCALE)
    tensors["fc.weight"] = tensors["fc.weight"] / scale
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    return tensors | {"d2t": vocab.offsets, "t2d": vocab.known}


def save_head(
    head: DraftHead, vocab: DraftVocab, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config.json and model.safetensors; a file is replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f"{WEIGHTS}.tmp"
    save_file(head_tensors(head, vocab, dtype), scratch, metadata={"format": "pt"})
    os.replace(scratch, folder / WEIGHTS)
    content = json.dumps(head_config_json(head.config, dtype), indent=2)
    (folder / CONFIG).write_text(content + "\n", encoding="utf-8")


def reload_head(head: DraftHead, folder: Path) -> None:
    """Give ``head`` the weights that ``save_head`` wrote, rounded as they are in the file."""
    tensors = load_file(folder / WEIGHTS)
    state = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    head.load_state_dict(state | {SCALE: torch.ones_like(head.feature_scale)})
