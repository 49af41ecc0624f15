"""From an engine's fields to its parts: files are checked first, then weights, memory, graphs."""

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specdec.adapters import make_table, read_adapters
from specdec.config import DTYPES, EngineConfig
from specdec.drafters.adaptive import AdaptiveK, widths_up_to
from specdec.drafters.base import Drafter, DrafterLike
from specdec.drafters.combined import CombinedDrafter, make_lookup, split_names
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.layer_skip import LayerSkipDrafter, skipped_layers
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.graph_report import capture_progress, start_up_line
from specdec.graph_setup import make_dispatcher, make_flat_model
from specdec.intake import Intake
from specdec.kernels.linear import configure_exact_blas
from specdec.kv_blocks import kv_blocks
from specdec.lora import LoraManager
from specdec.runner import Runner
from specdec.scheduler import Scheduler
from specdec.step import DecodeStep
from specdec.tokenizer import Tokenizer, compare_tokenizers, load_tokenizer
from specdec.verifier.attention.base import AttentionBackend
from specdec.verifier.attention.select import BackendChoice, choose_backend, default_block_size
from specdec.verifier.hub import resolve_model
from specdec.verifier.kv_cache import BlockPool, KVCache
from specdec.verifier.loading import check_weights, load_any_model, read_config
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.modes import resolve_uniform_query_lens
from specdec.verifier.peft_format import AdapterWeights
from specdec.verifier.state import DecodeState

logger = logging.getLogger(__name__)

DEFAULT_MAX_NUM_SEQS = {"cpu": 8, "cuda": 64}

DRAFTERS = "auto, ngram, suffix, layer_skip:N"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What an engine is made of."""

    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    drafter: Drafter | None
    runner: Runner
    scheduler: Scheduler
    intake: Intake
    lora: LoraManager
    max_k: int
    max_model_len: int
    capture_seconds: float
    adaptive: AdaptiveK | None
    attention: BackendChoice  # of the target


def build(
    model: str | Path | CausalLM | None,
    draft: str | Path | CausalLM | Drafter | None,
    k: int | str,
    config: EngineConfig,
) -> Parts:
    """Check everything that files can tell, then load, allocate and capture."""
    device = config.torch_device
    target_source = _read(model, config)
    draft = "ngram" if draft == "auto" else draft
    lookup, draft = split_names(draft)
    draft_source = _check_draft(draft, target_source, config)
    limits = _limits(config, target_source, k if draft is not None else 0, device)
    adapts = k == "auto" and draft is not None
    if device.type == "cuda":
        configure_exact_blas()

    attention = _choose_backend(config, target_source, limits, device)
    backend = attention.backend
    if config.exact is True and not backend.batch_invariant:
        raise ValueError(
            f"exact=True: attention backend {backend.name!r} is not batch-invariant on {device}"
        )
    query_lens = [1 + k for k in limits.allowed_k]
    supports, draft_backend, own = [backend.cg_support], backend, config
    if draft_source is not None:
        # A draft keeps its own dtype on a GPU: cast to the target's it may overflow.
        own = replace(config, dtype="auto") if device.type == "cuda" else config
        draft_backend = _choose_backend(own, draft_source, limits, device).backend
        supports.append(draft_backend.cg_support)
    mode, full_lens = resolve_uniform_query_lens(
        config.graph_mode,
        min(supports),
        query_lens,
        piecewise_available=(
            config.compilation.no_piecewise is None and config.model_impl == "specdec"
        ),
    )

    lora = read_adapters(config.lora, target_source.config, config.max_lora_rank)
    draft_lora = _read_draft_lora(config, draft_source)

    for each in (target_source, draft_source):
        # Missing, misshapen or damaged tensors are refused before either model takes memory.
        if each is not None and not isinstance(each.model, CausalLM):
            check_weights(each.model, each.config)
    target = _load(target_source, config, backend, device)
    drafter = _heavy_drafter(draft, draft_source, own, draft_backend, limits, device)
    adapters = None
    if config.lora_at_start:
        draft_model = None
        assert isinstance(target, CausalLM)
        if config.draft_lora is not None and isinstance(drafter, DraftModelDrafter):
            drafter.uses_adapters = True
            assert isinstance(drafter.model, CausalLM)
            draft_model = drafter.model
        adapters = make_table(config, target, lora.values(), draft_model, draft_lora.values())
    num_blocks = kv_blocks(
        config, target, drafter, limits.max_model_len, limits.max_num_seqs, limits.block_size
    )
    state = DecodeState(
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        vocab_size=limits.vocab_size,
        device=device,
    )
    kv_cache = target.make_kv_cache(num_blocks, limits.block_size)
    if drafter is None and draft is not None:
        drafter = _light_drafter(draft, target, kv_cache, config, limits)
    if lookup is not None:
        assert drafter is not None
        drafter = CombinedDrafter(make_lookup(lookup, config.suffix_history), drafter)
    if drafter is not None:
        drafter.attach(state, num_blocks, limits.max_k)
    query_lens = list(full_lens) or query_lens
    dispatcher = make_dispatcher(config, state, mode, query_lens)
    flat = make_flat_model(config, target, kv_cache, state, dispatcher)
    step = DecodeStep(
        model=target,
        kv_cache=kv_cache,
        state=state,
        drafter=drafter,
        vocab_size=limits.vocab_size,
        max_k=limits.max_k,
        forward=flat.forward,
    )
    runner = Runner(
        step,
        flat,
        dispatcher,
        mode=mode,
        query_lens=query_lens,
        capture_sizes=config.capture_sizes,
        request_counts=config.uniform_request_counts,
        memory_limit=config.graph_memory_limit,
        debug=config.debug,
        verify=config.verify_graphs,
    )
    scheduler = Scheduler(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=limits.block_size,
        pool=BlockPool(num_blocks),
        allowed_k=limits.allowed_k,
        draft_lag=1 if drafter is not None and drafter.catchup_width else 0,
        prefix_caching=config.enable_prefix_caching,
    )
    intake = Intake(
        tokenizer=target_source.tokenizer,
        vocab_size=limits.vocab_size,
        eos_token_ids=target.config.eos_token_ids,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        num_kv_blocks=num_blocks,
        max_k=limits.max_k,
        speculates=drafter is not None,
        adapts=adapts,
        acceptance=config.acceptance,
    )
    manager = LoraManager(config, runner, scheduler, intake)
    if adapters is not None:
        manager.start(adapters, lora, draft_lora)
    started = time.perf_counter()
    if config.capture == "eager":
        with capture_progress() as progress:
            runner.capture_all(progress)
    capture_seconds = time.perf_counter() - started
    logger.info(start_up_line(runner.graph_table(), capture_seconds))
    return Parts(
        config=config,
        model_config=target.config,
        tokenizer=target_source.tokenizer,
        drafter=drafter,
        runner=runner,
        scheduler=scheduler,
        intake=intake,
        lora=manager,
        max_k=limits.max_k,
        max_model_len=limits.max_model_len,
        capture_seconds=capture_seconds,
        adaptive=AdaptiveK(runner.decode_costs()) if adapts else None,
        attention=attention,
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """A model before its weights are loaded: what its files say."""

    model: str | Path | CausalLM | None
    config: ModelConfig
    tokenizer: Tokenizer | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limits:
    """The sizes that an engine is built for."""

    max_k: int
    allowed_k: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    block_size: int
    vocab_size: int  # ids that may be emitted


def _read(model: str | Path | CausalLM | None, config: EngineConfig) -> _Source:
    if isinstance(model, CausalLM):
        return _Source(model, model.config, None)
    path = resolve_model(model)
    model_config = read_config(path, implementation=config.model_impl)
    return _Source(model, model_config, load_tokenizer(path))


def _limits(config: EngineConfig, source: _Source, k: int | str, device: torch.device) -> _Limits:
    if k and max(config.extra_k, default=0) > (config.k_max if k == "auto" else int(k)):
        raise ValueError(f"extra_k {list(config.extra_k)} must not be above k, {k}")
    widths = widths_up_to(config.k_max) if k == "auto" else [int(k)]
    max_k = max(widths)
    vocab_size = source.config.vocab_size
    if source.tokenizer is not None:
        vocab_size = min(vocab_size, source.tokenizer.vocab_size)
    if config.max_num_batched_tokens < 1 + max_k:
        raise ValueError(
            f"max_num_batched_tokens ({config.max_num_batched_tokens}) must hold one row of "
            f"1 + k = {1 + max_k} tokens"
        )
    block_size = config.kv_block_size
    attention = config.attention_backend
    if isinstance(source.model, CausalLM):
        attention = source.model.attention_backend.name
    return _Limits(
        max_k=max_k,
        allowed_k=tuple(sorted({0, *widths, *(k for k in config.extra_k if k <= max_k)})),
        max_model_len=_max_model_len(config, source.config),
        max_num_seqs=config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device.type],
        block_size=block_size if isinstance(block_size, int) else default_block_size(attention),
        vocab_size=vocab_size,
    )


def _check_draft(
    draft: str | Path | CausalLM | Drafter | None, target: _Source, config: EngineConfig
) -> _Source | None:
    """Refuse a drafter that cannot work, from files alone. A draft model's files, or None."""
    if draft is None or draft in ("ngram", "suffix"):
        return None
    if isinstance(draft, CausalLM):
        return _read(draft, config)
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
    if text.startswith("eagle:"):
        raise ValueError(f"draft={text!r} is not supported yet")
    try:
        source = _read(text, config)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"draft {text!r} is none of {DRAFTERS}, and {error}") from error
    difference = compare_tokenizers(target.tokenizer, source.tokenizer)
    if difference is not None:
        raise ValueError(f"draft {text!r} has another tokenizer than the target: {difference}")
    return source


def _read_draft_lora(config: EngineConfig, draft: _Source | None) -> dict[str, AdapterWeights]:
    """The draft model's adapters. Raises ValueError where there is no model to adapt."""
    if config.draft_lora is None:
        return {}
    if draft is None:
        raise ValueError("draft_lora: only a draft model can have adapters of its own")
    return read_adapters(config.draft_lora, draft.config, config.max_lora_rank)


def _load(
    source: _Source, config: EngineConfig, backend: AttentionBackend, device: torch.device
) -> LanguageModel:
    if isinstance(source.model, CausalLM):
        return source.model
    return load_any_model(
        source.model,
        source.config,
        dtype=_dtype(config, source, device),
        device=device,
        attention_backend=backend,
    )


def _heavy_drafter(
    draft: str | Path | CausalLM | Drafter | None,
    source: _Source | None,
    config: EngineConfig,
    backend: AttentionBackend,
    limits: _Limits,
    device: torch.device,
) -> Drafter | None:
    """A drafter that brings weights or an object of the user's own; None for the others."""
    if source is None:
        if draft is None or isinstance(draft, str | Path | CausalLM):
            return None
        return draft if isinstance(draft, Drafter) else DrafterLike(draft)
    model = _load(source, config, backend, device)
    return DraftModelDrafter(model, vocab_size=limits.vocab_size)


def _light_drafter(
    draft: str | Path | CausalLM | Drafter,
    target: LanguageModel,
    kv_cache: KVCache,
    config: EngineConfig,
    limits: _Limits,
) -> Drafter:
    if draft == "ngram":
        return NgramDrafter()
    if draft == "suffix":
        return SuffixDrafter(config.suffix_history)
    num_layers = skipped_layers(str(draft), target.config.num_layers)
    return LayerSkipDrafter(target, kv_cache, num_layers=num_layers, vocab_size=limits.vocab_size)


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    context = model_config.max_position_embeddings
    if config.max_model_len is None:
        return context
    if config.max_model_len > context:
        raise ValueError(
            f"max_model_len ({config.max_model_len}) is above the model's context ({context})"
        )
    return config.max_model_len


def _dtype(config: EngineConfig, source: _Source, device: torch.device) -> torch.dtype:
    if isinstance(source.model, CausalLM):
        return source.model.dtype
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return torch.float32 if device.type == "cpu" else source.config.dtype


def _choose_backend(
    config: EngineConfig, source: _Source, limits: _Limits, device: torch.device
) -> BackendChoice:
    if isinstance(source.model, CausalLM):
        backend = source.model.attention_backend
        return BackendChoice(backend=backend, asked=backend.name, reason="the model came with it")
    return choose_backend(
        config.attention_backend,
        head_size=source.config.head_size,
        dtype=_dtype(config, source, device),
        block_size=limits.block_size,
        device=device,
        sliding_window=source.config.sliding_window,
        soft_cap=source.config.attention_soft_cap,
        latent_size=source.config.latent_size,
    )
