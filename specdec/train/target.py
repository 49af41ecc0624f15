"""The frozen target over packed rows: the hidden states that a drafter reads and learns from.

Shape letters: B rows, T tokens of a row, H query heads, G key/value heads, D head size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.config import DTYPES, EngineConfig
from specdec.kernels.linear import linear
from specdec.kernels.rope import apply_rope
from specdec.train.rows import Batch
from specdec.verifier.attention.select import select_backend
from specdec.verifier.loading import load_model
from specdec.verifier.models.config import ModelConfig, UnsupportedModelError
from specdec.verifier.models.llama import CausalLM


@dataclass(frozen=True, slots=True)
class TargetStates:
    """What the target computed for a batch."""

    features: Tensor  # [B, T, layers * hidden]: the inputs of the chosen layers, side by side
    hidden: Tensor  # [B, T, hidden] after the final norm
    choice: Tensor  # [B, T] int64: the target's own next token after each position

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.features, self.hidden, self.choice

    def logits(self, head: Tensor) -> Tensor:
        """[B, T, rows of ``head``] in the target's dtype."""
        return F.linear(self.hidden, head)


@dataclass(frozen=True, slots=True)
class _PackedAttention:
    """``LayerAttention`` over whole rows, without a cache."""

    mask: Tensor  # [B, 1, T, T] bool

    def __call__(
        self,
        query: Tensor,  # [B * T, H, D]
        key: Tensor,  # [B * T, G, D]
        value: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        layer: int,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        assert sliding_window is None and soft_cap is None
        query, key = apply_rope(query, key, cos_sin, positions)
        repeats = query.shape[1] // key.shape[1]
        num_rows = self.mask.shape[0]

        def heads(x: Tensor) -> Tensor:  # [B, H, T, D]
            x = x.unflatten(0, (num_rows, -1)).transpose(1, 2)
            return x.repeat_interleave(repeats, dim=1) if x.shape[1] < query.shape[1] else x

        out = F.scaled_dot_product_attention(
            heads(query), heads(key), heads(value), attn_mask=self.mask, scale=scale
        )
        return out.transpose(1, 2).flatten(0, 1)


class FrozenTarget:
    """The engine's own weights and kernels over packed rows, without gradients."""

    def __init__(self, model: CausalLM, layers: tuple[int, ...], vocab_size: int) -> None:
        """``layers``: whose inputs are kept. ``vocab_size``: ids that the engine may emit."""
        self.model = model
        self.layers = layers
        self.vocab_size = vocab_size

    @torch.no_grad()
    def __call__(self, batch: Batch) -> TargetStates:
        model = self.model
        attend = _PackedAttention(batch.mask())
        positions = batch.positions.flatten()
        residual = model.embed(batch.tokens.flatten())
        layers = model.first_layers()
        next_norms = [layer.input_norm for layer in layers[1:]] + [model.norm]
        hidden = model.first_norm(residual)
        inputs = {}
        for i, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            if i in self.layers:
                inputs[i] = residual
            table = model.rope_table(layer)
            hidden, residual = layer(hidden, residual, next_norm, positions, table, attend)
        shape = batch.tokens.shape
        kept = [inputs[i] for i in self.layers] or [residual[:, :0]]
        features = torch.cat(kept, dim=-1)
        hidden = hidden.unflatten(0, shape)
        return TargetStates(features.unflatten(0, shape), hidden, self._choice(hidden))

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the embedding, float32."""
        return F.embedding(ids, self.model.embed_tokens).float()

    @torch.no_grad()
    def _choice(self, hidden: Tensor) -> Tensor:
        ids = [
            linear(row, self.model.lm_head, out_dtype=torch.float32)[:, : self.vocab_size].argmax(
                -1
            )
            for row in hidden
        ]
        return torch.stack(ids)


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer: (2, n // 2, n - 3); a small model's first to last."""
    layers = (2, num_layers // 2, num_layers - 3)
    if layers[0] < layers[1] < layers[2]:
        return layers
    return (0, num_layers // 2, num_layers - 1)


def check_layers(layers: tuple[int, ...], num_layers: int) -> None:
    """Raise ValueError where ``layers`` are not three that the target has."""
    if len(layers) != 3 or not all(0 <= layer < num_layers for layer in layers):
        raise ValueError(
            f"--layers must be three numbers from 0 to {num_layers - 1}, got "
            f"{', '.join(map(str, layers))}"
        )


def load_target(model: str | None, config: ModelConfig, engine_config: EngineConfig) -> CausalLM:
    """The model that the engine and the training share.

    Raises UnsupportedModelError naming what the training's own attention and losses do not have.
    """
    for name in ("sliding_window", "attention_soft_cap", "logit_soft_cap", "latent", "mamba"):
        if getattr(config, name) is not None:
            raise UnsupportedModelError(
                f"train-draft: a target with a {name} ({config.architecture}) is not supported"
            )
    device = engine_config.torch_device
    dtype = DTYPES.get(engine_config.dtype)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else config.dtype
    backend = select_backend(
        "auto", head_size=config.head_size, dtype=dtype, block_size=16, device=device
    )
    return load_model(model, dtype=dtype, device=device, attention_backend=backend)
