"""Which layers of a model see only the last tokens, as its config.json says."""

from collections.abc import Mapping
from typing import Any

from specdec.verifier.models.fields import UnsupportedModelError, boolean, integer

FULL, SLIDING = "full_attention", "sliding_attention"
# Every layer slides, whatever a list of kinds may say.
_UNIFORM = ("mixtral", "qwen3_moe")
# A window counts only where use_sliding_window says so.
_SWITCHED = ("mimo", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
_NEVER = ("llama", "deepseek_v2", "deepseek_v3", "bamba")
_DEFAULT_WINDOWS = {"mistral": 4096, "gemma2": 4096, "gemma3_text": 4096}
# Some layers slide in every model of these.
_ALTERNATING = ("gemma2", "gemma3_text")


def parse_windows(
    config: Mapping[str, Any], model_type: str, *, num_layers: int, max_position: int
) -> tuple[int | None, tuple[int, ...]]:
    """The window's length and the layers that have it: (None, ()) for a model without one.

    Raises UnsupportedModelError for kinds of layers that are not known, or a window on a
    family without windows; ValueError naming a bad field.
    """
    kinds = _kinds(config, model_type, num_layers)
    layers = tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)
    window = _DEFAULT_WINDOWS.get(model_type)
    if "sliding_window" in config:
        window = config["sliding_window"]
    if model_type in _SWITCHED and not boolean(config, "use_sliding_window", False):
        window = None
    if window is not None:
        window = integer({"sliding_window": window}, "sliding_window", minimum=min(1, len(layers)))
    if model_type in _NEVER and (layers or (window or max_position) < max_position):
        raise UnsupportedModelError(
            f"sliding_window={window} with layer_types {config.get('layer_types')}: models of "
            f"type {model_type} have no windows"
        )
    is_listed = config.get("layer_types") and model_type not in _UNIFORM
    if layers and not window and (is_listed or model_type in _ALTERNATING):
        raise ValueError(f"layers {layers} are {SLIDING}, but there is no sliding_window")
    # A window as long as the context hides nothing; but Gemma 3's sliding layers rotate by less.
    hides_nothing = not window or window >= max_position
    if not layers or (hides_nothing and model_type != "gemma3_text"):
        return None, ()
    return window, layers


def _kinds(config: Mapping[str, Any], model_type: str, num_layers: int) -> list[str]:
    listed = config.get("layer_types")
    if listed and model_type not in _UNIFORM:
        if not isinstance(listed, list) or len(listed) < num_layers:
            raise ValueError(f"layer_types must name {num_layers} layers, got {listed!r}")
        others = sorted({str(kind) for kind in listed} - {FULL, SLIDING})
        if others:
            raise UnsupportedModelError(f"layer_types {', '.join(others)} are not supported")
        return listed[:num_layers]
    first_full = integer(config, "max_window_layers", 28, minimum=0)
    pattern = integer(config, "sliding_window_pattern", 6)
    slides = {
        **dict.fromkeys(_NEVER, lambda i: False),
        "mimo": lambda i: i >= first_full,
        "qwen2": lambda i: i >= first_full,
        "qwen3": lambda i: i >= first_full,
        "qwen2_moe": lambda i: i % 2 == 0 and i < first_full,
        "gemma2": lambda i: i % 2 == 0,
        "gemma3_text": lambda i: (i + 1) % pattern > 0,
    }.get(model_type, lambda i: True)
    return [SLIDING if slides(i) else FULL for i in range(num_layers)]


def windows_json(
    window: int | None, layers: tuple[int, ...], model_type: str, num_layers: int
) -> dict[str, Any]:
    """The fields of a config.json that ``parse_windows`` reads back."""
    if model_type in _NEVER:
        return {}
    content: dict[str, Any] = {"sliding_window": window}
    if model_type in _SWITCHED:
        content["use_sliding_window"] = window is not None
    # A list makes transformers read Mistral's models by another class: only where it says more.
    says_nothing = model_type == "mistral" and len(layers) in (0, num_layers)
    if model_type not in _UNIFORM and not says_nothing:
        content["layer_types"] = [SLIDING if i in layers else FULL for i in range(num_layers)]
    return content
