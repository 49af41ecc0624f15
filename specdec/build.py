"""From an engine's fields to its parts: files are checked first, then weights, memory, graphs."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specdec.adapters import make_slots, read_adapters
from specdec.build_drafter import (
    NO_FEATURES,
    check_draft,
    heavy_drafter,
    light_drafter,
    read_draft_lora,
)
from specdec.config import EngineConfig
from specdec.drafters.adaptive import widths_up_to
from specdec.drafters.base import Drafter
from specdec.drafters.combined import CombinedDrafter, make_lookup, split_names
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.shipped import auto_draft
from specdec.drafters.step_costs import StepCosts
from specdec.graph_report import start_up_line
from specdec.graph_setup import make_dispatcher, make_flat_model, resolve_mode
from specdec.intake import Intake
from specdec.kernels.linear import configure_exact_blas
from specdec.kv_blocks import kv_blocks
from specdec.lora import LoraManager
from specdec.parallel.ranks import OneRank, Ranks
from specdec.parallel.refusals import check_parallel
from specdec.rounds import RoundsChoice, make_rounds_choice
from specdec.runner import Runner
from specdec.scheduler import Scheduler
from specdec.sources import Source, check_device, dtype_of, load_source, read_source
from specdec.start_up import capture_and_time
from specdec.step import DecodeStep
from specdec.tokenizer import Tokenizer
from specdec.verifier.attention.select import BackendChoice, choose_backend, default_block_size
from specdec.verifier.kv_cache import BlockPool
from specdec.verifier.loading import check_weights, with_features
from specdec.verifier.made import MadeModel
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.models.support import check_compilation, graph_support
from specdec.verifier.parallel.sharding import WHOLE
from specdec.verifier.state import DecodeState

logger = logging.getLogger(__name__)

DEFAULT_MAX_NUM_SEQS = {"cpu": 8, "cuda": 64}


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
    costs: StepCosts | None  # of decode steps, where k="auto"
    attention: BackendChoice  # of the target
    rounds: RoundsChoice
    ranks: Ranks


def build(
    model: str | Path | CausalLM | MadeModel | None,
    draft: str | Path | CausalLM | MadeModel | Drafter | None,
    k: int | str,
    config: EngineConfig,
    join: Callable[[], Ranks] | None = None,
) -> Parts:
    """Check everything that files can tell, then load, allocate and capture.

    ``join``: meets the ranks that another process has started; by default this one starts them.
    """
    with _ended_on_error() as started:
        return _build(model, draft, k, config, join, started)


def _build(
    model: str | Path | CausalLM | MadeModel | None,
    draft: str | Path | CausalLM | MadeModel | Drafter | None,
    k: int | str,
    config: EngineConfig,
    join: Callable[[], Ranks] | None,
    started: list[Ranks],
) -> Parts:
    """``started``: is told the ranks, which end where what follows fails."""
    device, asked = config.torch_device, draft
    check_device("model", model, device)
    check_device("draft", draft, device)
    target_source = read_source(model, config)
    check_compilation(target_source.config, config.compilation.is_compiled)
    if draft == "auto":
        draft = auto_draft(target_source.config, target_source.tokenizer)
    lookup, draft = split_names(draft)
    draft_source = check_draft(draft, target_source, config)
    if join is None:
        check_parallel(config, target_source, draft, draft_source)
    if config.simulated_acceptance is not None and draft is None:
        raise ValueError("simulated_acceptance needs a drafter, whose cost is part of a step")
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
    query_lens: Sequence[int] = [1 + k for k in limits.allowed_k]
    supports = [graph_support(target_source.config, backend)]
    draft_backend, own = backend, config
    if draft_source is not None:
        # A draft keeps its own dtype on a GPU: cast to the target's it may overflow.
        own = replace(config, dtype="auto") if device.type == "cuda" else config
        if draft_source.head is not None:
            # It reads the target's hidden states as they are.
            own = replace(config, dtype=str(dtype_of(config, target_source, device))[6:])
        draft_backend = _choose_backend(own, draft_source, limits, device).backend
        supports.append(graph_support(draft_source.config, draft_backend))
    mode, query_lens, downgrade = resolve_mode(config, min(supports), query_lens)

    lora = read_adapters(config.lora, target_source.config, config.max_lora_rank)
    draft_lora = read_draft_lora(config, draft_source)

    for each in (target_source, draft_source):
        # Missing, misshapen or damaged tensors are refused before either model takes memory.
        if each is None or each.head is not None:
            continue
        if not isinstance(each.model, CausalLM | MadeModel):
            check_weights(each.model, each.config)
    ranks = join() if join is not None else _start_ranks(model, asked, k, config)
    started.append(ranks)
    draft_tp = WHOLE if config.draft_tensor_parallel_size == 1 else ranks.tp
    target = load_source(target_source, config, backend, device, ranks.tp)
    drafter = heavy_drafter(
        draft, draft_source, target, own, draft_backend, limits.vocab_size, draft_tp
    )
    if drafter is not None and drafter.feature_layers:
        if not isinstance(target, CausalLM):
            raise ValueError(f"drafter {drafter.name!r}: {NO_FEATURES}")
        target = with_features(target, drafter.feature_layers)
    adapters = None
    if config.lora_at_start:
        draft_model = None
        assert isinstance(target, CausalLM)
        if config.draft_lora is not None and isinstance(drafter, DraftModelDrafter):
            drafter.uses_adapters = True
            assert isinstance(drafter.model, CausalLM)
            draft_model = drafter.model
        draft_slots = None
        if draft_model is not None:
            draft_slots = make_slots(config, draft_model, draft_lora.values())
        adapters = ranks.make_memory(make_slots(config, target, lora.values()), draft_slots)
    fitting_blocks = kv_blocks(
        config,
        target,
        drafter,
        limits.max_model_len,
        limits.max_num_seqs,
        limits.block_size,
        limits.max_k,
    )
    num_blocks = -ranks.largest(-fitting_blocks)
    state = DecodeState(
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        vocab_size=limits.vocab_size,
        device=device,
    )
    kv_cache = target.make_kv_cache(
        num_blocks,
        limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        run_length=1 + limits.max_k,
    )
    if drafter is None and draft is not None:
        drafter = light_drafter(draft, target, kv_cache, config, limits.vocab_size)
    if lookup is not None:
        assert drafter is not None
        drafter = CombinedDrafter(make_lookup(lookup, config.suffix_history), drafter)
    if drafter is not None:
        drafter.attach(state, num_blocks, limits.max_k)
    is_recurrent = target.config.num_recurrent_layers > 0
    is_recurrent |= drafter is not None and drafter.is_recurrent
    if is_recurrent and config.enable_prefix_caching:
        logger.info("enable_prefix_caching: off, for recurrent states are not kept by block")
    rounds = make_rounds_choice(config, drafter, mode, device)
    dispatcher = make_dispatcher(config, state, mode, query_lens, downgrade, rounds.counts)
    flat = make_flat_model(config, target, kv_cache, state, dispatcher)
    step = DecodeStep(
        model=target,
        kv_cache=kv_cache,
        state=state,
        drafter=drafter,
        vocab_size=limits.vocab_size,
        max_k=limits.max_k,
        forward=flat.forward,
        simulated_acceptance=config.simulated_acceptance,
    )
    runner = ranks.make_runner(
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
        rounds_at_start=rounds.is_asked_for,
        largest=ranks.largest,
    )
    scheduler = Scheduler(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=limits.block_size,
        pool=BlockPool(num_blocks),
        allowed_k=limits.allowed_k,
        draft_lag=drafter.kv_lag if drafter is not None else 0,
        prefix_caching=config.enable_prefix_caching and not is_recurrent,
        lookahead=drafter.lookahead if drafter is not None else 0,
        graphed_tokens=dispatcher.largest_mixed,
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
        simulates=config.simulated_acceptance is not None,
    )
    manager = LoraManager(config, runner, scheduler, intake, ranks)
    if adapters is not None:
        manager.start(adapters, lora, draft_lora)
    capture_started = time.perf_counter()
    costs = capture_and_time(
        runner,
        rounds,
        eager=config.capture == "eager",
        adapts=adapts,
        num_adapter_slots=adapters.slots.max_loras if adapters is not None else 0,
        largest=ranks.largest,
    )
    capture_seconds = time.perf_counter() - capture_started
    ranks.begin()
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
        costs=costs,
        attention=attention,
        rounds=rounds,
        ranks=ranks,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limits:
    """The sizes that an engine is built for."""

    max_k: int
    allowed_k: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    block_size: int
    vocab_size: int  # ids that may be emitted


def _limits(config: EngineConfig, source: Source, k: int | str, device: torch.device) -> _Limits:
    if k and max(config.extra_k, default=0) > (config.k_max if k == "auto" else int(k)):
        bound = f"k_max, {config.k_max}" if k == "auto" else f"k, {k}"
        raise ValueError(f"extra_k {list(config.extra_k)} must not be above {bound}")
    widths = widths_up_to(config.k_max) if k == "auto" else [int(k)]
    max_k = max(widths)
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
        vocab_size=source.vocab_size,
    )


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    context = model_config.max_position_embeddings
    if config.max_model_len is None:
        return context
    if config.max_model_len > context:
        raise ValueError(
            f"max_model_len ({config.max_model_len}) is above the model's context ({context})"
        )
    return config.max_model_len


def _choose_backend(
    config: EngineConfig, source: Source, limits: _Limits, device: torch.device
) -> BackendChoice:
    if isinstance(source.model, CausalLM):
        backend = source.model.attention_backend
        return BackendChoice(backend=backend, asked=backend.name, reason="the model came with it")
    return choose_backend(
        config.attention_backend,
        head_size=source.config.head_size,
        dtype=dtype_of(config, source, device),
        block_size=limits.block_size,
        device=device,
        sliding_window=source.config.sliding_window,
        soft_cap=source.config.attention_soft_cap,
        latent_size=source.config.latent_size,
    )


def _start_ranks(
    model: str | Path | CausalLM | MadeModel | None,
    draft: object,
    k: int | str,
    config: EngineConfig,
) -> Ranks:
    """The ranks of an engine, in this process the first."""
    if config.tensor_parallel_size == 1:
        return OneRank()
    from specdec.parallel.leader import LeaderRanks
    from specdec.parallel.spec import RankSpec

    assert not isinstance(model, CausalLM)
    assert draft is None or isinstance(draft, str | Path | MadeModel)
    return LeaderRanks(
        RankSpec(
            rank=0,
            size=config.tensor_parallel_size,
            port=0,
            model=model,
            draft=draft,
            k=k,
            config=config,
            num_threads=torch.get_num_threads(),
        )
    )


@contextmanager
def _ended_on_error() -> Iterator[list[Ranks]]:
    """Where building fails no rank that was started is left behind; one that is gone is named."""
    started: list[Ranks] = []
    try:
        yield started
    except BaseException as error:
        explained = error
        for ranks in started:
            explained = ranks.explain(error)
            ranks.close()
        if explained is error:
            raise
        raise explained from error
