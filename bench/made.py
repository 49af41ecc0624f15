"""Models of random weights in the shapes that the benchmarks share."""

from typing import Any

import torch

from specdec.verifier.attention.select import select_backend
from specdec.verifier.loading import random_weights, silence_layers, truncate_layers
from specdec.verifier.models.config import ModelConfig, config_from_json
from specdec.verifier.models.llama import CausalLM

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}


def _shape(
    layers: int,
    hidden: int,
    heads: tuple[int, int],
    ffn: int,
    vocab: int,
    *,
    tied: bool = False,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """``heads``: of queries, and of keys and values."""
    return _LLAMA | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
    }


SHAPES = {
    "135M": _shape(30, 576, (9, 3), 1536, 49_152, tied=True),
    "1B": _shape(16, 2048, (32, 8), 8192, 128_256, tied=True),
    "8B": _shape(32, 4096, (32, 8), 14_336, 128_256),
    "70B": _shape(80, 8192, (64, 8), 28_672, 128_256),
    "tiny": _shape(4, 64, (4, 2), 128, 512, dtype="float32"),
    "tiny draft": _shape(1, 32, (2, 1), 64, 512, dtype="float32"),
}


def made_config(shape: str) -> ModelConfig:
    return config_from_json(SHAPES[shape], source=f"the {shape} shape")


def made_model(shape: str, device: str | torch.device, *, std: float = 0.02) -> CausalLM:
    """Random weights of this shape, made on the device."""
    config = made_config(shape)
    backend = select_backend(
        "auto", head_size=config.head_size, dtype=config.dtype, block_size=16, device=device
    )
    return random_weights(config, std=std, device=device, attention_backend=backend)


def made_pair(shape: str, device: str | torch.device) -> tuple[CausalLM, CausalLM]:
    """A target whose layers from the third on cost their time and add nothing, and its first two.

    The second agrees with the first everywhere: a draft at full cost and perfect acceptance.
    """
    target = made_model(shape, device, std=0.25 if torch.device(device).type == "cpu" else 0.02)
    silence_layers(target, 2)
    return target, truncate_layers(target, 2)
