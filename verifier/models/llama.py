"""The decoder-only language model that all families share; their layers differ."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.kernels.argmax import argmax, best_of_parts, best_part
from specdec.kernels.linear import linear, linear_argmax, linear_best_part
from specdec.kernels.lora import lora_embedding_
from specdec.kernels.norm import rms_norm
from specdec.verifier.attention.base import AttentionBackend, AttentionMetadata
from specdec.verifier.attention.op import LayerAttention, OpaqueAttention, PagedAttention
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.decoder import DecoderLayer
from specdec.verifier.models.layers import Linear, empty_parameter
from specdec.verifier.models.lora import AdapterRows, LoraStack
from specdec.verifier.models.rope import cos_sin_table
from specdec.verifier.parallel.collectives import all_gather, all_reduce
from specdec.verifier.parallel.sharding import (
    WHOLE,
    TensorParallel,
    local_config,
    padded_vocab_part,
    vocab_part,
)
from specdec.verifier.recurrent import RecurrentStates


class CausalLM(nn.Module):
    """A decoder-only language model over a paged KV cache, for inference.

    Its weights are uninitialised until ``loading`` or ``random_weights`` fills them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        attention_backend: AttentionBackend,
        tp: TensorParallel = WHOLE,
    ) -> None:
        """``tp``: which part of the model this one is; hidden states are the whole model's."""
        super().__init__()
        self.config = config
        self.tp = tp
        self.local_config = local_config(config, tp)
        self.attention_backend = attention_backend
        vocabulary = padded_vocab_part(config.vocab_size, tp), config.hidden_size
        self.vocab_part = vocab_part(config.vocab_size, tp)
        self.embed_tokens = empty_parameter(*vocabulary, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(self.local_config, i, tp=tp, dtype=dtype, device=device)
            for i in range(config.num_layers)
        )
        self.norm = empty_parameter(config.hidden_size, dtype=dtype, device=device)
        # A tied head is the embedding itself, not another parameter.
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = empty_parameter(*vocabulary, dtype=dtype, device=device)
        # Hidden states that a pass gives beside its last: those after this many layers.
        self.feature_layers: tuple[int, ...] = ()
        # Ids that a tokenizer has, where whoever loaded the model knows; an engine emits no others.
        self.num_known_ids: int | None = None
        self.embed_adapters: LoraStack | None = None
        self.head_adapters: LoraStack | None = None
        context = config.max_position_embeddings
        cos_sin = cos_sin_table(config.rope, context, device)
        self.cos_sin: Tensor  # [max_position_embeddings, rotary_dim] float32
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        local = config.local_rope
        local_cos_sin = None if local is None else cos_sin_table(local, context, device)
        self.local_cos_sin: Tensor | None
        self.register_buffer("local_cos_sin", local_cos_sin, persistent=False)
        # Rounded to the dtype as the embeddings are.
        scale = config.hidden_size**0.5 if config.family.is_gemma else 1.0
        self.embedding_scale = float(torch.tensor(scale).to(dtype))

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    def first_layers(self, num_layers: int | None = None) -> list[DecoderLayer]:
        """The first ``num_layers`` layers, or all."""
        return cast(list[DecoderLayer], list(self.layers))[:num_layers]

    def forward(
        self,
        input_ids: Tensor,  # [T] int64, within the vocabulary
        positions: Tensor,  # [T] int64, within the context
        kv_cache: KVCache,
        attn: AttentionMetadata,
        *,
        num_layers: int | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [T, hidden]; writes the tokens' keys and values.

        With ``num_layers`` the model stops after that many layers, with the same final norm. A
        model with ``feature_layers`` gives them behind the hidden states (``split_features``).
        """
        attend = PagedAttention(self.attention_backend, kv_cache, attn)
        adapter_rows = None
        if attn.adapter_slots is not None:
            adapter_rows = AdapterRows(attn.adapter_slots, attn.context_lens.shape[0])
        return self.hidden_states(input_ids, positions, attend, num_layers, adapter_rows)

    def opaque_forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention_out: Tensor,  # [T, H, D], overwritten by each layer
    ) -> Tensor:
        """``forward`` with opaque attention, which reads the batch from the forward context."""
        return self.hidden_states(input_ids, positions, OpaqueAttention(attention_out))

    def opaque_lora_forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention_out: Tensor,
        adapter_slots: Tensor,  # [T] int64, -1 for rows without an adapter
        adapter_tiles: Tensor,  # int32, the rows sorted by slot: ``lora_rows.slot_tiles``
    ) -> Tensor:
        """``opaque_forward`` of rows with adapters."""
        rows = AdapterRows(adapter_slots, 0, adapter_tiles)
        attend = OpaqueAttention(attention_out)
        return self.hidden_states(input_ids, positions, attend, adapter_rows=rows)

    def hidden_states(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: LayerAttention,
        num_layers: int | None = None,
        adapter_rows: AdapterRows | None = None,
    ) -> Tensor:
        """The model itself. Written so that a trace of it holds no size and no layer's number."""
        layers = self.first_layers(num_layers)
        # The norm that follows layer i is the next layer's, or the final one.
        next_norms = [layer.input_norm for layer in layers[1:]] + [self.norm]
        residual = self.embed(input_ids, adapter_rows)
        wanted = set(self.feature_layers if num_layers is None else ())
        features = {0: residual}  # number of layers -> the residual stream after them
        if all(
            layer.is_ready(residual, self.rope_table(layer), attend, adapter_rows)
            for layer in layers
        ):
            assert isinstance(attend, PagedAttention)
            for i, layer in enumerate(layers):
                residual = layer.ready_forward(residual, positions, self.rope_table(layer), attend)
                features[i + 1] = residual
            hidden = rms_norm(residual, self.norm, *layers[-1].norm_settings)
        else:
            hidden = self.first_norm(residual)
            for i, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
                table = self.rope_table(layer)
                hidden, residual = layer(
                    hidden, residual, next_norm, positions, table, attend, adapter_rows
                )
                if i + 1 in wanted:
                    features[i + 1] = residual
        if wanted:
            # One tensor, so that every graph around the model has one output.
            return torch.cat([hidden, *(features[i] for i in self.feature_layers)], dim=-1)
        return hidden

    def split_features(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """The output of a pass of a model with ``feature_layers``, as views of its two parts.

        Returns hidden states [T, hidden], and [T, len(feature_layers) * hidden]: the residual
        stream after each of those numbers of layers, before any norm.
        """
        size = self.config.hidden_size
        return out[:, :size], out[:, size:]

    def embed(self, input_ids: Tensor, adapter_rows: AdapterRows | None = None) -> Tensor:
        """The residual stream before the first layer, [T, hidden]."""
        ids, is_elsewhere = input_ids, None
        if self.tp.size > 1:
            ids = input_ids - self.vocab_part.start
            is_elsewhere = (ids < 0) | (ids >= len(self.vocab_part))
            ids = ids.masked_fill(is_elsewhere, 0)
        residual = F.embedding(ids, self.embed_tokens)
        if adapter_rows is not None and self.embed_adapters is not None:
            a, b = self.embed_adapters.a, self.embed_adapters.b
            residual = lora_embedding_(residual, ids, a, b, adapter_rows.slots)
        if is_elsewhere is not None:
            residual = residual.masked_fill(is_elsewhere[:, None], 0)
            residual = all_reduce(residual, self.tp.group)
        return residual if self.embedding_scale == 1.0 else residual * self.embedding_scale

    def first_norm(self, residual: Tensor) -> Tensor:
        """The norm of the first layer; each other one belongs to the layer before it."""
        first = self.first_layers(1)[0]
        return rms_norm(residual, first.input_norm, *first.norm_settings)

    def rope_table(self, layer: DecoderLayer) -> Tensor:
        """Cosines and sines of a layer's rotary embedding."""
        local = self.local_cos_sin if layer.has_local_rope else None
        return self.cos_sin if local is None else local

    def compute_logits(self, hidden: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """hidden [N, hidden] -> [N, vocab] float32, the sums never rounded to the model's dtype.

        ``adapter_slots`` [N], or None for rows without adapters.
        """
        logits = self._own_logits(hidden, adapter_slots)
        if self.tp.size == 1:
            return logits
        parts = all_gather(logits, self.tp.group)  # [N, T, rows of a part]
        return parts.transpose(0, 1).flatten(1)[:, : self.config.vocab_size]

    def _own_logits(self, hidden: Tensor, adapter_slots: Tensor | None) -> Tensor:
        """The logits of this rank's part of the vocabulary, padding included."""
        logits = linear(hidden, self.lm_head, out_dtype=torch.float32)
        if adapter_slots is not None and self.head_adapters is not None:
            self.head_adapters.add_delta_(logits, hidden, adapter_slots)
        cap = self.config.logit_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def greedy_tokens(
        self,
        hidden: Tensor,
        vocab_size: int | None = None,
        adapter_slots: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The argmax of ``compute_logits`` over the ids below ``vocab_size``, [N] int64, and
        whether none of those logits is NaN or infinite at the top, [N] bool.

        Ties go to the lowest id. On a GPU the logits are not written out, unless heads are adapted
        or a soft cap, which makes large ones equal, has its say.
        """
        is_adapted = adapter_slots is not None and self.head_adapters is not None
        needs_logits = is_adapted or self.config.logit_soft_cap is not None
        if self.tp.size > 1:
            # The best of each part; no rank sees the logits of another.
            first, own = self.vocab_part.start, self.vocab_part
            end = self.config.vocab_size if vocab_size is None else vocab_size
            limit = max(0, min(end, own.stop) - first)
            if needs_logits:
                best = best_part(self._own_logits(hidden, adapter_slots), limit, first)
            else:
                best = linear_best_part(hidden, self.lm_head, limit, first)
            return best_of_parts(all_gather(best, self.tp.group))
        if needs_logits:
            return argmax(self._own_logits(hidden, adapter_slots), vocab_size)
        return linear_argmax(hidden, self.lm_head, vocab_size)

    def kv_bytes_per_block(self, block_size: int) -> int:
        config = self.local_config
        positions = (2 if config.latent is None else 1) * config.num_attention_layers * block_size
        return positions * config.num_kv_heads * config.head_size * self.dtype.itemsize

    def make_kv_cache(
        self, num_blocks: int, block_size: int, *, max_num_seqs: int = 1, run_length: int = 1
    ) -> KVCache:
        """A cache of this model's shape and dtype, beside its weights."""
        recurrent = None
        if self.config.mamba is not None:
            recurrent = RecurrentStates(
                self.config.mamba,
                num_layers=self.config.num_recurrent_layers,
                max_num_seqs=max_num_seqs,
                run_length=run_length,
                dtype=self.dtype,
                device=self.device,
            )
        return KVCache(
            num_layers=self.config.num_attention_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=self.local_config.num_kv_heads,
            head_size=self.config.head_size,
            dtype=self.dtype,
            device=self.device,
            latent_size=self.config.latent_size,
            recurrent=recurrent,
        )

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Every layer that adapters can change, by its names' prefix; embedding and head aside."""
        for i, layer in enumerate(self.first_layers()):
            yield from layer.linears(f"model.layers.{i}")

    def weight_slots(self) -> dict[str, Tensor]:
        """Where each tensor of a checkpoint goes: its Hugging Face name -> a view of the weights.

        Of one rank among several it is the ``cut_of`` that name. A tied head has no slot.
        """
        slots: dict[str, Tensor] = {"model.embed_tokens.weight": self._own_rows(self.embed_tokens)}
        for i, layer in enumerate(self.first_layers()):
            slots |= layer.weight_slots(f"model.layers.{i}")
        slots[f"model.{self.config.family.names.final_norm}.weight"] = self.norm
        if not self.config.tie_word_embeddings:
            slots["lm_head.weight"] = self._own_rows(self.lm_head)
        return slots

    def whole_vocabulary(self, weight: Tensor) -> Tensor:
        """The embedding or head, ``weight``, with the rows of all ranks. They must all ask."""
        if self.tp.size == 1:
            return weight
        return all_gather(weight, self.tp.group).flatten(0, 1)[: self.config.vocab_size]

    def _own_rows(self, weight: Tensor) -> Tensor:
        """Those of this rank's ids, without the padding behind them."""
        own = len(self.vocab_part)
        return weight if own == weight.shape[0] else weight[:own]
