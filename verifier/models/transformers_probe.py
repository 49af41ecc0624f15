"""What a model of transformers asks of its attention, found out before its weights are loaded.

The model is built without memory and run once on shapes alone; each of its attention layers must
come through transformers' AttentionInterface, and ask for what a paged cache can give.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.verifier.models.config import (
    ModelConfig,
    config_dtype,
    read_json_object,
    refuse_foreign_parts,
)
from specdec.verifier.models.fields import UnsupportedModelError, token_ids
from specdec.verifier.models.rope import RopeConfig

ATTENTION = "specdec"
# What a caller of the interface may pass that changes nothing here.
_HARMLESS = ("dropout", "use_cache", "position_ids", "output_attentions", "output_router_logits")
# They build masks that a row's position and a window say already, or that no causal layer takes.
_MASKS = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_bidirectional_mask",
    "create_masks_for_generate",
)
_NUM_TOKENS = 3


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer's call of the interface."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None
    soft_cap: float | None


class Probe:
    """Stands in for attention, and notes what each layer asks of it."""

    def __init__(self) -> None:
        self.calls: dict[int, LayerCall] = {}

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,  # [1, H, T, D]
        key: Tensor,  # [1, G, T, D]
        value: Tensor,
        mask: Any,
        **options: Any,
    ) -> Tensor:
        name = type(module).__name__
        checked = ("scaling", "sliding_window", "softcap", "is_causal")
        for option, asked in options.items():
            if option not in (*_HARMLESS, *checked) and asked is not None:
                raise UnsupportedModelError(f"{name} gives its attention {option}")
        if mask is not None:
            raise UnsupportedModelError(f"{name} gives its attention a mask of its own")
        causal = options.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise UnsupportedModelError(f"{name} is not causal")
        if key.shape[2] != query.shape[2] or getattr(module, "is_cross_attention", False):
            raise UnsupportedModelError(f"{name} attends to other tokens than its own (cross)")
        if key.shape != value.shape or query.shape[3] != key.shape[3]:
            raise UnsupportedModelError(f"{name} has keys and values of different sizes")
        layer = getattr(module, "layer_idx", None)
        if type(layer) is not int or layer in self.calls:
            raise UnsupportedModelError(f"{name} has layer_idx={layer}, which names no one layer")
        self.calls[layer] = LayerCall(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=key.shape[3],
            sliding_window=options.get("sliding_window") or None,
            soft_cap=options.get("softcap") or None,
        )
        return query.transpose(1, 2)


def read_transformers_config(path: Path) -> ModelConfig:
    """The configuration of a folder's model as transformers implements it.

    Raises UnsupportedModelError naming why it cannot be served, FileNotFoundError.
    """
    file = path / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"{str(path)!r} has no config.json, which model_impl needs")
    content = read_json_object(file)
    generation_file = path / "generation_config.json"
    generation = read_json_object(generation_file) if generation_file.exists() else {}
    try:
        refuse_foreign_parts(content)
        return _probe(path, content, generation)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{file}: model_impl='transformers': {error}") from error


def _probe(path: Path, content: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    from specdec.verifier.models.transformers_lm import head_of, register

    register()
    hf = _without_memory(path)
    _check_class(hf)
    config = hf.config.get_text_config()
    probe = Probe()
    ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
    try:
        out = hf.base_model(input_ids=ids, position_ids=ids, use_cache=False, specdec_attend=probe)
        logits = head_of(hf)(inputs_embeds=out.last_hidden_state, use_cache=False).logits
    except UnsupportedModelError:
        raise
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{type(hf).__name__} does not run on a flat batch: {error}"
        ) from error
    num_layers = config.num_hidden_layers
    missing = sorted(set(range(num_layers)) - set(probe.calls))
    if missing or len(probe.calls) != num_layers:
        raise UnsupportedModelError(
            f"{type(hf).__name__} bypasses the attention interface in layers {missing}"
        )
    windows = _windows(hf, probe.calls)
    shapes = {(call.num_heads, call.num_kv_heads, call.head_size) for call in probe.calls.values()}
    if len(shapes) > 1:
        raise UnsupportedModelError("layers with different heads are not supported")
    num_heads, num_kv_heads, head_size = shapes.pop()
    caps = [call.soft_cap for call in probe.calls.values() if call.soft_cap]
    context = getattr(config, "max_position_embeddings", None)
    if type(context) is not int:
        raise UnsupportedModelError("max_position_embeddings is missing")
    bos = token_ids(content, "bos_token_id")
    return ModelConfig(
        architecture=type(hf).__name__,
        implementation="transformers",
        vocab_size=logits.shape[-1],
        hidden_size=out.last_hidden_state.shape[-1],
        intermediate_size=0,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position_embeddings=context,
        rms_norm_eps=0.0,
        rope=RopeConfig(rotary_dim=2),
        sliding_window=min(windows.values(), default=None),
        sliding_layers=tuple(sorted(windows)),
        attention_soft_cap=max(caps, default=None),
        dtype=config_dtype(content),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=token_ids(generation, "eos_token_id") or token_ids(content, "eos_token_id"),
    )


def _without_memory(path: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"transformers does not know it: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("encoder-decoder models are not supported")
    _check_rope(config.get_text_config())
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, experts_implementation=ATTENTION
            ).eval()
    except ValueError as error:
        raise UnsupportedModelError(str(error).partition("\n")[0]) from error
    except KeyError as error:
        name = type(config).__name__.removesuffix("Config")
        raise UnsupportedModelError(f"{name} bypasses the attention interface") from error


def _check_rope(config: Any) -> None:
    params = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in params.values() if isinstance(value, Mapping)]
    for each in nested or [params]:
        if each.get("rope_type", "default") in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                f"rope_type {each['rope_type']!r} makes a text depend on what runs beside it"
            )


def _windows(hf: Any, calls: Mapping[int, LayerCall]) -> dict[int, int]:
    """The windows of the layers that have one, as their masks would have it.

    Some models say nothing of it to their attention. Raises where what they say is something else.
    """
    config, windows = hf.config.get_text_config(), {}
    kinds = getattr(config, "layer_types", None)
    slides = "create_sliding_window_causal_mask" in _mask_makers(hf)
    for layer, call in sorted(calls.items()):
        is_masked = kinds[layer] == "sliding_attention" if kinds else slides
        window = (getattr(config, "sliding_window", None) if is_masked else None) or None
        if call.sliding_window not in (None, window):
            raise UnsupportedModelError(
                f"layer {layer} of {type(hf).__name__} has a mask with sliding_window={window}, "
                f"and asks its attention for sliding_window={call.sliding_window}"
            )
        if window is not None:
            windows[layer] = window
    return windows


def _mask_makers(hf: Any) -> set[str]:
    """Names of transformers' functions that the model makes its masks with."""
    from transformers import masking_utils

    module = sys.modules[type(hf.base_model).__module__]
    return {each for each in vars(masking_utils) if each.startswith("create_")} & set(vars(module))


def _check_class(hf: Any) -> None:
    name = type(hf).__name__
    if hf._is_stateful:
        raise UnsupportedModelError(f"{name} keeps a recurrent state, for which there is no cache")
    if not hf._supports_attention_backend:
        raise UnsupportedModelError(f"{name} bypasses the attention interface")
    kinds = set(getattr(hf.config.get_text_config(), "layer_types", None) or ())
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if others:
        raise UnsupportedModelError(f"layer_types {', '.join(others)} are not supported")
    used = _mask_makers(hf)
    if not used or used - set(_MASKS):
        own = ", ".join(sorted(used - set(_MASKS))) or "in its own way"
        raise UnsupportedModelError(f"{name} makes masks that a cache cannot give: {own}")
