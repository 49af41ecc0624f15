"""What the tiny models of other families have beside Llama's parts."""

from collections.abc import Iterator
from typing import Any

ARCHITECTURES = {
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "bamba": "BambaForCausalLM",
}
QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text")
# Norms multiply by one plus their weight, and stand behind attention and MLP too.
GEMMA = ("gemma2", "gemma3_text")
QKV_BIAS = ("qwen2", "qwen2_moe")
# Of a layer's MLP, the norm before it, and the model's last norm.
LLAMA_NAMES = ("mlp", "post_attention_layernorm", "norm")
NAMES = {"bamba": ("feed_forward", "pre_ff_layernorm", "final_layernorm")}

LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 48,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}

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
    "deepseek_v2": LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "deepseek_v3": LATENT | {"n_group": 4, "topk_group": 2, "norm_topk_prob": True},
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
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 24,
        "mamba_n_groups": 2,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        # How the reference cuts a text; it changes nothing but its time.
        "mamba_chunk_size": 16,
    },
}

# A weight's name in its layer, and its rows and columns.
Weight = tuple[str, int, int]


def sparse_mlp(config: dict[str, Any], layer: int) -> Iterator[Weight] | None:
    """The matrices of a layer's experts, or None where the layer has a plain MLP."""
    if config["model_type"] == "mixtral":
        names = ("block_sparse_moe", "w1", "w3", "w2")
        return _experts(config, *names, config["num_local_experts"], config["intermediate_size"])
    if "n_routed_experts" in config:
        if layer < config["first_k_dense_replace"]:
            return None
        names = ("mlp", "gate_proj", "up_proj", "down_proj")
        return _experts(config, *names, config["n_routed_experts"], config["moe_intermediate_size"])
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
    shared = config.get("n_shared_experts", 0) * width
    if shared:
        for name in (gate, up):
            yield f"{block}.shared_experts.{name}", shared, hidden
        yield f"{block}.shared_experts.{down}", hidden, shared
    shared = config.get("shared_expert_intermediate_size")
    if shared:
        for name in (gate, up):
            yield f"{block}.shared_expert.{name}", shared, hidden
        yield f"{block}.shared_expert.{down}", hidden, shared
        yield f"{block}.shared_expert_gate", 1, hidden


def latent_attention(config: dict[str, Any]) -> Iterator[Weight]:
    """The matrices of a layer's latent attention."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    rank, latent = config["q_lora_rank"], config["kv_lora_rank"]
    if rank is None:
        yield "q_proj", width, hidden
    else:
        yield "q_a_proj", rank, hidden
        yield "q_b_proj", width, rank
    yield "kv_a_proj_with_mqa", latent + config["qk_rope_head_dim"], hidden
    yield "kv_b_proj", heads * (config["qk_nope_head_dim"] + config["v_head_dim"]), latent
    yield "o_proj", hidden, heads * config["v_head_dim"]


def is_recurrent(config: dict[str, Any], layer: int) -> bool:
    return "mamba_expand" in config and layer not in (config["attn_layer_indices"] or ())


def mamba(config: dict[str, Any]) -> Iterator[tuple[str, float, float, tuple[int, ...]]]:
    """Tensors of a Mamba-2 layer: name, mean, deviation (0: that of a matrix) and shape.

    Decays of a third of a token's and less, so that a text's beginning still counts at its end.
    """
    hidden, heads = config["hidden_size"], config["mamba_n_heads"]
    inner = config["mamba_expand"] * hidden
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    yield "in_proj.weight", 0.0, 0.0, (inner + channels + heads, hidden)
    yield "conv1d.weight", 0.0, 0.5, (channels, 1, config["mamba_d_conv"])
    if config.get("mamba_conv_bias", True):
        yield "conv1d.bias", 0.0, 0.1, (channels,)
    yield "A_log", -2.0, 0.5, (heads,)
    yield "D", 1.0, 0.1, (heads,)
    yield "dt_bias", -1.0, 0.5, (heads,)
    yield "norm.weight", 1.0, 0.1, (inner,)
    yield "out_proj.weight", 0.0, 0.0, (hidden, inner)
    if config.get("mamba_proj_bias", False):
        yield "in_proj.bias", 0.0, 0.1, (inner + channels + heads,)
        yield "out_proj.bias", 0.0, 0.1, (hidden,)
