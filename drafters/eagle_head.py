"""The model of an EAGLE-3 head: one decoder layer over the target's hidden states and tokens.

Its input at position i is token i + 1 and the target's hidden states at i; its output there
predicts token i + 2. Past the target's last position its own output, before the final norm, stands
for them. Source: Li et al., "EAGLE-3", 2025.

Shape letters: T tokens, R rows that are predicted from, H query heads, D head size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.drafters.eagle_config import NUM_FEATURES, EagleConfig
from specdec.kernels.linear import linear, linear_argmax
from specdec.kernels.norm import add_rms_norm, rms_norm
from specdec.kernels.qkv import qkv_rope_write_kv
from specdec.verifier.attention.base import AttentionBackend, AttentionMetadata
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.layers import MLP, Linear, WeightSlot, empty_parameter
from specdec.verifier.models.rope import cos_sin_table


class EagleHead(nn.Module):
    """Uninitialised until ``eagle_checkpoint`` fills it. It rounds where the target's layers do."""

    def __init__(
        self,
        config: EagleConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        attention_backend: AttentionBackend,
        embed_tokens: Tensor | None = None,
        lm_head: Tensor | None = None,
    ) -> None:
        """``embed_tokens`` [vocab, hidden], ``lm_head`` [draft vocab, hidden]: the target's.

        None makes weights of the head's own.
        """
        super().__init__()
        layer = config.layer
        size = layer.hidden_size

        def weight(*shape: int) -> nn.Parameter:
            return empty_parameter(*shape, dtype=dtype, device=device)

        self.config = config
        self.attention_backend = attention_backend
        self.scale = layer.head_size**-0.5
        self.own_embedding, self.own_head = embed_tokens is None, lm_head is None
        self.embed_tokens = weight(layer.vocab_size, size) if embed_tokens is None else embed_tokens
        self.lm_head = weight(config.draft_vocab_size, size) if lm_head is None else lm_head
        self.fc = weight(size, NUM_FEATURES * config.target_hidden_size)
        self.input_norm, self.hidden_norm = weight(size), weight(size)
        self.qkv_proj = Linear(
            2 * size,
            {"q_proj": layer.q_size, "k_proj": layer.kv_size, "v_proj": layer.kv_size},
            bias=layer.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(
            layer.q_size, {"o_proj": size}, bias=layer.o_bias, dtype=dtype, device=device
        )
        self.post_attention_norm = weight(size)
        self.mlp = MLP(layer, dtype=dtype, device=device)
        self.norm = weight(size)
        self.mask_embedding = weight(size) if config.parallel else None
        self.mask_feature = weight(size) if config.parallel else None
        cos_sin = cos_sin_table(layer.rope, layer.max_position_embeddings, device)
        self.cos_sin: Tensor  # [max_position_embeddings, rotary_dim] float32
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.device

    def fuse(self, features: Tensor) -> Tensor:
        """The target's hidden states of some layers, [T, 3 * target hidden], as [T, hidden]."""
        return linear(features, self.fc)

    def embed(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, hidden]."""
        return F.embedding(ids, self.embed_tokens)

    def masked(
        self, embeddings: Tensor, features: Tensor, is_masked: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same with the masks' vectors in the rows of ``is_masked`` [T, 1] bool."""
        assert self.mask_embedding is not None and self.mask_feature is not None
        embeddings = torch.where(is_masked, self.mask_embedding, embeddings)
        return embeddings, torch.where(is_masked, self.mask_feature, features)

    def layer_input(self, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer reads, [T, 2 * hidden], and the residual stream it adds to, [T, hidden].

        embeddings, features: [T, hidden]; features are fused ones, or the head's own output.
        """
        eps = self.config.layer.rms_norm_eps
        normed = rms_norm(features, self.hidden_norm, eps)
        x = torch.cat([rms_norm(embeddings, self.input_norm, eps), normed], dim=-1)
        return x, normed if self.config.norm_before_residual else features

    def project(
        self, x: Tensor, positions: Tensor, kv_cache: KVCache, slot_mapping: Tensor
    ) -> Tensor:
        """Queries [T, H, D] of the layer's input; keys and values go to the cache.

        A token's key and value depend on its own input alone, so a text is read by this.
        """
        weight, bias = self.qkv_proj.weight, self.qkv_proj.bias
        keys, values = kv_cache.keys[0], kv_cache.values[0]
        return qkv_rope_write_kv(
            x, weight, bias, self.cos_sin, positions, keys, values, slot_mapping
        )

    def attend(
        self, query: Tensor, residual: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """The rest of the layer for queries [R, H, D] and their residual stream [R, hidden].

        Returns hidden states for ``lm_head``, [R, hidden], and those before the final norm, which
        are the next token's features.
        """
        eps = self.config.layer.rms_norm_eps
        keys, values = kv_cache.keys[0], kv_cache.values[0]
        out = self.attention_backend.forward(query, keys, values, metadata, self.scale)
        hidden = self.o_proj(out.flatten(1))
        hidden, residual = add_rms_norm(hidden, residual, self.post_attention_norm, eps)
        hidden, residual = add_rms_norm(self.mlp(hidden), residual, self.norm, eps)
        return hidden, residual

    def greedy_ids(self, hidden: Tensor, num_ids: int) -> Tensor:
        """[R] int64: the likeliest of the draft vocabulary's first ``num_ids``."""
        return linear_argmax(hidden, self.lm_head, num_ids)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, draft vocab] float32, never rounded to the head's dtype."""
        return linear(hidden, self.lm_head, out_dtype=torch.float32)

    def weight_slots(self) -> dict[str, Tensor]:
        """Where each tensor of a checkpoint goes: SafeAILab's name -> a view of the weights."""
        return dict(self._slots())

    def _slots(self) -> Iterator[WeightSlot]:
        yield "fc.weight", self.fc
        yield "midlayer.input_layernorm.weight", self.input_norm
        yield "midlayer.hidden_norm.weight", self.hidden_norm
        yield from self.qkv_proj.weight_slots("midlayer.self_attn")
        yield from self.o_proj.weight_slots("midlayer.self_attn")
        yield "midlayer.post_attention_layernorm.weight", self.post_attention_norm
        yield from self.mlp.weight_slots("midlayer.mlp")
        yield "norm.weight", self.norm
        if self.own_embedding:
            yield "embed_tokens.weight", self.embed_tokens
        if self.own_head:
            yield "lm_head.weight", self.lm_head
        if self.mask_embedding is not None and self.mask_feature is not None:
            yield "mask_embedding", self.mask_embedding
            yield "mask_feature", self.mask_feature
