"""One decoder layer, put together as its model's configuration says."""

from collections.abc import Iterator

import torch
from torch import nn

from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.latent import LatentAttention
from specdec.verifier.models.layers import MLP, Attention, Linear, WeightSlot, empty_parameter
from specdec.verifier.models.moe import SparseMLP


class DecoderLayer(nn.Module):
    """The weights of layer ``index``; ``CausalLM`` fuses its norms with the residual adds."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()

        def norm() -> nn.Parameter:
            return empty_parameter(config.hidden_size, dtype=dtype, device=device)

        window = config.window_of(index)
        self.has_local_rope = window is not None and config.local_rope is not None
        self.input_norm = norm()
        self.attention: Attention | LatentAttention
        if config.latent is None:
            self.attention = Attention(config, sliding_window=window, dtype=dtype, device=device)
        else:
            self.attention = LatentAttention(config, dtype=dtype, device=device)
        self.mlp_norm = norm()
        # What attention and MLP give is normed before it is added to the residual stream.
        self.attention_out_norm = norm() if config.family.is_gemma else None
        self.mlp_out_norm = norm() if config.family.is_gemma else None
        is_sparse = config.moe is not None and index not in config.moe.dense_layers
        self.mlp: MLP | SparseMLP = (SparseMLP if is_sparse else MLP)(
            config, dtype=dtype, device=device
        )

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Projections that adapters can change, by their names' prefix."""
        yield from self.attention.linears(f"{prefix}.self_attn")
        yield from self.mlp.linears(f"{prefix}.mlp")

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield f"{prefix}.input_layernorm.weight", self.input_norm
        yield from self.attention.weight_slots(f"{prefix}.self_attn")
        if self.attention_out_norm is None or self.mlp_out_norm is None:
            yield f"{prefix}.post_attention_layernorm.weight", self.mlp_norm
        else:
            yield f"{prefix}.post_attention_layernorm.weight", self.attention_out_norm
            yield f"{prefix}.pre_feedforward_layernorm.weight", self.mlp_norm
            yield f"{prefix}.post_feedforward_layernorm.weight", self.mlp_out_norm
        yield from self.mlp.weight_slots(f"{prefix}.mlp")
