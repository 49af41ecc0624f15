"""From ``draft`` to a drafter: what files tell is checked first, weights load after the target."""

from pathlib import Path

from specdec.adapters import read_adapters
from specdec.config import EngineConfig
from specdec.drafters.base import Drafter, DrafterLike
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.layer_skip import LayerSkipDrafter, skipped_layers
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.heads import load_head, open_head
from specdec.sources import Source, load_source, read_source
from specdec.tokenizer import compare_tokenizers
from specdec.verifier.attention.base import AttentionBackend
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.made import MadeModel
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.parallel.sharding import WHOLE, TensorParallel
from specdec.verifier.peft_format import AdapterWeights

NO_FEATURES = "it reads the target's hidden states, which model_impl='transformers' does not give"
DRAFTERS = "auto, ngram, suffix, layer_skip:N, eagle:PATH, medusa:PATH, mtp"


def check_draft(
    draft: str | Path | CausalLM | MadeModel | Drafter | None,
    target: Source,
    config: EngineConfig,
) -> Source | None:
    """Refuse a drafter that cannot work, from files alone. A draft model's files, or None."""
    if draft is None or draft in ("ngram", "suffix"):
        return None
    if isinstance(draft, CausalLM | MadeModel):
        return read_source(draft, config)
    if not isinstance(draft, str | Path):
        if isinstance(draft, type) or not callable(getattr(draft, "propose", None)):
            raise TypeError(f"draft must be None, a string, a path or a Drafter, got {draft!r}")
        return None
    text = str(draft)
    if text.startswith("layer_skip"):
        skipped_layers(text, target.config.num_layers)
        return None
    if not text or text == "none":
        raise ValueError(f"draft={text!r}: pass None for no drafter, or one of {DRAFTERS}")
    head = open_head(text, target.config, target.model)
    if head is not None:
        if target.config.implementation != "specdec":
            raise ValueError(f"draft={text!r}: {NO_FEATURES}")
        return Source(text, head[1], None, head[0])
    try:
        source = read_source(text, config)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"draft {text!r} is none of {DRAFTERS}, and {error}") from error
    difference = compare_tokenizers(target.tokenizer, source.tokenizer)
    if difference is not None:
        raise ValueError(f"draft {text!r} has another tokenizer than the target: {difference}")
    return source


def read_draft_lora(config: EngineConfig, draft: Source | None) -> dict[str, AdapterWeights]:
    """The draft model's adapters. Raises ValueError where there is no model to adapt."""
    if config.draft_lora is None:
        return {}
    if draft is None or draft.head is not None:
        raise ValueError("draft_lora: only a draft model can have adapters of its own")
    return read_adapters(config.draft_lora, draft.config, config.max_lora_rank)


def heavy_drafter(
    draft: str | Path | CausalLM | MadeModel | Drafter | None,
    source: Source | None,
    target: LanguageModel,
    config: EngineConfig,
    backend: AttentionBackend,
    vocab_size: int,
    tp: TensorParallel = WHOLE,
) -> Drafter | None:
    """A drafter that brings weights or an object of the user's own; None for the others.

    ``tp``: which part of a draft model this rank holds. A head is whole on every rank.
    """
    if source is None:
        if draft is None or isinstance(draft, str | Path | CausalLM | MadeModel):
            return None
        return draft if isinstance(draft, Drafter) else DrafterLike(draft)
    if source.head is not None:
        assert isinstance(target, CausalLM)
        return load_head(source.head, target, backend, vocab_size)
    model = load_source(source, config, backend, target.device, tp)
    return DraftModelDrafter(model, vocab_size=vocab_size)


def light_drafter(
    draft: str | Path | CausalLM | MadeModel | Drafter,
    target: LanguageModel,
    kv_cache: KVCache,
    config: EngineConfig,
    vocab_size: int,
) -> Drafter:
    if draft == "ngram":
        return NgramDrafter()
    if draft == "suffix":
        return SuffixDrafter(config.suffix_history)
    num_layers = skipped_layers(str(draft), target.config.num_layers)
    return LayerSkipDrafter(target, kv_cache, num_layers=num_layers, vocab_size=vocab_size)
