"""The parts of a decoder layer. Fused weights know the checkpoint tensors they are made of.

Shape letters: T tokens, H query heads, G key/value heads, D head size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specdec.kernels.activation import silu_mul
from specdec.kernels.linear import linear, linear_silu_mul
from specdec.kernels.norm import rms_norm
from specdec.kernels.rope import rope_write_kv
from specdec.verifier.attention.base import AttentionBackend, AttentionMetadata
from specdec.verifier.models.config import ModelConfig

# A checkpoint tensor's name and the memory, of its shape, that it is copied to.
WeightSlot = tuple[str, Tensor]


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """One or more projections of the same input, their rows stacked in one weight.

    ``parts`` gives the checkpoint's name and the number of rows of each.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.parts = parts
        rows = sum(parts.values())
        self.weight = empty_parameter(rows, in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(rows, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        first = 0
        for name, rows in self.parts.items():
            yield f"{prefix}.{name}.weight", self.weight[first : first + rows]
            if self.bias is not None:
                yield f"{prefix}.{name}.bias", self.bias[first : first + rows]
            first += rows


class Attention(nn.Module):
    """Self-attention over the paged cache, with grouped key/value heads."""

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_size = config.head_size
        self.scale = config.head_size**-0.5
        self.eps = config.rms_norm_eps
        self.qkv_proj = Linear(
            config.hidden_size,
            {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size},
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(
            config.q_size,
            {"o_proj": config.hidden_size},
            bias=config.o_bias,
            dtype=dtype,
            device=device,
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = empty_parameter(self.head_size, dtype=dtype, device=device)
            self.k_norm = empty_parameter(self.head_size, dtype=dtype, device=device)

    def forward(
        self,
        x: Tensor,  # [T, hidden]
        positions: Tensor,  # [T] int64
        cos_sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        attn: AttentionMetadata,
    ) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_size)
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = heads.split(sizes, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(q, self.q_norm, self.eps)
            k = rms_norm(k, self.k_norm, self.eps)
        q = rope_write_kv(q, k, v, cos_sin, positions, key_cache, value_cache, attn.slot_mapping)
        out = self.backend.forward(q, key_cache, value_cache, attn, self.scale)  # [T, H, D]
        return self.o_proj(out.flatten(1))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.qkv_proj.weight_slots(prefix)
        yield from self.o_proj.weight_slots(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield f"{prefix}.q_norm.weight", self.q_norm
            yield f"{prefix}.k_norm.weight", self.k_norm


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.gate_up_proj = Linear(
            config.hidden_size,
            {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )
        self.down_proj = Linear(
            config.intermediate_size,
            {"down_proj": config.hidden_size},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up_proj.bias is None:
            return self.down_proj(linear_silu_mul(x, self.gate_up_proj.weight))
        return self.down_proj(silu_mul(self.gate_up_proj(x)))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.gate_up_proj.weight_slots(prefix)
        yield from self.down_proj.weight_slots(prefix)


class DecoderLayer(nn.Module):
    """The weights of one layer; ``CausalLM.forward`` fuses its norms with the residual adds."""

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.input_norm = empty_parameter(config.hidden_size, dtype=dtype, device=device)
        self.attention = Attention(config, backend, dtype=dtype, device=device)
        self.post_attention_norm = empty_parameter(config.hidden_size, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype=dtype, device=device)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield f"{prefix}.input_layernorm.weight", self.input_norm
        yield from self.attention.weight_slots(f"{prefix}.self_attn")
        yield f"{prefix}.post_attention_layernorm.weight", self.post_attention_norm
        yield from self.mlp.weight_slots(f"{prefix}.mlp")
