"""A model of an engine before and while it loads: what its files say, and its dtype."""

from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.config import DTYPES, EngineConfig
from specdec.graph_report import start_progress
from specdec.heads import HeadCheckpoint
from specdec.tokenizer import Tokenizer, load_tokenizer
from specdec.verifier.attention.base import AttentionBackend
from specdec.verifier.hub import resolve_model
from specdec.verifier.loading import load_any_model, read_config
from specdec.verifier.made import MadeModel
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.parallel.sharding import WHOLE, TensorParallel


@dataclass(frozen=True, slots=True)
class Source:
    """A model before its weights are loaded: what its files say."""

    model: str | Path | CausalLM | MadeModel | None
    config: ModelConfig
    tokenizer: Tokenizer | None
    head: HeadCheckpoint | None = None  # not a model: a head for the target

    @property
    def vocab_size(self) -> int:
        """Ids that may be emitted: rows that no token belongs to are padding."""
        known = None if self.tokenizer is None else self.tokenizer.vocab_size
        if isinstance(self.model, CausalLM):
            known = self.model.num_known_ids
        rows = self.config.vocab_size
        return rows if known is None else min(rows, known)


def read_source(model: str | Path | CausalLM | MadeModel | None, config: EngineConfig) -> Source:
    if isinstance(model, CausalLM | MadeModel):
        return Source(model, model.config, None)
    path = resolve_model(model)
    model_config = read_config(path, implementation=config.model_impl)
    return Source(model, model_config, load_tokenizer(path))


def check_device(field: str, model: object, device: torch.device) -> None:
    """Raise ValueError where a model that is loaded already lies on another device."""
    if isinstance(model, CausalLM):
        # "cuda" is the current one of several.
        own = model.device
        index = device.index if device.index is not None or own.type != "cuda" else own.index
        if own != torch.device(device.type, index):
            raise ValueError(f"{field}: its weights are on {own}, the engine's device is {device}")


def load_source(
    source: Source,
    config: EngineConfig,
    backend: AttentionBackend,
    device: torch.device,
    tp: TensorParallel = WHOLE,
) -> LanguageModel:
    """``tp``: which part of the model to load; one that is loaded already is whole."""
    if isinstance(source.model, CausalLM):
        return source.model
    dtype = dtype_of(config, source, device)
    if isinstance(source.model, MadeModel):
        return source.model.make(dtype=dtype, device=device, attention_backend=backend, tp=tp)
    with start_progress("loading") as progress:
        return load_any_model(
            source.model,
            source.config,
            dtype=dtype,
            device=device,
            attention_backend=backend,
            progress=progress,
            tp=tp,
        )


def dtype_of(config: EngineConfig, source: Source, device: torch.device) -> torch.dtype:
    if isinstance(source.model, CausalLM):
        return source.model.dtype
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return torch.float32 if device.type == "cpu" else source.config.dtype
