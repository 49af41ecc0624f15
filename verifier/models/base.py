"""What the engine asks of a language model, whoever implements it."""

from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.verifier.attention.base import AttentionBackend, AttentionMetadata
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.config import ModelConfig


class LanguageModel(Protocol):
    """A decoder-only language model over a paged KV cache, for inference."""

    config: ModelConfig
    local_config: ModelConfig  # of what this rank holds; the same where there is one rank
    attention_backend: AttentionBackend

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def parameters(self) -> Any: ...

    def forward(
        self,
        input_ids: Tensor,  # [T] int64, within the vocabulary
        positions: Tensor,  # [T] int64, within the context
        kv_cache: KVCache,
        attn: AttentionMetadata,
        *,
        num_layers: int | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [T, hidden]; writes the tokens' keys and values."""

    def compute_logits(self, hidden: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """hidden [N, hidden] -> [N, vocab] float32."""

    def greedy_tokens(
        self,
        hidden: Tensor,
        vocab_size: int | None = None,
        adapter_slots: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The argmax of ``compute_logits`` over the ids below ``vocab_size``, [N] int64, and
        whether none of those logits is NaN or infinite at the top, [N] bool."""

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of all layers' keys and values for one block."""

    def make_kv_cache(
        self, num_blocks: int, block_size: int, *, max_num_seqs: int = 1, run_length: int = 1
    ) -> KVCache:
        """A cache of this model's shape and dtype, beside its weights.

        max_num_seqs: rows of recurrent states, where layers have them.
        run_length: tokens at the end of a text that may be taken back: 1 + k.
        """
