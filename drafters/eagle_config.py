"""What an EAGLE-3 head is: its config.json, in the two public layouts, checked.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025, and the checkpoints of SafeAILab and of the speculators library.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.verifier.models.config import (
    ModelConfig,
    UnsupportedModelError,
    config_from_json,
    read_json_object,
)

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
NUM_FEATURES = 3
# What transformers' LlamaConfig leaves out of a saved difference: its defaults.
_LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig:
    """Shape and constants of a head."""

    layer: ModelConfig  # its one decoder layer, whose input is twice as wide; vocab_size: target's
    target_hidden_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, int, int]  # target's hidden states after this many layers
    norm_before_residual: bool = False  # the residual stream starts from the normed feature
    parallel: bool = False  # one pass proposes all tokens, from masked inputs after the first


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers that public heads are trained on where their config does not name them.

    Hidden states after 2, half and all but 3 of the target's layers; kept within a short target.
    """
    low, middle, high = (
        min(max(layers, 0), num_layers) for layers in (2, num_layers // 2, num_layers - 3)
    )
    return low, middle, high


def read_eagle_config(folder: Path, target: ModelConfig) -> EagleConfig:
    """The config.json of a head for ``target``.

    Raises FileNotFoundError, or ValueError naming the file, the field and what was expected:
    also where the head was made for another target.
    """
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"EAGLE head {str(folder)!r} has no config.json")
    try:
        return _parse(read_json_object(path), target, str(path))
    except UnsupportedModelError:
        raise
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def _parse(config: Mapping[str, Any], target: ModelConfig, source: str) -> EagleConfig:
    layer_fields: Mapping[str, Any] = config
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        if kind != "eagle3":
            raise ValueError(f"speculators_model_type must be 'eagle3', got {kind!r}")
        layer_fields = config.get("transformer_layer_config") or {}
        if not isinstance(layer_fields, Mapping):
            raise ValueError(f"transformer_layer_config must be an object, got {layer_fields!r}")
        layer_fields = _LLAMA_DEFAULTS | dict(layer_fields)
        # vLLM takes true where it is left out, the library itself false.
        if not isinstance(config.get("norm_before_residual"), bool):
            raise ValueError("the field norm_before_residual is missing")
    else:
        names = config.get("architectures") or []
        if len(names) != 1 or names[0] not in ARCHITECTURES:
            raise ValueError(
                f"architectures must be one of {', '.join(ARCHITECTURES)}, got {names!r}"
            )
    if config.get("norm_before_fc"):
        raise ValueError("norm_before_fc is not supported")
    if config.get("eagle_config"):
        raise ValueError(
            "eagle_config is not supported: give eagle_aux_hidden_state_layer_ids, counted as the "
            "layers before each hidden state"
        )
    layer = _layer(layer_fields, source)
    if layer.vocab_size != target.vocab_size:
        raise ValueError(
            f"vocab_size is {layer.vocab_size}, and the target's is {target.vocab_size}"
        )
    target_hidden_size = _integer(config, "target_hidden_size", layer.hidden_size)
    if target_hidden_size != target.hidden_size:
        name = "target_hidden_size" if config.get("target_hidden_size") else "hidden_size"
        raise ValueError(
            f"{name} is {target_hidden_size}, and the target's hidden_size is {target.hidden_size}"
        )
    draft_vocab_size = _integer(config, "draft_vocab_size", layer.vocab_size)
    if draft_vocab_size > layer.vocab_size:
        raise ValueError(
            f"draft_vocab_size ({draft_vocab_size}) is above vocab_size ({layer.vocab_size})"
        )
    return EagleConfig(
        layer=layer,
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        feature_layers=_feature_layers(config, target.num_layers),
        norm_before_residual=_boolean(config, "norm_before_residual"),
        parallel=_boolean(config, "specdec_parallel_drafting"),
    )


def _layer(fields: Mapping[str, Any], source: str) -> ModelConfig:
    """The head's decoder layer: that of a Llama model of one layer."""
    model_type = fields.get("model_type", "llama")
    if model_type != "llama":
        raise ValueError(f"model_type must be 'llama', got {model_type!r}")
    if fields.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"num_hidden_layers must be 1, got {fields['num_hidden_layers']!r}")
    return config_from_json(
        {**fields, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, source=source
    )


def _feature_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, int, int]:
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return default_feature_layers(num_layers)
    if (
        not isinstance(ids, list)
        or len(ids) != NUM_FEATURES
        or any(isinstance(i, bool) or not isinstance(i, int) for i in ids)
        or not all(0 <= i <= num_layers for i in ids)
    ):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids must be {NUM_FEATURES} integers from 0 to the "
            f"target's {num_layers} layers, got {ids!r}"
        )
    low, middle, high = ids
    return low, middle, high


def _integer(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return value


def _boolean(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return bool(value)
