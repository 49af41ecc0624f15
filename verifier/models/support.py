"""What the layers of a model ask of an engine, beside their weights and keys and values."""

from specdec.verifier.attention.base import AttentionBackend
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.models.config import ModelConfig, UnsupportedModelError
from specdec.verifier.modes import AttentionCGSupport
from specdec.verifier.recurrent import state_bytes


def graph_support(config: ModelConfig, backend: AttentionBackend) -> AttentionCGSupport:
    """Which batches a graph can hold: the least that any layer supports."""
    if config.num_attention_layers == 0:
        return config.cg_support
    return min(backend.cg_support, config.cg_support)


def check_compilation(config: ModelConfig, is_compiled: bool) -> None:
    """Raise UnsupportedModelError for a model that is asked to be cut in pieces and cannot be."""
    if is_compiled and config.num_recurrent_layers:
        raise UnsupportedModelError(
            f"compilation_config: {config.architecture} is not compiled, for its recurrent layers"
        )


def model_state_bytes(model: LanguageModel, max_num_seqs: int, run_length: int) -> int:
    """Bytes of a model's recurrent states for so many requests; 0 where it has none."""
    config = model.config
    if config.mamba is None:
        return 0
    return state_bytes(
        config.mamba, config.num_recurrent_layers, max_num_seqs, run_length, model.dtype
    )
