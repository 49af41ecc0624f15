"""Reading GGUF files: metadata, and tensors dequantised under Hugging Face's names.

The header is parsed here, since the gguf package's reader makes an array object for each of the
hundred thousand strings of a vocabulary; the package dequantises.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.verifier import gguf_gemma
from specdec.verifier.models.config import ModelConfig, UnsupportedModelError
from specdec.verifier.models.families import FAMILIES
from specdec.verifier.models.rope import RopeConfig, yarn_mscale

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    **gguf_gemma.ARCHITECTURES,
}
# Those whose files interleave the two rotated halves of each head's q and k rows.
PERMUTED_ARCHITECTURES = ("llama",)
TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]  # rows first, as in PyTorch
    type_id: int  # a GGMLQuantizationType
    offset: int  # from the start of the file
    num_bytes: int


class GGUFFile:
    """One GGUF file, its data mapped into memory.

    Raises ValueError naming a file that is damaged or cut short, UnsupportedModelError for a
    version or a tensor type that cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.stat().st_size == 0:
            raise ValueError(f"{self.path} is empty")
        self._data = np.memmap(self.path, dtype=np.uint8, mode="r")
        try:
            self.metadata, self.tensors = _Header(self._data).parse()
        except (struct.error, UnicodeDecodeError, KeyError, IndexError) as error:
            raise ValueError(f"{self.path} is damaged or cut short: {error!r}") from error
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{self.path}: {error}") from error
        for name, info in self.tensors.items():
            if info.offset + info.num_bytes > len(self._data):
                raise ValueError(f"{self.path} is cut short: it ends before the end of {name}")

    def read(self, name: str) -> Tensor:
        """The tensor, dequantised to float32."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.tensors[name]
        raw = self._data[info.offset : info.offset + info.num_bytes]
        # Rows are quantised one by one, so the last dimension is in blocks and the others are not.
        rows = raw.reshape(*info.shape[:-1], -1)
        values = dequantize(_typed(rows, info.type_id), GGMLQuantizationType(info.type_id))
        # Values that needed no dequantising still lie in the file's read-only mapping.
        writable = np.require(values, np.float32, ["C", "W"])
        return torch.from_numpy(writable.reshape(info.shape))

    def model_config(self) -> ModelConfig:
        """Raises UnsupportedModelError naming what is not supported, ValueError a missing field."""
        try:
            return _model_config(self)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{self.path}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error


class GGUFCheckpoint:
    """The model tensors of a GGUF file under Hugging Face's names, q and k rows in their order."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.source = str(file.path)
        self._file = file
        arch = file.metadata["general.architecture"]
        self._names = {hf_name(name, arch): name for name in file.tensors if name != ROPE_FACTORS}
        self._is_gemma = arch in gguf_gemma.ARCHITECTURES
        self._permuted_heads: dict[str, int] = {}
        if arch in PERMUTED_ARCHITECTURES:
            self._permuted_heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {hf: self._file.tensors[name].shape for hf, name in self._names.items()}

    def read(self, name: str) -> Tensor:
        tensor = self._file.read(self._names[name])
        if self._is_gemma and name.endswith("norm.weight"):
            # The file holds what a norm multiplies by; the model adds the one itself.
            return tensor - 1
        parts = name.split(".")
        heads = self._permuted_heads.get(parts[-2]) if len(parts) > 1 else None
        return tensor if heads is None else unpermute(tensor, heads)


def hf_name(name: str, arch: str) -> str:
    """Hugging Face's name of a GGUF tensor; a name without one is returned as it is."""
    names = LAYER_NAMES | (gguf_gemma.LAYER_NAMES if arch in gguf_gemma.ARCHITECTURES else {})
    stem, _, kind = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in names:
        return f"model.layers.{parts[1]}.{names[parts[2]]}.{kind}"
    return name


def unpermute(tensor: Tensor, num_heads: int) -> Tensor:
    """Undo the interleaving of a head's two rotated halves: rows 0, 2, 4, ... then 1, 3, 5, ..."""
    halves = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _model_config(file: GGUFFile) -> ModelConfig:
    meta = file.metadata
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {arch!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[arch]

    def field(name: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{name}", default)
        if value is None:
            raise ValueError(f"the field {arch}.{name} is missing")
        return value

    if field("expert_count", 0):
        raise UnsupportedModelError(f"mixture of experts ({arch}.expert_count) is not supported")
    context = int(field("context_length"))
    is_gemma = arch in gguf_gemma.ARCHITECTURES
    window = meta.get(f"{arch}.attention.sliding_window")
    if window and window < context and not is_gemma:
        raise UnsupportedModelError(
            f"{arch}.attention.sliding_window={window} is active, and sliding windows of this "
            "architecture are not supported in GGUF files"
        )
    hidden, heads = int(field("embedding_length")), int(field("attention.head_count"))
    head_size = int(field("attention.key_length", hidden // heads))
    if field("attention.value_length", head_size) != head_size:
        raise UnsupportedModelError("keys and values of different head sizes are not supported")
    rope = _rope_config(file, arch, head_size=head_size, context=context)
    if rope.rope_type == "yarn":
        context = max(context, int(rope.original_max_position * rope.factor))
    if "token_embd.weight" not in file.tensors:
        raise ValueError("the tensor token_embd.weight is missing")
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=int(field("feed_forward_length")),
        num_layers=int(field("block_count")),
        num_heads=heads,
        num_kv_heads=int(field("attention.head_count_kv", heads)),
        head_size=head_size,
        max_position_embeddings=context,
        rms_norm_eps=float(field("attention.layer_norm_rms_epsilon")),
        rope=rope,
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=FAMILIES[architecture].qk_norm,
        dtype=_dtype(file),
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(meta),
        **(gguf_gemma.fields(meta, arch, context=context) if is_gemma else {}),
    )


def _rope_config(file: GGUFFile, arch: str, *, head_size: int, context: int) -> RopeConfig:
    meta = file.metadata
    scaling = meta.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"rope scaling {scaling!r} is not supported")
    factor = float(meta.get(f"{arch}.rope.scaling.factor", 1.0))
    original = int(meta.get(f"{arch}.rope.scaling.original_context_length", context))
    factors: tuple[float, ...] = ()
    if ROPE_FACTORS in file.tensors:
        factors = tuple(file.read(ROPE_FACTORS).tolist())
    return RopeConfig(
        rope_type="default" if scaling == "none" else scaling,
        theta=float(meta.get(f"{arch}.rope.freq_base", 10000.0)),
        rotary_dim=int(meta.get(f"{arch}.rope.dimension_count", head_size)),
        factor=factor,
        original_max_position=original,
        attention_factor=yarn_mscale(factor) if scaling == "yarn" else 1.0,
        frequency_factors=factors,
    )


def _eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The end of a text, and the end of a turn where the file has one of its own."""
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [int(metadata[name]) for name in names if metadata.get(name) is not None]
    return tuple(dict.fromkeys(ids))


def _dtype(file: GGUFFile) -> torch.dtype:
    """Float16 or float32 where all matrices are; bfloat16 is the usual origin of quantised ones."""
    types = {info.type_id for info in file.tensors.values() if len(info.shape) > 1}
    return {frozenset({0}): torch.float32, frozenset({1}): torch.float16}.get(
        frozenset(types), torch.bfloat16
    )


def _typed(rows: np.ndarray, type_id: int) -> np.ndarray:
    """Unquantised tensors as numbers; the dequantiser takes the others as bytes."""
    plain = {0: np.float32, 1: np.float16}
    return rows.view(plain[type_id]) if type_id in plain else rows


class _Header:
    """A cursor over the bytes of the header."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data.data
        self._at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if bytes(self._data[:4]) != b"GGUF":
            raise UnsupportedModelError("not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise UnsupportedModelError(f"GGUF version {version} is not supported; supported: 2, 3")
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(num_fields):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-self._at // alignment) * alignment
        return metadata, {
            name: TensorInfo(
                shape=shape, type_id=type_id, offset=start + offset, num_bytes=num_bytes
            )
            for name, shape, type_id, offset, num_bytes in infos
        }

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        raw = self._data[self._at : self._at + length]
        if len(raw) < length:
            raise IndexError("a string runs past the end of the file")
        self._at += length
        return str(raw, "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        kind, length = self._scalar("I"), self._scalar("Q")
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(length)]
        code = f"<{length}{_SCALARS[kind]}"
        values = list(struct.unpack_from(code, self._data, self._at))
        self._at += struct.calcsize(code)
        return values

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int, int]:
        from gguf.constants import GGML_QUANT_SIZES

        name = self._string()
        dims = [self._scalar("Q") for _ in range(self._scalar("I"))]
        type_id, offset = self._scalar("I"), self._scalar("Q")
        sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
        if type_id not in sizes:
            raise UnsupportedModelError(f"tensor {name} has the unknown type {type_id}")
        block, block_bytes = sizes[type_id]
        num_bytes = math.prod(dims) // block * block_bytes
        return name, tuple(reversed(dims)), type_id, offset, num_bytes
