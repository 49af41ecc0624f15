"""A target's own module for multi-token prediction, as the model of a chain of drafts.

One decoder layer whose input at position i is token i + 1 and the target's final hidden state at
i; its output there predicts token i + 2. Past the target's last position its own output stands for
that state: the first module is used for every draft. Source: DeepSeek-AI, "DeepSeek-V3 Technical
Report", 2024.

Shape letters: T tokens, R rows that are predicted from, H query heads, D head size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.kernels.linear import linear, linear_argmax
from specdec.kernels.norm import add_rms_norm, rms_norm
from specdec.kernels.qkv import qkv_rope_write_kv
from specdec.kernels.rope import rope_write_kv
from specdec.verifier.attention.base import AttentionBackend, AttentionMetadata
from specdec.verifier.checkpoint import SafetensorsCheckpoint
from specdec.verifier.hub import resolve_model
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.decoder import DecoderLayer
from specdec.verifier.models.layers import Attention, WeightSlot, empty_parameter
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.models.mtp_names import MtpLayout, mtp_layouts, mtp_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpConfig:
    """Shape of a module, in the words of ``EagleConfig``."""

    layer: ModelConfig
    feature_layers: tuple[int, ...]
    parallel: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpCheckpoint:
    """A module found in its target's own files."""

    config: MtpConfig
    layout: MtpLayout
    tensors: SafetensorsCheckpoint


def open_mtp(model: object, target: ModelConfig) -> MtpCheckpoint:
    """Look for a module in the files of the target, a folder or hub id.

    Raises ValueError where there is none, or naming a tensor that is missing, of another shape, or
    not known here.
    """
    folder = resolve_model(model, weights=True) if isinstance(model, str | Path) else None
    if folder is None or not folder.is_dir():
        raise ValueError("draft='mtp' needs a target that is a folder of safetensors files")
    for what in ("latent", "mamba", "sliding_window", "attention_soft_cap", "local_rope"):
        if getattr(target, what) is not None or target.family.is_gemma:
            raise ValueError(
                f"draft='mtp': modules of {target.architecture} with {what} are not supported"
            )
    tensors = SafetensorsCheckpoint(folder)
    shapes = tensors.shapes()
    own = mtp_tensors(shapes.keys(), target.num_layers)
    for layout in mtp_layouts(target.num_layers):
        if layout.prefix + layout.projection + ".weight" in own:
            break
    else:
        raise ValueError(f"draft='mtp': {folder} holds no module for multi-token prediction")
    config = MtpConfig(layer=replace(target, num_layers=1), feature_layers=(target.num_layers,))
    backend: AttentionBackend = None  # type: ignore[assignment]
    module = MtpModule(config, layout, target=None, attention_backend=backend)
    expected = {name: tuple(slot.shape) for name, slot in module.weight_slots().items()}
    for name, shape in expected.items():
        if name not in shapes:
            raise ValueError(f"{folder} lacks the tensor {name}")
        if shapes[name] != shape:
            raise ValueError(
                f"{folder}: {name} has the shape {list(shapes[name])}, and the configuration asks "
                f"for {list(shape)}"
            )
    copies = {layout.prefix + name for name in layout.copies}
    unknown = sorted(
        name
        for name in own
        if _of_first(name, layout) and name not in expected and name not in copies
    )
    if unknown:
        raise ValueError(
            f"draft='mtp': the module's layer is not of the target's kind: {unknown[0]} in {folder}"
        )
    return MtpCheckpoint(config=config, layout=layout, tensors=tensors)


def load_mtp(
    checkpoint: MtpCheckpoint, target: CausalLM, attention_backend: AttentionBackend
) -> "MtpModule":
    """The module beside its target, in its dtype."""
    module = MtpModule(
        checkpoint.config, checkpoint.layout, target=target, attention_backend=attention_backend
    )
    for name, slot in module.weight_slots().items():
        slot.copy_(checkpoint.tensors.read(name))
    return module.eval()


class MtpModule(nn.Module):
    """Its weights are uninitialised until ``load_mtp`` fills them. It shares embedding and head."""

    def __init__(
        self,
        config: MtpConfig,
        layout: MtpLayout,
        *,
        target: CausalLM | None,
        attention_backend: AttentionBackend,
    ) -> None:
        """``target`` None: shapes without memory."""
        super().__init__()
        size = config.layer.hidden_size
        dtype = torch.float32 if target is None else target.dtype
        device = torch.device("meta") if target is None else target.device
        self.config = config
        self.layout = layout
        self.attention_backend = attention_backend
        self.scale = config.layer.head_size**-0.5
        self.eps = config.layer.rms_norm_eps
        self.embedding_norm = empty_parameter(size, dtype=dtype, device=device)
        self.hidden_norm = empty_parameter(size, dtype=dtype, device=device)
        self.projection = empty_parameter(size, 2 * size, dtype=dtype, device=device)
        # It stands behind the target's layers.
        index = config.feature_layers[0]
        self.layer = DecoderLayer(config.layer, index, dtype=dtype, device=device)
        self.norm = empty_parameter(size, dtype=dtype, device=device)
        # In a list, so that the target is no part of this module.
        self._target = [target]

    @property
    def target(self) -> CausalLM:
        (target,) = self._target
        assert target is not None
        return target

    @property
    def dtype(self) -> torch.dtype:
        return self.projection.dtype

    @property
    def device(self) -> torch.device:
        return self.projection.device

    def fuse(self, features: Tensor) -> Tensor:
        """The target's last residual stream [T, hidden] after its final norm."""
        return rms_norm(features.contiguous(), self.target.norm, self.eps)

    def embed(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, hidden]."""
        return F.embedding(ids, self.target.embed_tokens)

    def layer_input(self, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer's attention reads and the residual stream it adds to, [T, hidden] both.

        features: [T, hidden], fused ones or the module's own output.
        """
        parts = [
            rms_norm(embeddings, self.embedding_norm, self.eps),
            rms_norm(features, self.hidden_norm, self.eps),
        ]
        if self.layout.hidden_first:
            parts.reverse()
        stream = linear(torch.cat(parts, dim=-1), self.projection)
        return rms_norm(stream, self.layer.input_norm, self.eps), stream

    def project(
        self, x: Tensor, positions: Tensor, kv_cache: KVCache, slot_mapping: Tensor
    ) -> Tensor:
        """Queries [T, H, D] of the layer's input; keys and values go to the cache."""
        attention, cos_sin = self.layer.attention, self.target.cos_sin
        assert isinstance(attention, Attention)
        qkv, keys, values = attention.qkv_proj, kv_cache.keys[0], kv_cache.values[0]
        if attention.q_norm is None or attention.k_norm is None:
            return qkv_rope_write_kv(
                x, qkv.weight, qkv.bias, cos_sin, positions, keys, values, slot_mapping
            )
        heads = qkv(x).unflatten(-1, (-1, attention.head_size))
        sizes = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
        q, k, v = heads.split(sizes, dim=1)
        q = rms_norm(q, attention.q_norm, self.eps)
        k = rms_norm(k, attention.k_norm, self.eps)
        return rope_write_kv(q, k, v, cos_sin, positions, keys, values, slot_mapping)

    def attend(
        self, query: Tensor, residual: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """The rest of the layer for queries [R, H, D] and their residual stream [R, hidden].

        Returns hidden states for the head, [R, hidden], twice: they are the next token's features.
        """
        layer = self.layer
        assert isinstance(layer.attention, Attention)
        keys, values = kv_cache.keys[0], kv_cache.values[0]
        out = self.attention_backend.forward(query, keys, values, metadata, self.scale)
        hidden = layer.attention.o_proj(out.flatten(1))
        hidden, residual = add_rms_norm(hidden, residual, layer.mlp_norm, self.eps)
        hidden, _ = add_rms_norm(layer.mlp(hidden), residual, self.norm, self.eps)
        return hidden, hidden

    def greedy_ids(self, hidden: Tensor, num_ids: int) -> Tensor:
        """[R] int64: the likeliest of the first ``num_ids``."""
        return linear_argmax(hidden, self.target.lm_head, num_ids)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab] float32, never rounded to the target's dtype."""
        return linear(hidden, self.target.lm_head, out_dtype=torch.float32)

    def weight_slots(self) -> Mapping[str, Tensor]:
        """Where each tensor of the target's files goes."""
        return dict(self._slots())

    def _slots(self) -> Iterator[WeightSlot]:
        layout = self.layout
        yield f"{layout.prefix}{layout.embedding_norm}.weight", self.embedding_norm
        yield f"{layout.prefix}{layout.hidden_norm}.weight", self.hidden_norm
        yield f"{layout.prefix}{layout.projection}.weight", self.projection
        yield f"{layout.prefix}{layout.final_norm}.weight", self.norm
        yield from self.layer.weight_slots((layout.prefix + layout.layer).removesuffix("."))


def _of_first(name: str, layout: MtpLayout) -> bool:
    """Further modules are not read."""
    if layout.prefix != "mtp.":
        return name.startswith(layout.prefix)
    return not name.startswith("mtp.layers.") or name.startswith(layout.prefix + layout.layer)
