"""Which part of each weight a rank holds.

Projections into heads and features are cut by rows, those out of them by columns, embedding and
head by rows of the vocabulary; everything else is whole on every rank. Source: Shoeybi et al.,
"Megatron-LM", 2019.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from specdec.verifier.models.config import ModelConfig

# Rows of a vocabulary's part are a multiple of this, so that the matrix products find them aligned.
_VOCAB_ALIGNMENT = 8
_BY_QUERY_HEADS = ("q_proj",)
_BY_KV_HEADS = ("k_proj", "v_proj")
_BY_FEATURES = ("gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")
_BY_VOCABULARY = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A rank's place among those that hold one model together."""

    rank: int = 0
    size: int = 1
    group: str = ""  # what the collectives know the ranks by


WHOLE = TensorParallel()


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a checkpoint tensor: ``length`` of dimension ``dim`` from ``start`` on."""

    dim: int
    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """The part, a view."""
        return tensor.narrow(self.dim, self.start, self.length)


def check_shardable(field: str, config: ModelConfig, size: int) -> None:
    """Raise ValueError naming ``field`` and what of a model cannot be cut into ``size`` parts."""
    reason = None
    if size == 1:
        return
    if config.implementation != "specdec":
        reason = "models of model_impl='transformers' are not cut"
    elif config.moe is not None or config.latent is not None:
        reason = f"{config.architecture}: experts and latent attention are not cut"
    elif config.mamba is not None:
        reason = f"{config.architecture}: recurrent layers are not cut"
    elif config.num_heads % size:
        reason = f"num_attention_heads ({config.num_heads}) is not a multiple of it"
    elif config.num_kv_heads % size and size % config.num_kv_heads:
        reason = f"num_key_value_heads ({config.num_kv_heads}) is no multiple of it, nor a divisor"
    elif config.intermediate_size % size:
        reason = f"intermediate_size ({config.intermediate_size}) is not a multiple of it"
    if reason is not None:
        raise ValueError(f"{field}={size}: {reason}")


def local_config(config: ModelConfig, tp: TensorParallel) -> ModelConfig:
    """The shape of one rank's layers. Fewer key/value heads than ranks are held by several."""
    if tp.size == 1:
        return config
    return replace(
        config,
        num_heads=config.num_heads // tp.size,
        num_kv_heads=max(1, config.num_kv_heads // tp.size),
        intermediate_size=config.intermediate_size // tp.size,
    )


def vocab_part(vocab_size: int, tp: TensorParallel) -> range:
    """The ids whose rows a rank holds; the last ranks may have fewer, or none."""
    rows = padded_vocab_part(vocab_size, tp)
    first = min(tp.rank * rows, vocab_size)
    return range(first, min(first + rows, vocab_size))


def padded_vocab_part(vocab_size: int, tp: TensorParallel) -> int:
    """Rows of every rank's part of the vocabulary, padding included."""
    if tp.size == 1:
        return vocab_size
    return -(-vocab_size // (tp.size * _VOCAB_ALIGNMENT)) * _VOCAB_ALIGNMENT


def cut_of(name: str, config: ModelConfig, tp: TensorParallel) -> Cut | None:
    """A rank's part of the checkpoint tensor ``name`` of a model; None for all of it."""
    if tp.size == 1:
        return None
    *_, layer, kind = f".{name}".split(".")
    if layer in _BY_VOCABULARY:
        ids = vocab_part(config.vocab_size, tp)
        return Cut(0, ids.start, len(ids))
    if layer in _BY_COLUMNS:
        if kind == "bias":
            return None
        columns = config.q_size if layer == "o_proj" else config.intermediate_size
        part = columns // tp.size
        return Cut(1, tp.rank * part, part)
    if layer in _BY_QUERY_HEADS:
        part = config.q_size // tp.size
    elif layer in _BY_FEATURES:
        part = config.intermediate_size // tp.size
    elif layer in _BY_KV_HEADS:
        heads = max(1, config.num_kv_heads // tp.size)
        first = tp.rank * config.num_kv_heads // tp.size
        return Cut(0, first * config.head_size, heads * config.head_size)
    else:
        return None
    return Cut(0, tp.rank * part, part)
