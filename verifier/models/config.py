"""What a model is: the fields of a config.json that this engine reads, checked."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.verifier.models.families import FAMILIES, Family
from specdec.verifier.models.fields import (
    UnsupportedModelError,
    boolean,
    integer,
    number,
    token_ids,
)
from specdec.verifier.models.gemma_config import gemma_fields, gemma_json, parse_two_ropes
from specdec.verifier.models.latent_config import (
    LatentConfig,
    deepseek_json,
    latent_scale,
    parse_deepseek_moe,
    parse_latent,
)
from specdec.verifier.models.mamba_config import (
    MambaConfig,
    mamba_json,
    parse_half_rope,
    parse_mamba,
)
from specdec.verifier.models.moe_config import MoeConfig, moe_json, parse_moe
from specdec.verifier.models.rope import RopeConfig, parse_rope, rope_json
from specdec.verifier.models.windows import parse_windows, windows_json
from specdec.verifier.modes import AttentionCGSupport

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape and constants of a decoder-only model. ``eos_token_ids`` may be empty."""

    architecture: str
    implementation: str = "specdec"  # or "transformers", of any architecture
    vocab_size: int  # rows of embedding and head, padding included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int  # of the keys in the cache
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoeConfig | None = None
    latent: LatentConfig | None = None
    mamba: MambaConfig | None = None
    attention_scale: float | None = None  # of the scores; None: 1 / sqrt(head_size)
    attention_soft_cap: float | None = None  # bounds the scores
    logit_soft_cap: float | None = None
    sliding_window: int | None = None  # tokens that a sliding layer sees, the row's own included
    sliding_layers: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None  # of the sliding layers, where it is another
    dtype: torch.dtype = torch.float32  # of the checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.implementation == "specdec" and self.architecture not in FAMILIES:
            raise UnsupportedModelError(
                f"architecture {self.architecture!r} is not supported; supported: "
                f"{', '.join(FAMILIES)}"
            )
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.rope.rotary_dim > self.head_size:
            raise ValueError(
                f"the rotary part of a head ({self.rope.rotary_dim}) is larger than the head "
                f"({self.head_size})"
            )

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    def is_recurrent(self, layer: int) -> bool:
        """A layer has a recurrent state instead of keys and values."""
        return self.mamba is not None and layer not in self.mamba.attention_layers

    def cache_index(self, layer: int) -> int:
        """Where a layer's keys and values lie, or its state: its number among those of its kind."""
        kind = self.is_recurrent(layer)
        return sum(self.is_recurrent(i) == kind for i in range(layer))

    @property
    def num_recurrent_layers(self) -> int:
        return sum(map(self.is_recurrent, range(self.num_layers)))

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - self.num_recurrent_layers

    @property
    def cg_support(self) -> AttentionCGSupport:
        """The least that layers other than attention support."""
        is_hybrid = self.num_recurrent_layers > 0
        return AttentionCGSupport.UNIFORM_BATCH if is_hybrid else AttentionCGSupport.ALWAYS

    def window_of(self, layer: int) -> int | None:
        """Tokens that a layer's rows see, or None for all."""
        return self.sliding_window if layer in self.sliding_layers else None

    @property
    def latent_size(self) -> int | None:
        """Leading features of a cached key that are its value; None where values are apart."""
        return None if self.latent is None else self.latent.latent_size

    @property
    def value_size(self) -> int:
        """Features of a head that attention gives."""
        return self.latent_size or self.head_size

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_size


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError naming the file where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def config_from_json(
    config: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None, source: str
) -> ModelConfig:
    """Check a parsed config.json and generation_config.json (for its EOS ids alone).

    Raises UnsupportedModelError naming what is not supported, ValueError naming a bad field; both
    begin with ``source``.
    """
    try:
        return _parse(config, generation or {})
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{source}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """A config.json that ``config_from_json`` and transformers 4 and 5 read."""
    eos = list(config.eos_token_ids)
    rope = rope_json(config.rope)
    if config.latent is not None:
        rope["mscale_all_dim"] = config.latent.mscale_all_dim
    elif config.rope.rotary_dim != config.head_size:
        rope["partial_rotary_factor"] = config.rope.rotary_dim / config.head_size
    dtype = str(config.dtype).removeprefix("torch.")
    content: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": FAMILIES[config.architecture].model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.rope_type == "default" else rope,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.o_bias,
        "qkv_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "torch_dtype": dtype,
        "dtype": dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": None,
    }
    content |= windows_json(
        config.sliding_window, config.sliding_layers, content["model_type"], config.num_layers
    )
    if config.family.is_gemma:
        content |= gemma_json(config)
    if config.latent is not None:
        content |= deepseek_json(config)
    elif config.mamba is not None:
        content |= mamba_json(
            config.mamba, hidden_size=config.hidden_size, num_layers=config.num_layers
        )
    elif config.moe is not None:
        content |= moe_json(config.moe, content["model_type"])
    return content


def _parse(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    _refuse_unsupported(config, family)

    hidden_size = integer(config, "hidden_size")
    num_heads = integer(config, "num_attention_heads")
    head_size = integer(config, "head_dim", family.default_head_size or 0, minimum=0)
    latent = parse_latent(config, family.model_type) if family.has_latents else None
    if latent is not None:
        head_size = latent.rotated_size
    if head_size == 0:
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads} "
                "and there is no head_dim"
            )
        head_size = hidden_size // num_heads
    max_position = integer(config, "max_position_embeddings")
    local_rope = None
    try:
        if family.model_type == "gemma3_text":
            rope, local_rope = parse_two_ropes(
                config, head_size=head_size, max_position=max_position
            )
        else:
            parse_own = parse_half_rope if family.has_recurrence else parse_rope
            rope = parse_own(
                config,
                head_size=head_size,
                max_position=max_position,
                default_theta=family.default_theta,
            )
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
    if rope.rope_type == "yarn":
        # Files in the field give YaRN's factor beside the context length before extension.
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    num_layers = integer(config, "num_hidden_layers")
    window, sliding_layers = parse_windows(
        config, family.model_type, num_layers=num_layers, max_position=max_position
    )
    attention_bias = boolean(config, "attention_bias", False)
    qkv_bias = family.qkv_bias
    if family.model_type == "qwen2_moe":
        qkv_bias = boolean(config, "qkv_bias", True)
    num_kv_heads = integer(config, "num_key_value_heads", num_heads)
    own: dict[str, Any] = {}
    if family.is_gemma:
        own = gemma_fields(config, family.model_type)
    if latent is not None:
        num_kv_heads, head_size = 1, latent.latent_size + latent.rotated_size
        own = {"attention_scale": latent_scale(latent, rope)}
    if family.has_recurrence:
        own = {"mamba": parse_mamba(config, hidden_size=hidden_size, num_layers=num_layers)}
    moe = None
    if family.has_experts:
        parse = parse_moe if latent is None else parse_deepseek_moe
        moe = parse(config, family.model_type)
    eos = token_ids(generation, "eos_token_id") or token_ids(config, "eos_token_id")
    bos = token_ids(config, "bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position_embeddings=max_position,
        rms_norm_eps=number(config, "rms_norm_eps", family.default_eps),
        rope=rope,
        tie_word_embeddings=boolean(config, "tie_word_embeddings", family.is_gemma),
        qkv_bias=attention_bias if qkv_bias is None else qkv_bias,
        o_bias=attention_bias if qkv_bias is None else False,
        mlp_bias=boolean(config, "mlp_bias", False)
        and family.model_type in ("llama", "deepseek_v2", "bamba"),
        qk_norm=family.qk_norm,
        moe=moe,
        latent=latent,
        sliding_window=window,
        sliding_layers=sliding_layers,
        local_rope=local_rope,
        **own,
        dtype=config_dtype(config),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if not names:
        model_type = config.get("model_type")
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type]
        names = names or [f"model_type {model_type}"]
    if len(names) != 1 or names[0] not in FAMILIES:
        raise UnsupportedModelError(
            f"architecture {', '.join(map(str, names))} is not supported; supported: "
            f"{', '.join(FAMILIES)}; model_impl='transformers' serves others"
        )
    return str(names[0])


def refuse_foreign_parts(config: Mapping[str, Any], *, brings_code: bool = False) -> None:
    """Raise UnsupportedModelError for quantised weights, or code that the model brings itself.

    ``brings_code``: its files come with code for what is known here; it is not run.
    """
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise UnsupportedModelError(
            f"quantization_config (method {method!r}) is not supported; load unquantised weights"
        )
    has_code = config.get("auto_map") and not brings_code
    if has_code or config.get("trust_remote_code"):
        raise UnsupportedModelError(
            "the model brings its own code (auto_map, trust_remote_code), which is never run"
        )


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    refuse_foreign_parts(config, brings_code=family.brings_code)
    field, known = "hidden_act", ["silu", "swish"]
    if family.is_gemma:
        field, known = "hidden_activation", ["gelu_pytorch_tanh"]
    activation = config.get(field) or known[0]
    if activation not in known:
        raise UnsupportedModelError(
            f"{field} {activation!r} is not supported; supported: {known[0]}"
        )
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention is not supported")


def config_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a checkpoint's weights, as its config.json says."""
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(
            f"dtype {value!r} is not supported; supported: {', '.join(DTYPES)}"
        )
    return DTYPES[name]
