"""Reading LoRA adapters in PEFT's format: all of an adapter is understood, or it is refused.

Shape letters: K input features, N output features, r rank.
"""

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.verifier.attention.base import AttentionBackend
from specdec.verifier.models.config import ModelConfig, read_json_object
from specdec.verifier.models.registry import model_class

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
_SHRINK, _EXPAND = (".lora_A.weight", ".lora_embedding_A"), (".lora_B.weight", ".lora_embedding_B")
_BASE = (".base_layer.weight", ".weight")
_READ = (
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
    *("target_modules", "exclude_modules", "bias", "init_lora_weights"),
)
# They say how an adapter was trained or by what, and nothing about what it computes.
_IGNORED = (
    *("base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout"),
    *("peft_version", "auto_mapping", "megatron_core", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config", "runtime_config", "qalora_group_size", "layers_pattern"),
    *("ensure_weight_tying", "enable_lora", "merge_weights"),
)
# Other starts rewrite the base model's weights, which this engine leaves alone.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


class AdapterError(ValueError):
    """An adapter that cannot be served exactly; the message names it and the part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterWeights:
    """An adapter's tensors on the host, in float32.

    ``sites`` maps a module's name, as "model.layers.0.self_attn.q_proj", to its A [r, K] and its
    B [N, r] with the scale in it. ``base_weights`` are weights of the base model that the file
    repeats; the adapter fits only a model that has just those.
    """

    path: str
    rank: int  # the largest of its modules
    sites: Mapping[str, tuple[Tensor, Tensor]]
    base_weights: Mapping[str, Tensor]

    @property
    def adapts_vocabulary(self) -> bool:
        """Whether the embedding or the head is adapted."""
        return EMBEDDING in self.sites or HEAD in self.sites


def adapter_sites(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The modules that an adapter can change, and the shape [N, K] of each one's weight.

    A tied embedding is not among them, nor is its head: one adapted alone would untie them.
    """
    if config.implementation != "specdec":
        raise AdapterError(f"model_impl={config.implementation!r} has no adapters")
    backend: AttentionBackend = None  # type: ignore[assignment]
    model = model_class(config)(
        config, dtype=config.dtype, device="meta", attention_backend=backend
    )
    vocabulary = (config.vocab_size, config.hidden_size)
    sites = {} if config.tie_word_embeddings else {EMBEDDING: vocabulary}
    for prefix, linear in model.linears():
        for name, rows in linear.parts.items():
            sites[f"{prefix}.{name}"] = (rows, linear.weight.shape[1])
    return sites if config.tie_word_embeddings else sites | {HEAD: vocabulary}


def read_adapter(
    path: str | Path, config: ModelConfig, *, max_rank: int | None = None
) -> AdapterWeights:
    """Read an adapter's folder for a model of this configuration.

    Raises FileNotFoundError for a missing path or file, and AdapterError (a ValueError) naming
    what is not supported, not consistent or damaged, or a rank above ``max_rank``.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"adapter folder not found: {str(folder)!r}")
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"adapter {str(folder)!r} has no {CONFIG}")
    settings = read_json_object(folder / CONFIG)
    source = str(folder)
    _check_settings(settings, source)
    sites = adapter_sites(config)
    targets = _target_sites(settings, sites, config, source)
    ranks = {name: _of_site(settings, "rank_pattern", "r", name, source) for name in targets}
    rank = max(ranks.values())
    if max_rank is not None and rank > max_rank:
        raise AdapterError(f"adapter {source!r}: rank {rank} is above max_lora_rank {max_rank}")
    tensors, base_weights = _read_tensors(folder, source)
    _check_names(tensors, targets, source)

    result = {}
    for name in targets:
        a, b = (tensors[name, part] for part in "AB")
        num_out, num_in = sites[name]
        # An embedding's input features are the ids.
        num_out, num_in = (num_in, num_out) if name == EMBEDDING else (num_out, num_in)
        wanted = [ranks[name], num_in], [num_out, ranks[name]]
        if (list(a.shape), list(b.shape)) != wanted:
            raise AdapterError(
                f"adapter {source!r}: {name} has A {list(a.shape)} and B {list(b.shape)}; this "
                f"model and {CONFIG} ask for {wanted[0]} and {wanted[1]}"
            )
        alpha = _of_site(settings, "alpha_pattern", "lora_alpha", name, source)
        divisor = math.sqrt(ranks[name]) if settings.get("use_rslora") else ranks[name]
        result[name] = (a, b * (alpha / divisor))
    return AdapterWeights(path=source, rank=rank, sites=result, base_weights=base_weights)


def _check_settings(settings: Mapping[str, Any], source: str) -> None:
    """Refuse by name whatever would change the result and is not done here."""
    if settings.get("peft_type") != "LORA":
        raise AdapterError(
            f"adapter {source!r}: peft_type {settings.get('peft_type')!r} is not supported, "
            "only 'LORA'"
        )
    if settings.get("bias", "none") != "none":
        raise AdapterError(
            f"adapter {source!r}: bias={settings['bias']!r} is not supported, only 'none'"
        )
    _check_types(settings, source)
    start = settings.get("init_lora_weights")
    if not any(start is plain or start == plain for plain in _PLAIN_STARTS):
        raise AdapterError(
            f"adapter {source!r}: init_lora_weights={start!r} changes the base model's weights; "
            "convert it to a plain LoRA adapter"
        )
    for name, value in settings.items():
        if name in _READ or name in _IGNORED or _asks_nothing(value):
            continue
        kind = " (DoRA)" if name == "use_dora" else ""
        raise AdapterError(f"adapter {source!r}: {name}={value!r}{kind} is not supported")


def _asks_nothing(value: object) -> bool:
    """Whether a setting is as good as absent. A 0 is not: it may be the number of a layer."""
    return value is None or value is False or value in ("", [], {})


def _check_types(settings: Mapping[str, Any], source: str) -> None:
    def refuse(name: str, wanted: str) -> NoReturn:
        raise AdapterError(
            f"adapter {source!r}: {CONFIG}: {name} must be {wanted}, got {settings[name]!r}"
        )

    for name in ("target_modules", "exclude_modules"):
        value = settings.get(name)
        names = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, str) for each in names):
            refuse(name, "a string or a list of strings")
        if isinstance(value, str):
            _check_expression(name, value, source)
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = settings.get(name)
        if patterns is not None and not isinstance(patterns, dict):
            refuse(name, "an object")
        for pattern in patterns or ():
            _check_expression(name, pattern, source)
    if not isinstance(settings.get("use_rslora"), bool | None):
        refuse("use_rslora", "true or false")


def _check_expression(field: str, expression: str, source: str) -> None:
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterError(
            f"adapter {source!r}: {CONFIG}: {field}: {expression!r} is no regular expression: "
            f"{error}"
        ) from error


def _target_sites(
    settings: Mapping[str, Any],
    sites: Mapping[str, tuple[int, int]],
    config: ModelConfig,
    source: str,
) -> list[str]:
    """The modules that ``target_modules`` names, in the model's order."""
    targets = settings.get("target_modules")
    if not targets or not isinstance(targets, str | list):
        raise AdapterError(f"adapter {source!r}: target_modules={targets!r} names no module")
    known = [*sites, EMBEDDING, HEAD] if config.tie_word_embeddings else list(sites)
    if targets == "all-linear":
        chosen = {name for name in known if name not in (EMBEDDING, HEAD)}
    else:
        chosen = set()
        for target in [targets] if isinstance(targets, str) else targets:
            matched = {name for name in known if _matches(targets, target, name)}
            if not matched:
                raise AdapterError(
                    f"adapter {source!r}: target_modules: {target!r} is no module that this engine "
                    f"adapts; those are {', '.join(_short_names(sites))}"
                )
            chosen |= matched
    excluded = settings.get("exclude_modules") or []
    for target in [excluded] if isinstance(excluded, str) else excluded:
        chosen -= {name for name in known if _matches(excluded, target, name)}
    for name in (EMBEDDING, HEAD):
        if name in chosen and name not in sites:
            raise AdapterError(
                f"adapter {source!r}: target_modules: {name} is tied in this model, and a tied "
                "embedding or head cannot be adapted"
            )
    if not chosen:
        raise AdapterError(f"adapter {source!r}: target_modules={targets!r} leaves no module")
    return [name for name in sites if name in chosen]


def _matches(field: str | Sequence[str], target: str, name: str) -> bool:
    """A string is an expression over whole names; in a list stand ends of names."""
    if isinstance(field, str):
        return re.fullmatch(target, name) is not None
    return name == target or name.endswith(f".{target}")


def _short_names(sites: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in sites))


def _of_site(
    settings: Mapping[str, Any], patterns: str, default: str, name: str, source: str
) -> Any:
    """A module's rank or alpha: its pattern's where one matches the end of its name."""
    value, field = settings.get(default), default
    for pattern, special in (settings.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            value, field = special, f"{patterns}[{pattern!r}]"
            break
    right = int if default == "r" else (int, float)
    most = sys.float_info.max
    low = 1 if default == "r" else -most
    if isinstance(value, bool) or not isinstance(value, right) or not low <= value <= most:
        raise AdapterError(f"adapter {source!r}: {field}={value!r} is not usable for {name}")
    return value


def _read_tensors(
    folder: Path, source: str
) -> tuple[dict[tuple[str, str], Tensor], dict[str, Tensor]]:
    """Low-rank weights by (module, "A" or "B"), and copies of base weights by module."""
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = sorted(p.name for end in ("*.bin", "*.pt", "*.pth") for p in folder.glob(end))
        if pickled:
            raise AdapterError(
                f"adapter {source!r} holds only pickled weights ({pickled[0]}), which are never "
                "loaded; convert them to safetensors"
            )
        raise FileNotFoundError(f"adapter {source!r} has no {WEIGHTS}")
    weights: dict[tuple[str, str], Tensor] = {}
    base: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for key in file.keys():  # noqa: SIM118 - the handle is not a mapping
                if file.get_slice(key).get_dtype() not in _FLOAT_TYPES:
                    raise AdapterError(f"{path}: {key} is not stored in floating point")
                tensor = file.get_tensor(key).float()
                if not torch.isfinite(tensor).all():
                    raise AdapterError(f"{path}: {key} holds values that are not finite")
                name, part = _parse(key, path)
                if part:
                    weights[name, part] = tensor
                else:
                    base[name] = tensor
    except SafetensorError as error:
        raise AdapterError(f"{path} is damaged or cut short: {error}") from error
    return weights, base


def _parse(key: str, path: Path) -> tuple[str, str]:
    """Module and part ("A", "B", or "" for a base weight) of a tensor. Refuses all others."""
    name = key.removeprefix(PREFIX)
    for suffixes, part in ((_SHRINK, "A"), (_EXPAND, "B")):
        for suffix in suffixes:
            if name.endswith(suffix):
                return name.removesuffix(suffix), part
    for suffix in _BASE:
        if name in (EMBEDDING + suffix, HEAD + suffix):
            return name.removesuffix(suffix), ""
    kind = ": DoRA is not supported" if "lora_magnitude_vector" in name else ""
    raise AdapterError(f"{path} has a tensor that this engine does not apply: {key}{kind}")


def _check_names(
    tensors: Mapping[tuple[str, str], Tensor], targets: Iterable[str], source: str
) -> None:
    wanted = {(name, part) for name in targets for part in "AB"}
    for missing in sorted(wanted - set(tensors))[:1]:
        raise AdapterError(f"adapter {source!r} lacks lora_{missing[1]} of {missing[0]}")
    for extra in sorted(set(tensors) - wanted)[:1]:
        raise AdapterError(
            f"adapter {source!r} has weights for {extra[0]}, which its target_modules do not name "
            "or this engine does not adapt"
        )
