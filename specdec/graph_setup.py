"""The parts of an engine that its graphs start from: keys, memory pool, and the model on graphs."""

from collections.abc import Sequence

from specdec.config import EngineConfig
from specdec.verifier.dispatcher import CudagraphDispatcher
from specdec.verifier.flat_model import FlatModel
from specdec.verifier.graph import GraphPool
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.modes import (
    AttentionCGSupport,
    CUDAGraphMode,
    Downgrade,
    resolve_uniform_query_lens,
)
from specdec.verifier.state import DecodeState

# Off a GPU a graph of a batch with prompts saves nothing, and its recording keeps what every layer
# gives.
MAX_MIXED_TOKENS_OFF_GPU = 64


def resolve_mode(
    config: EngineConfig, support: AttentionCGSupport, query_lens: Sequence[int]
) -> tuple[CUDAGraphMode, Sequence[int], Downgrade]:
    """The mode to serve, the query lengths with FULL graphs or else all, and what is less than
    was asked for.
    """
    has_pieces = config.compilation.no_piecewise is None and config.model_impl == "specdec"
    asked = (config.graph_mode, support, query_lens, has_pieces)
    mode, full_lens = resolve_uniform_query_lens(*asked)
    return mode, full_lens or query_lens, Downgrade.of(*asked)


def make_dispatcher(
    config: EngineConfig,
    state: DecodeState,
    mode: CUDAGraphMode,
    query_lens: Sequence[int],
    downgrade: Downgrade,
    rounds: Sequence[int] = (),
) -> CudagraphDispatcher:
    """The keys of the decode pass and of batches with prompts.

    Raises ValueError where the config's sizes leave out the widest batch.
    """
    most = config.max_num_batched_tokens
    if state.device.type != "cuda":
        widest = state.max_num_seqs * max(query_lens)
        most = min(most, max(widest, MAX_MIXED_TOKENS_OFF_GPU))
    dispatcher = CudagraphDispatcher(max_num_seqs=state.max_num_seqs)
    dispatcher.initialize_cudagraph_keys(
        mode,
        capture_sizes=config.capture_sizes,
        uniform_query_lens=tuple(query_lens),
        uniform_request_counts=config.uniform_request_counts,
        max_num_batched_tokens=most,
        rounds=rounds,
        downgrade=downgrade,
    )
    return dispatcher


def make_flat_model(
    config: EngineConfig,
    model: LanguageModel,
    kv_cache: KVCache,
    state: DecodeState,
    dispatcher: CudagraphDispatcher,
) -> FlatModel:
    """The target on graphs of its own, as large as the dispatcher's largest key."""
    sizes = [key.num_tokens for _, key in dispatcher.capture_list() if not key.uniform]
    return FlatModel(
        model,
        kv_cache,
        GraphPool(state.device),
        max_num_tokens=max(sizes, default=1),
        max_num_seqs=state.max_num_seqs,
        table_width=state.block_table.shape[1],
        compilation=config.compilation,
        debug=config.debug,
        verify=config.verify_graphs,
    )
