"""What a model of latent attention is: the fields of a DeepSeek's config.json, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec.verifier.models.fields import UnsupportedModelError, boolean, integer, number
from specdec.verifier.models.moe_config import MoeConfig
from specdec.verifier.models.rope import RopeConfig, rope_fields, yarn_mscale

if TYPE_CHECKING:
    from specdec.verifier.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig:
    """Sizes of multi-head latent attention, in features."""

    latent_size: int  # what a token leaves in the cache, beside its rotated part
    query_rank: int | None  # of the queries' own bottleneck; None where they have none
    plain_size: int  # part of a query's head that is not rotated
    rotated_size: int
    value_size: int  # of a head
    interleaved: bool  # rotated pairs lie side by side
    mscale_all_dim: float = 0.0  # YaRN's, by which the scores grow


def parse_latent(config: Mapping[str, Any], model_type: str) -> LatentConfig:
    """Raises ValueError naming a bad field, UnsupportedModelError what is not supported."""
    rank = config.get("q_lora_rank")
    if rank is None and config.get("attention_bias"):
        raise UnsupportedModelError("attention_bias with q_lora_rank null is not supported")
    return LatentConfig(
        latent_size=integer(config, "kv_lora_rank"),
        query_rank=None if rank is None else integer(config, "q_lora_rank"),
        plain_size=integer(config, "qk_nope_head_dim"),
        rotated_size=integer(config, "qk_rope_head_dim"),
        value_size=integer(config, "v_head_dim"),
        interleaved=model_type == "deepseek_v2" or boolean(config, "rope_interleave", True),
        mscale_all_dim=number(rope_fields(config), "mscale_all_dim", 0.0),
    )


def latent_scale(latent: LatentConfig, rope: RopeConfig) -> float:
    """What the scores are multiplied by."""
    scale = (latent.plain_size + latent.rotated_size) ** -0.5
    if rope.rope_type == "default" or not latent.mscale_all_dim:
        return scale
    return scale * yarn_mscale(rope.factor, latent.mscale_all_dim) ** 2


def parse_deepseek_moe(config: Mapping[str, Any], model_type: str) -> MoeConfig:
    """Raises ValueError naming a bad field, UnsupportedModelError what is not supported."""
    is_v2 = model_type == "deepseek_v2"
    method = config.get("topk_method") or ("greedy" if is_v2 else "noaux_tc")
    known = ("greedy", "group_limited_greedy") if is_v2 else ("noaux_tc",)
    if method not in known:
        raise UnsupportedModelError(
            f"topk_method {method!r} is not supported; supported: {', '.join(known)}"
        )
    scoring = "softmax" if is_v2 else "sigmoid"
    if config.get("scoring_func", scoring) != scoring:
        raise UnsupportedModelError(
            f"scoring_func {config['scoring_func']!r} is not supported; supported: {scoring}"
        )
    if config.get("moe_layer_freq", 1) != 1:
        raise UnsupportedModelError(f"moe_layer_freq={config['moe_layer_freq']} is not supported")
    normalize = boolean(config, "norm_topk_prob", not is_v2)
    if is_v2 and normalize:
        raise UnsupportedModelError("norm_topk_prob=true is not supported for DeepSeek-V2")
    groups = top_groups = 1
    if method != "greedy":
        # DeepSeek-V2's have no defaults.
        own = ((), ()) if is_v2 else ((8,), (4,))
        groups = integer(config, "n_group", *own[0])
        top_groups = integer(config, "topk_group", *own[1])
    dense = range(integer(config, "first_k_dense_replace", 0 if is_v2 else 3, minimum=0))
    width = integer(config, "moe_intermediate_size")
    return MoeConfig(
        num_experts=integer(config, "n_routed_experts"),
        experts_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=width,
        normalize=normalize,
        float32_weights=True,
        dense_layers=tuple(dense),
        shared_intermediate_size=width * integer(config, "n_shared_experts"),
        float32_router=True,
        sigmoid=not is_v2,
        scale=number(config, "routed_scaling_factor", 1.0 if is_v2 else 2.5),
        num_groups=groups,
        top_groups=top_groups,
    )


def deepseek_json(config: "ModelConfig") -> dict[str, Any]:
    """The fields of a config.json that the functions above read back."""
    latent, moe = config.latent, config.moe
    assert latent is not None and moe is not None
    is_v2 = config.family.model_type == "deepseek_v2"
    method = "noaux_tc"
    if is_v2:
        method = "greedy" if moe.num_groups == moe.top_groups else "group_limited_greedy"
    return {
        "num_key_value_heads": config.num_heads,
        "head_dim": latent.rotated_size,
        "kv_lora_rank": latent.latent_size,
        "q_lora_rank": latent.query_rank,
        "qk_nope_head_dim": latent.plain_size,
        "qk_rope_head_dim": latent.rotated_size,
        "v_head_dim": latent.value_size,
        "rope_interleave": latent.interleaved,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "n_shared_experts": moe.shared_intermediate_size // moe.intermediate_size,
        "first_k_dense_replace": len(moe.dense_layers),
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scale,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "topk_method": method,
        "scoring_func": "sigmoid" if moe.sigmoid else "softmax",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    }
