"""What the state-space layers of a hybrid are: the fields of a Bamba's config.json, checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.verifier.models.fields import UnsupportedModelError, boolean, integer
from specdec.verifier.models.rope import RopeConfig, parse_rope, rope_fields

# transformers' Bamba rotates so much of a head, whatever its files say.
_ROTATED_PART = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaConfig:
    """Sizes of Mamba-2 layers. All layers but ``attention_layers`` are such."""

    attention_layers: tuple[int, ...]  # increasing
    num_heads: int
    head_size: int
    state_size: int
    num_groups: int  # of heads that share the two projections of the state
    conv_taps: int
    conv_bias: bool
    proj_bias: bool
    dt_min: float
    dt_max: float

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise UnsupportedModelError(
                f"mamba_n_heads={self.num_heads} is not a multiple of "
                f"mamba_n_groups={self.num_groups}"
            )

    @property
    def inner_size(self) -> int:
        """Features between the two projections of a layer."""
        return self.num_heads * self.head_size

    @property
    def num_channels(self) -> int:
        """Of the convolution."""
        return self.inner_size + 2 * self.num_groups * self.state_size


def parse_mamba(config: Mapping[str, Any], *, hidden_size: int, num_layers: int) -> MambaConfig:
    """Raises ValueError naming a bad field."""
    listed = config.get("attn_layer_indices") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise ValueError(f"attn_layer_indices must be a list of layers, got {listed!r}")
    num_heads = integer(config, "mamba_n_heads", 128)
    inner = integer(config, "mamba_expand", 2) * hidden_size
    head_size = config.get("mamba_d_head", "auto")
    head_size = inner // num_heads if head_size == "auto" else integer(config, "mamba_d_head")
    if num_heads * head_size != inner:
        raise ValueError(
            f"mamba_n_heads={num_heads} of {head_size} features are not "
            f"mamba_expand * hidden_size = {inner}"
        )
    dt_min, dt_max = _time_step_limit(config)
    return MambaConfig(
        attention_layers=tuple(sorted({i for i in listed if 0 <= i < num_layers})),
        num_heads=num_heads,
        head_size=head_size,
        state_size=integer(config, "mamba_d_state", 256),
        num_groups=integer(config, "mamba_n_groups", 1),
        conv_taps=integer(config, "mamba_d_conv", 4, minimum=2),
        conv_bias=boolean(config, "mamba_conv_bias", True),
        proj_bias=boolean(config, "mamba_proj_bias", False),
        dt_min=dt_min,
        dt_max=dt_max,
    )


def parse_half_rope(
    config: Mapping[str, Any], *, head_size: int, max_position: int, default_theta: float
) -> RopeConfig:
    """The rotary embedding of the first half of a head. Raises ValueError naming a bad field."""
    params = dict(rope_fields(config))
    part = params.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, _ROTATED_PART):
        raise ValueError(f"partial_rotary_factor={part} is not supported, only {_ROTATED_PART}")
    whole = {**config, "rope_parameters": params, "rope_scaling": None}
    whole.pop("partial_rotary_factor", None)
    rotated = int(head_size * _ROTATED_PART)
    return parse_rope(
        whole, head_size=rotated, max_position=max_position, default_theta=default_theta
    )


def _time_step_limit(config: Mapping[str, Any]) -> tuple[float, float]:
    limits = config.get("time_step_limit") or [0.0, math.inf]
    if isinstance(limits, list | tuple):
        # transformers 5 writes infinity as an object.
        limits = [each.get("__float__") if isinstance(each, dict) else each for each in limits]
        try:
            low, high = (float(each) for each in limits)
        except (TypeError, ValueError):
            pass
        else:
            if 0 <= low <= high:
                return low, high
    raise ValueError(f"time_step_limit must be two numbers in order, got {limits!r}")


def mamba_json(mamba: MambaConfig, *, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """The fields of a config.json that ``parse_mamba`` reads back."""
    content: dict[str, Any] = {
        "attn_layer_indices": [i for i in mamba.attention_layers if i < num_layers],
        "mamba_n_heads": mamba.num_heads,
        "mamba_d_head": mamba.head_size,
        "mamba_d_state": mamba.state_size,
        "mamba_n_groups": mamba.num_groups,
        "mamba_d_conv": mamba.conv_taps,
        "mamba_expand": mamba.inner_size // hidden_size,
        "mamba_conv_bias": mamba.conv_bias,
        "mamba_proj_bias": mamba.proj_bias,
    }
    if (mamba.dt_min, mamba.dt_max) != (0.0, math.inf):
        content["time_step_limit"] = [mamba.dt_min, mamba.dt_max]
    return content
