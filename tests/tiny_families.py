"""What the tiny models of other families have beside Llama's parts."""

from collections.abc import Iterator
from typing import Any

ARCHITECTURES = {
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text")
# Norms multiply by one plus their weight, and stand behind attention and MLP too.
GEMMA = ("gemma2", "gemma3_text")
QKV_BIAS = ("qwen2", "qwen2_moe")

FIELDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gemma2": {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 9.0,
    },
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 100.0,
    },
}

# A weight's name in its layer, and its rows and columns.
Weight = tuple[str, int, int]


def sparse_mlp(config: dict[str, Any], layer: int) -> Iterator[Weight] | None:
    """The matrices of a layer's experts, or None where the layer has a plain MLP."""
    if config["model_type"] == "mixtral":
        names = ("block_sparse_moe", "w1", "w3", "w2")
        return _experts(config, *names, config["num_local_experts"], config["intermediate_size"])
    is_dense = layer in config.get("mlp_only_layers", [])
    is_dense |= (layer + 1) % config.get("decoder_sparse_step", 1) > 0
    if "num_experts" in config and not is_dense:
        names = ("mlp", "gate_proj", "up_proj", "down_proj")
        return _experts(config, *names, config["num_experts"], config["moe_intermediate_size"])
    return None


def _experts(
    config: dict[str, Any], block: str, gate: str, up: str, down: str, num_experts: int, width: int
) -> Iterator[Weight]:
    hidden = config["hidden_size"]
    yield f"{block}.gate", num_experts, hidden
    for i in range(num_experts):
        for name in (gate, up):
            yield f"{block}.experts.{i}.{name}", width, hidden
        yield f"{block}.experts.{i}.{down}", hidden, width
    shared = config.get("shared_expert_intermediate_size")
    if shared:
        for name in (gate, up):
            yield f"{block}.shared_expert.{name}", shared, hidden
        yield f"{block}.shared_expert.{down}", hidden, shared
        yield f"{block}.shared_expert_gate", 1, hidden
