"""The fields of a config.json that Gemma's have beside Llama's, checked."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specdec.verifier.models.fields import UnsupportedModelError, number
from specdec.verifier.models.rope import RopeConfig, parse_rope, rope_json

if TYPE_CHECKING:
    from specdec.verifier.models.config import ModelConfig

_ROPES = ("full_attention", "sliding_attention")


def gemma_fields(config: Mapping[str, Any], model_type: str) -> dict[str, float | None]:
    """Fields of ``ModelConfig``. Raises ValueError naming a bad one."""
    default_caps = (50.0, 30.0) if model_type == "gemma2" else (None, None)
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    attention, logits = (
        _soft_cap(config, name, cap) for name, cap in zip(names, default_caps, strict=True)
    )
    if model_type != "gemma2" and attention is not None:
        raise UnsupportedModelError(f"attn_logit_softcapping={attention} is Gemma 2's alone")
    scalar = number(config, "query_pre_attn_scalar", 256)
    if scalar == 0:
        raise ValueError("query_pre_attn_scalar must be positive, got 0")
    return {
        "attention_scale": scalar**-0.5,
        "attention_soft_cap": attention,
        "logit_soft_cap": logits,
    }


def _soft_cap(config: Mapping[str, Any], name: str, default: float | None) -> float | None:
    value = config.get(name, default)
    if value is None:
        return None
    if not number(config, name, value):
        raise ValueError(f"{name} must be positive, or null for none, got {value!r}")
    return float(value)


def parse_two_ropes(
    config: Mapping[str, Any], *, head_size: int, max_position: int
) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of Gemma 3's global and sliding layers, as transformers 4 or 5 spells.

    Raises ValueError naming the field or the unsupported type.
    """
    params, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    objects = {"rope_parameters": params, "rope_scaling": scaling}
    if isinstance(params, Mapping):
        objects |= {f"rope_parameters.{kind}": params.get(kind) or {} for kind in _ROPES}
    for name, given in objects.items():
        if not isinstance(given, Mapping):
            raise ValueError(f"{name} must be an object, got {given!r}")
    unknown = sorted(set(params) - set(_ROPES))
    if unknown:
        raise ValueError(f"rope_parameters: {', '.join(unknown)} is not one of {', '.join(_ROPES)}")
    local_theta = config.get("rope_local_base_freq", 10000.0)
    ropes = []
    for kind, theta, factors in (
        ("full_attention", config.get("rope_theta", 1e6), scaling),
        ("sliding_attention", local_theta, {}),
    ):
        own = {"rope_theta": theta, **(params.get(kind) or {}), **factors}
        ropes.append(
            parse_rope({"rope_parameters": own}, head_size=head_size, max_position=max_position)
        )
    return ropes[0], ropes[1]


def gemma_json(config: "ModelConfig") -> dict[str, Any]:
    """The fields of a config.json that the functions above read back."""
    assert config.attention_scale is not None
    scalar = config.attention_scale**-2
    content: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        # transformers wants an integer where it is one.
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
    }
    if config.local_rope is not None:
        local = rope_json(config.local_rope)
        content["rope_parameters"] = dict(zip(_ROPES, (rope_json(config.rope), local), strict=True))
        content["rope_local_base_freq"] = config.local_rope.theta
    return content
