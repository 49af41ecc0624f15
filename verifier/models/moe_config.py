"""What a mixture-of-experts model is: the fields of a config.json about its experts, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.verifier.models.fields import boolean, integer


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """The experts of a model's sparse layers and how a token's are chosen."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    normalize: bool  # the chosen experts' weights are made to add up to one
    float32_weights: bool  # else they are rounded to the model's dtype
    dense_layers: tuple[int, ...] = ()  # layers with a plain MLP instead
    shared_intermediate_size: int = 0  # of the expert that every token takes; 0 for none
    shared_gate: bool = False  # whether a token weighs it
    float32_router: bool = False
    sigmoid: bool = False  # scores by sigmoid, a learnt bias added for the choice; else softmax
    scale: float = 1.0  # of the weights
    num_groups: int = 1  # of neighbouring experts
    top_groups: int = 1  # groups that a token's experts may come from

    def __post_init__(self) -> None:
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise ValueError(
                f"n_group={self.num_groups} and topk_group={self.top_groups} do not divide "
                f"{self.num_experts} experts"
            )
        if self.experts_per_token > self.num_experts // self.num_groups * self.top_groups:
            raise ValueError(
                f"num_experts_per_tok={self.experts_per_token} is more than the experts that a "
                f"token may choose from: {self.num_experts}, in the best {self.top_groups} of "
                f"{self.num_groups} groups"
            )
        if self.sigmoid and self.num_groups > max(self.top_groups, self.num_experts // 2):
            raise ValueError(f"n_group={self.num_groups} leaves groups of one expert")


def parse_moe(config: Mapping[str, Any], model_type: str) -> MoeConfig:
    """The experts of Mixtral's and Qwen's models. Raises ValueError naming a bad field."""
    if model_type == "mixtral":
        return MoeConfig(
            num_experts=_num_experts(config, 8),
            experts_per_token=integer(config, "num_experts_per_tok", 2),
            intermediate_size=integer(config, "intermediate_size"),
            normalize=True,
            float32_weights=True,
        )
    shared = model_type == "qwen2_moe"
    return MoeConfig(
        num_experts=_num_experts(config),
        experts_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "moe_intermediate_size"),
        normalize=boolean(config, "norm_topk_prob", False),
        float32_weights=False,
        dense_layers=_dense_layers(config),
        shared_intermediate_size=integer(config, "shared_expert_intermediate_size")
        if shared
        else 0,
        shared_gate=shared,
    )


def _num_experts(config: Mapping[str, Any], *default: int) -> int:
    """Under either name: transformers 5 writes the second one for Qwen3-MoE, and reads both."""
    names = ("num_experts", "num_local_experts")
    given = [name for name in names if config.get(name) is not None]
    counts = {integer(config, name) for name in given}
    if len(counts) > 1:
        raise ValueError(
            f"num_experts={config['num_experts']} and "
            f"num_local_experts={config['num_local_experts']} differ"
        )
    return integer(config, given[0] if given else "num_experts", *default)


def _dense_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers listed in mlp_only_layers, and all but every ``decoder_sparse_step``-th."""
    listed = config.get("mlp_only_layers") or []
    step = integer(config, "decoder_sparse_step", 1)
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise ValueError(f"mlp_only_layers must be a list of layers, got {listed!r}")
    num_layers = integer(config, "num_hidden_layers")
    return tuple(i for i in range(num_layers) if i in listed or (i + 1) % step)


def moe_json(moe: MoeConfig, model_type: str) -> dict[str, Any]:
    """The fields of a config.json that ``parse_moe`` reads back."""
    content: dict[str, Any] = {"num_experts_per_tok": moe.experts_per_token}
    if model_type == "mixtral":
        return content | {"num_local_experts": moe.num_experts}
    content |= {
        "num_experts": moe.num_experts,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.normalize,
        "mlp_only_layers": list(moe.dense_layers),
        "decoder_sparse_step": 1,
    }
    if moe.shared_intermediate_size:
        content["shared_expert_intermediate_size"] = moe.shared_intermediate_size
    return content
