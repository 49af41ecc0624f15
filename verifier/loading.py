"""From a model's files to a model on a device, and back to files."""

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specdec.verifier.attention.base import AttentionBackend
from specdec.verifier.checkpoint import Checkpoint, SafetensorsCheckpoint, save_tensors
from specdec.verifier.gguf_file import GGUFCheckpoint, GGUFFile
from specdec.verifier.hub import resolve_model
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.models.config import (
    ModelConfig,
    UnsupportedModelError,
    config_from_json,
    config_to_json,
    read_json_object,
)
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.models.mtp_names import mtp_tensors
from specdec.verifier.models.registry import model_class
from specdec.verifier.parallel.sharding import WHOLE, TensorParallel, cut_of

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
TOKENIZER_FILES = ("tokenizer*", "chat_template*", "special_tokens_map.json", "vocab.json")
# Called with the number done, the number of all, and the name of the next.
Progress = Callable[[int, int, str], None]
# Names in one message; a checkpoint of another model lacks hundreds.
MAX_NAMES = 5


def read_config(path_or_id: str | Path | None, *, implementation: str = "specdec") -> ModelConfig:
    """The model's configuration, without its weights.

    ``path_or_id``: a Hugging Face folder or hub id, a ``.gguf`` file, or None for the bundled
    default. ``implementation``: "specdec", or "transformers" for a folder or hub id. Raises
    FileNotFoundError, ValueError, or UnsupportedModelError (a ValueError) naming what is missing,
    wrong or not supported, and the file.
    """
    path = resolve_model(path_or_id)
    if implementation == "transformers":
        if path.is_file():
            raise UnsupportedModelError(f"{path}: model_impl='transformers' reads no GGUF file")
        from specdec.verifier.models.transformers_probe import read_transformers_config

        return read_transformers_config(path)
    return GGUFFile(path).model_config() if path.is_file() else _folder_config(path)


def load_model(
    path_or_id: str | Path | None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    attention_backend: AttentionBackend,
    progress: Progress | None = None,
    tp: TensorParallel = WHOLE,
) -> CausalLM:
    """Load one of our own models for inference; ``dtype`` None keeps the checkpoint's.

    ``tp``: which part of it; of each tensor nothing else reaches the device.

    Everything that can be refused is, before memory is allocated: errors as ``read_config``, and
    ValueError naming missing, unexpected or misshapen tensors and damaged files. ``progress`` is
    told the tensors done, their number, and the next one's name.
    """
    read_config(path_or_id)  # refuse before a hub id's weights are fetched
    checkpoint, config = open_checkpoint(resolve_model(path_or_id, weights=True))
    model = model_class(config)(
        config,
        dtype=config.dtype if dtype is None else dtype,
        device=device,
        attention_backend=attention_backend,
        tp=tp,
    )
    slots = model.weight_slots()
    for done, (name, slot) in enumerate(slots.items()):
        if progress is not None:
            progress(done, len(slots), name)
        cut, tensor = cut_of(name, config, tp), checkpoint.read(name)
        slot.copy_(tensor if cut is None else cut.of(tensor))
    return model.eval()


def load_any_model(
    path_or_id: str | Path | None,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    attention_backend: AttentionBackend,
    progress: Progress | None = None,
    tp: TensorParallel = WHOLE,
) -> LanguageModel:
    """``load_model`` by the implementation that ``config``, of this model, was read for."""
    if config.implementation == "specdec":
        return load_model(
            path_or_id,
            dtype=dtype,
            device=device,
            attention_backend=attention_backend,
            progress=progress,
            tp=tp,
        )
    from specdec.verifier.models.transformers_lm import load_transformers_model

    path = resolve_model(path_or_id, weights=True)
    return load_transformers_model(
        path, config, dtype=dtype, device=device, attention_backend=attention_backend
    )


def check_weights(path_or_id: str | Path | None, config: ModelConfig) -> None:
    """Raise what ``load_any_model`` would, as far as the files' headers tell."""
    path = resolve_model(path_or_id, weights=True)
    if config.implementation == "specdec":
        open_checkpoint(path)
    else:
        SafetensorsCheckpoint(path)


def open_checkpoint(path: Path) -> tuple[Checkpoint, ModelConfig]:
    """The tensors of a folder or GGUF file and their configuration, found to fit each other."""
    checkpoint: Checkpoint
    if path.is_file():
        file = GGUFFile(path)
        config = file.model_config()
        checkpoint = GGUFCheckpoint(file, config)
    else:
        config = _folder_config(path)
        checkpoint = SafetensorsCheckpoint(path)
        config = _settle_tied_head(config, checkpoint)
    check_tensors(config, checkpoint)
    return checkpoint, config


def check_tensors(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise ValueError naming tensors that are missing, unexpected or of another shape."""
    expected = {
        name: tuple(slot.shape) for name, slot in _meta_model(config).weight_slots().items()
    }
    shapes = dict(checkpoint.shapes())
    if config.tie_word_embeddings:
        shapes.pop(HEAD, None)
    for name in mtp_tensors(shapes, config.num_layers):
        del shapes[name]
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise ValueError(f"{checkpoint.source} lacks the tensor {_listed(missing)}")
    unexpected = [name for name in shapes if name not in expected]
    if unexpected:
        raise ValueError(
            f"{checkpoint.source} has a tensor that {config.architecture} of this configuration "
            f"has no use for: {_listed(unexpected)}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ValueError(
                f"{checkpoint.source}: {name} has the shape {list(shapes[name])}, and the "
                f"configuration asks for {list(shape)}"
            )


def random_weights(
    config: ModelConfig,
    *,
    std: float = 0.02,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    attention_backend: AttentionBackend,
) -> CausalLM:
    """A model of this shape with normal weights, made on the device: norms one, biases zero."""
    model = model_class(config)(
        config,
        dtype=config.dtype if dtype is None else dtype,
        device=device,
        attention_backend=attention_backend,
    )
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for name, slot in model.weight_slots().items():
        if slot.dim() >= 2:
            slot.normal_(std=std, generator=generator)
        else:
            slot.fill_(0.0 if name.endswith("bias") else 1.0)
    return model.eval()


def truncate_layers(model: CausalLM, num_layers: int) -> CausalLM:
    """A model of the first layers with the same embedding, norm and head, in the same memory."""
    if not 1 <= num_layers <= model.config.num_layers:
        raise ValueError(
            f"num_layers must be between 1 and {model.config.num_layers}, got {num_layers}"
        )
    config = replace(model.config, num_layers=num_layers)
    short = model_class(config)(
        config,
        dtype=model.dtype,
        device="meta",
        attention_backend=model.attention_backend,
        tp=model.tp,
    )
    short.embed_tokens, short.norm, short.lm_head = model.embed_tokens, model.norm, model.lm_head
    short.layers = torch.nn.ModuleList(model.first_layers(num_layers))
    short.cos_sin, short.local_cos_sin = model.cos_sin, model.local_cos_sin
    return short.eval()


def with_features(model: CausalLM, feature_layers: tuple[int, ...]) -> CausalLM:
    """The same model in the same memory, whose passes also give these hidden states.

    ``feature_layers``: numbers of layers, 0 (the embedding) to all. The model itself is unchanged.
    """
    assert all(0 <= i <= model.config.num_layers for i in feature_layers)
    twin = copy.copy(model)
    twin.feature_layers = feature_layers
    return twin


def silence_layers(model: CausalLM, first: int) -> None:
    """Make layers ``first`` and later add nothing, at full cost: their last products are zeroed.

    ``truncate_layers(model, first)`` is then a draft that agrees with the model everywhere.
    """
    for layer in model.first_layers()[first:]:
        for weight in (*layer.attention.last_weights(), *layer.mlp.last_weights()):
            weight.zero_()


def save_model(model: CausalLM, folder: str | Path) -> Path:
    """Write a Hugging Face folder (without tokenizer) that ``load_model`` and transformers read."""
    config = replace(model.config, dtype=model.dtype)
    return _save(Path(folder), config, model.weight_slots())


def save_first_layers(
    path_or_id: str | Path | None,
    folder: str | Path,
    num_layers: int,
    *,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a model's first layers with its embedding, norm and head as a Hugging Face folder.

    Tokenizer files of a folder are copied; those of a GGUF file are for ``Tokenizer.save``.
    ``dtype`` None keeps the tensors' own (float32 from a GGUF file).
    """
    path = resolve_model(path_or_id, weights=True)
    checkpoint, config = open_checkpoint(path)
    if not 1 <= num_layers <= config.num_layers:
        raise ValueError(f"num_layers must be between 1 and {config.num_layers}, got {num_layers}")
    config = replace(config, num_layers=num_layers)
    tensors = {name: checkpoint.read(name) for name in _meta_model(config).weight_slots()}
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    config = replace(config, dtype=tensors[EMBEDDING].dtype)
    out = _save(Path(folder), config, tensors)
    if path.is_dir():
        for file in {file for pattern in TOKENIZER_FILES for file in path.glob(pattern)}:
            shutil.copyfile(file, out / file.name)
    return out


def _folder_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"model folder {str(folder)!r} has no config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json_object(generation_path) if generation_path.exists() else None
    return config_from_json(read_json_object(path), generation=generation, source=str(path))


def _settle_tied_head(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """A tied model whose file holds a head of other values is not tied, as in transformers."""
    shapes = checkpoint.shapes()
    if not config.tie_word_embeddings or HEAD not in shapes or EMBEDDING not in shapes:
        return config
    if torch.equal(checkpoint.read(HEAD), checkpoint.read(EMBEDDING)):
        return config
    warnings.warn(
        f"{checkpoint.source}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}; "
        "both are used as they are",
        stacklevel=3,
    )
    return replace(config, tie_word_embeddings=False)


def _meta_model(config: ModelConfig) -> CausalLM:
    """Shapes without memory. No backend is needed, since it never runs."""
    backend: AttentionBackend = None  # type: ignore[assignment]
    return model_class(config)(config, dtype=config.dtype, device="meta", attention_backend=backend)


def _save(folder: Path, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Path:
    save_tensors(folder, tensors)
    content = config_to_json(config)
    generation = {name: content[name] for name in ("bos_token_id", "eos_token_id")}
    for name, value in (("config.json", content), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2), encoding="utf-8")
    return folder


def _listed(names: list[str]) -> str:
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
