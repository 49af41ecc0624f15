"""Rotary position embedding: its configuration and the table of cosines and sines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """The rotary embedding of a model. Fields from ``factor`` on are read by some types only."""

    rope_type: str = "default"
    theta: float = 10000.0
    rotary_dim: int  # leading features of a head that are rotated
    factor: float = 1.0
    original_max_position: int = 0  # llama3, yarn: context length of the pretraining
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the bounds of the ramp outwards
    attention_factor: float = 1.0  # scales cosines and sines
    frequency_factors: tuple[
        float, ...
    ] = ()  # divisors of the frequencies, as GGUF files hold them

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type {self.rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"the rotary part of a head must be even, got {self.rotary_dim}")
        if not self.theta > 0 or not self.factor > 0:
            raise ValueError(
                f"rope_theta and rope factor must be positive, got {self.theta} and {self.factor}"
            )
        if self.frequency_factors and len(self.frequency_factors) != self.rotary_dim // 2:
            raise ValueError(
                f"{len(self.frequency_factors)} rope frequency factors for {self.rotary_dim // 2} "
                "frequencies"
            )


def rope_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope object of a config.json: rope_scaling, or rope_parameters, as transformers 5 says.

    Where a file has both, its readers take the older name's. Raises ValueError naming the field.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    params = config.get(name) or {}
    if not isinstance(params, Mapping):
        raise ValueError(f"{name} must be an object, got {params!r}")
    return params


def parse_rope(
    config: Mapping[str, Any],
    *,
    head_size: int,
    max_position: int,
    default_theta: float = 10000.0,
) -> RopeConfig:
    """Read the rope fields of a config.json, in the spelling of transformers 4 or 5.

    Raises ValueError naming the field or the unsupported type.
    """
    params = rope_fields(config)
    rope_type = params.get("rope_type", params.get("type")) or "default"
    if "mrope_section" in params:
        rope_type = "mrope"
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope_type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if any(isinstance(value, Mapping) for value in params.values()):
        raise ValueError("rope_parameters that differ from layer to layer are not supported")

    def number(name: str, default: float | None = None) -> float:
        value = params.get(name)
        if value is None:
            value = config.get(name) if name in _TOP_LEVEL else None
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"rope field {name!r} of rope_type {rope_type!r}: got {value!r}")
        return float(value)

    part = number("partial_rotary_factor", 1.0)
    if part != 1.0:
        # transformers' models of these families rotate whole heads, other readers do not.
        raise ValueError(f"partial_rotary_factor={part:g} is not supported, only 1")
    common: dict[str, Any] = {
        "rope_type": rope_type,
        "theta": number("rope_theta", default_theta),
        "rotary_dim": head_size,
    }
    if rope_type == "default":
        return RopeConfig(**common)
    if rope_type == "linear":
        return RopeConfig(**common, factor=number("factor"))
    # Of this field alone the value outside the object counts where there are two.
    params = {**params, _ORIGINAL: config.get(_ORIGINAL) or params.get(_ORIGINAL)}
    original = int(number(_ORIGINAL, max_position))
    if original < 1:
        raise ValueError(f"original_max_position_embeddings must be positive, got {original}")
    if rope_type == "llama3":
        return RopeConfig(
            **common,
            factor=number("factor"),
            original_max_position=original,
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    factor = number("factor", max_position / original)
    if params.get("attention_factor") is not None:
        attention_factor = number("attention_factor")
    elif params.get("mscale") and params.get("mscale_all_dim"):
        attention_factor = yarn_mscale(factor, number("mscale")) / yarn_mscale(
            factor, number("mscale_all_dim")
        )
    else:
        attention_factor = yarn_mscale(factor)
    return RopeConfig(
        **common,
        factor=factor,
        original_max_position=original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=bool(params.get("truncate", True)),
        attention_factor=attention_factor,
    )


_ORIGINAL = "original_max_position_embeddings"
# Fields that may stand in config.json itself instead of its rope object.
_TOP_LEVEL = ("rope_theta", "partial_rotary_factor")


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature for a context extended ``factor`` times."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_json(rope: RopeConfig) -> dict[str, Any]:
    """The ``rope_parameters`` object of a config.json that ``parse_rope`` reads back."""
    if rope.frequency_factors:
        raise ValueError("rope frequency factors of a GGUF file have no spelling in config.json")
    params: dict[str, Any] = {"rope_type": rope.rope_type, "rope_theta": rope.theta}
    if rope.rope_type != "default":
        params["factor"] = rope.factor
    if rope.rope_type in ("llama3", "yarn"):
        params["original_max_position_embeddings"] = rope.original_max_position
    if rope.rope_type == "llama3":
        params |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if rope.rope_type == "yarn":
        params |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            "attention_factor": rope.attention_factor,
        }
    return params


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Radians per position of each pair of features, [rotary_dim / 2] float32.

    In float32 throughout, as models are trained: at position 100,000 a float64 table differs.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.frequency_factors:
        frequencies = frequencies / torch.tensor(rope.frequency_factors)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    if rope.rope_type == "yarn":
        return _yarn(frequencies, rope)
    return frequencies


def cos_sin_table(rope: RopeConfig, max_position: int, device: torch.device | str) -> Tensor:
    """[max_position, rotary_dim] float32: cosines in the first half, sines in the second."""
    if torch.device(device).type == "meta":
        # Arithmetic on meta tensors would import all of torch.compile, seconds for nothing.
        return torch.empty(max_position, rope.rotary_dim, dtype=torch.float32, device=device)
    frequencies = inverse_frequencies(rope).to(device)
    positions = torch.arange(max_position, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(rope.attention_factor)


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are stretched ``factor`` times, short ones kept, a ramp between.

    Source: the Llama 3.1 reference code.
    """
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return (1 - ramp) * frequencies / rope.factor + ramp * frequencies


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Interpolate where fewer than ``beta_slow`` turns fit the original context, keep above
    ``beta_fast``, a ramp over the dimensions between. Source: Peng et al., "YaRN", 2023.
    """

    def dimension(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    # Equal bounds make a step instead of a ramp.
    width = high - low if high != low else 0.001
    steps = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / width).clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)
