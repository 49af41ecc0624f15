"""A layer's attention, or recurrence, called directly or as one operator that a trace can split at.

Shape letters: T tokens, H query heads, G key/value heads, D head size.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.kernels.latent_attention import write_latent
from specdec.kernels.qkv import qkv_rope_write_kv
from specdec.kernels.ready_linear import Norm
from specdec.kernels.rope import rope_write_kv
from specdec.verifier.attention.base import AttentionBackend, AttentionMetadata
from specdec.verifier.context import get_forward_context
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.recurrent import MixerSizes, MixerWeights, recurrence

OPAQUE_ATTENTION = "specdec::attention"
OPAQUE_RECURRENCE = "specdec::recurrence"


class LayerAttention(Protocol):
    """Rotates, writes keys and values to the cache of one layer, and attends over it."""

    def __call__(
        self,
        query: Tensor,  # [T, H, D]
        key: Tensor,  # [T, G, D]
        value: Tensor,  # [T, G, D]
        positions: Tensor,  # [T] int64
        cos_sin: Tensor,
        layer: int,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """[T, H, D]

        Over a cache of latents queries and keys come rotated: absorbed queries [T, H, C + P], keys
        [T, 1, C + P] of which the first C features are the value; the result is [T, H, C].
        """

    def recur(
        self, projected: Tensor, weights: MixerWeights, layer: int, sizes: MixerSizes
    ) -> Tensor:
        """In place of attention, what ``recurrent.recurrence`` does with the states of a layer."""


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention of one batch, called directly: every value of the step is a tensor argument."""

    backend: AttentionBackend
    kv_cache: KVCache
    metadata: AttentionMetadata

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        layer: int,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        keys, values = self.kv_cache.keys[layer], self.kv_cache.values[layer]
        slots = self.metadata.slot_mapping
        latent_size = self.kv_cache.latent_size
        if latent_size is not None:
            row = key[:, 0]
            write_latent(row[:, :latent_size], row[:, latent_size:], keys[:, :, 0], slots)
            # Compiled pieces count on the layout of a new tensor.
            return self.backend.forward(query, keys, values, self.metadata, scale).contiguous()
        query = rope_write_kv(query, key, value, cos_sin, positions, keys, values, slots)
        return self.backend.forward(
            query, keys, values, self.metadata, scale, sliding_window, soft_cap
        )

    def project(
        self,
        x: Tensor,  # [T, hidden]
        weight: Tensor,
        bias: Tensor | None,
        positions: Tensor,
        cos_sin: Tensor,
        layer: int,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        norm: Norm | None = None,
    ) -> Tensor:
        """The same from the projection's input on, or from that of the ``norm`` in front of it,
        where nothing stands between the two."""
        keys, values = self.kv_cache.keys[layer], self.kv_cache.values[layer]
        slots = self.metadata.slot_mapping
        query = qkv_rope_write_kv(x, weight, bias, cos_sin, positions, keys, values, slots, norm)
        # With a norm x is a residual stream. What made it stands between the projection, which
        # writes the batch's own keys alone, and whatever made the batch's tensors.
        metadata = replace(self.metadata, older_keys_stand=norm is not None)
        return self.backend.forward(query, keys, values, metadata, scale, sliding_window, soft_cap)

    def recur(
        self, projected: Tensor, weights: MixerWeights, layer: int, sizes: MixerSizes
    ) -> Tensor:
        states = self.kv_cache.recurrent
        assert states is not None
        return recurrence(states, self.metadata, projected, weights, layer, sizes)


@dataclass(frozen=True, slots=True)
class OpaqueAttention:
    """The same as a call of ``torch.ops.specdec.attention``: what a trace of a model sees.

    All layers share ``out`` [T, H, D]: a layer's result is read before the next layer attends. It
    is an input of the pass, so that each piece of a model finds it at a fixed address.
    """

    out: Tensor

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        layer: int,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        torch.ops.specdec.attention(
            *(query, key, value, self.out, positions, cos_sin, layer, scale),
            *(sliding_window, soft_cap),
        )
        return self.out

    def recur(
        self, projected: Tensor, weights: MixerWeights, layer: int, sizes: MixerSizes
    ) -> Tensor:
        out: Tensor = torch.ops.specdec.recurrence(projected, *weights, layer, *sizes)
        return out


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    layer: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Takes the batch from the forward context. Rows of ``out`` past its tokens are left alone.

    No step-varying value is an argument, so a graph must not hold this operator: inside one
    ``PagedAttention`` is called.
    """
    context = get_forward_context()
    if context.attn_metadata is None:
        raise RuntimeError("torch.ops.specdec.attention: the forward context has no attn_metadata")
    attend = PagedAttention(context.attn_backend, context.kv_cache, context.attn_metadata)
    live = context.attn_metadata.slot_mapping.shape[0]
    out[:live] = attend(
        *(query[:live], key[:live], value[:live], positions[:live], cos_sin, layer, scale),
        *(sliding_window, soft_cap),
    )


def _recurrence(projected: Tensor, *rest: Any) -> Tensor:
    """The same for layers with states. Rows past the batch's tokens are zero."""
    context = get_forward_context()
    if context.attn_metadata is None:
        raise RuntimeError("torch.ops.specdec.recurrence: the forward context has no attn_metadata")
    attend = PagedAttention(context.attn_backend, context.kv_cache, context.attn_metadata)
    count = len(MixerWeights._fields)
    weights, layer, sizes = MixerWeights(*rest[:count]), rest[count], MixerSizes(*rest[count + 1 :])
    live = context.attn_metadata.slot_mapping.shape[0]
    result = attend.recur(projected[:live], weights, layer, sizes)
    out = result.new_zeros(projected.shape[0], result.shape[1])
    out[:live] = result
    return out


_library = torch.library.Library("specdec", "FRAGMENT")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, Tensor positions, "
    "Tensor cos_sin, int layer, float scale, int? sliding_window=None, float? soft_cap=None) -> ()"
)
_library.impl("attention", _attention, "CompositeExplicitAutograd")
_library.impl("attention", lambda *_: None, "Meta")
_library.define(
    "recurrence(Tensor projected, Tensor conv_weight, Tensor? conv_bias, Tensor a_log, "
    "Tensor skip, Tensor dt_bias, Tensor norm, int layer, float eps, int num_groups, "
    "float dt_min, float dt_max) -> Tensor"
)
_library.impl("recurrence", _recurrence, "CompositeExplicitAutograd")
