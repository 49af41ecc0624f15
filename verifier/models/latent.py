"""Multi-head latent attention. Source: DeepSeek-AI, "DeepSeek-V2", 2024 (arXiv:2405.04434).

In the absorbed form: what would make keys and values of a token's latent is applied to queries and
to what attention gives, so that the cache holds the latent itself, one row for all heads.

Shape letters: T tokens, H heads, C latent size, P rotated features, N plain features, V value size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specdec.kernels.head_linear import head_linear
from specdec.kernels.norm import rms_norm
from specdec.kernels.rope import apply_rope
from specdec.verifier.attention.op import LayerAttention
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.layers import Linear, WeightSlot, empty_parameter
from specdec.verifier.models.lora import AdapterRows

# The inner norms take no epsilon from the configuration.
_EPS = 1e-6


class LatentAttention(nn.Module):
    """Self-attention over a paged cache of latents."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        assert config.latent is not None and config.attention_scale is not None
        self.sizes = sizes = config.latent
        self.num_heads = heads = config.num_heads
        self.scale = config.attention_scale
        width = heads * (sizes.plain_size + sizes.rotated_size)
        rows = sizes.latent_size + sizes.rotated_size

        def norm(features: int) -> nn.Parameter:
            return empty_parameter(features, dtype=dtype, device=device)

        def linear(inputs: int, parts: dict[str, int], *, bias: bool = False) -> Linear:
            return Linear(inputs, parts, bias=bias, dtype=dtype, device=device)

        self.q_norm: nn.Parameter | None = None
        self.q_b_proj: Linear | None = None
        first = {"q_proj": width}
        if sizes.query_rank is not None:
            first = {"q_a_proj": sizes.query_rank}
            self.q_norm = norm(sizes.query_rank)
            self.q_b_proj = linear(sizes.query_rank, {"q_b_proj": width})
        # Both bottlenecks in one product.
        self.down_proj = linear(
            config.hidden_size, first | {"kv_a_proj_with_mqa": rows}, bias=config.o_bias
        )
        self.kv_norm = norm(sizes.latent_size)
        self.kv_b_proj = empty_parameter(
            heads,
            sizes.plain_size + sizes.value_size,
            sizes.latent_size,
            dtype=dtype,
            device=device,
        )
        self.o_proj = linear(
            heads * sizes.value_size, {"o_proj": config.hidden_size}, bias=config.o_bias
        )

    def forward(
        self,
        x: Tensor,  # [T, hidden]
        positions: Tensor,  # [T] int64
        cos_sin: Tensor,
        attend: LayerAttention,
        layer: int,
        adapter_rows: AdapterRows | None = None,
    ) -> Tensor:
        sizes = self.sizes
        down = self.down_proj(x, adapter_rows)
        latent_rows = (sizes.latent_size, sizes.rotated_size)
        q, latent, k_rotated = down.split((down.shape[1] - sum(latent_rows), *latent_rows), dim=1)
        if self.q_norm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(rms_norm(q, self.q_norm, _EPS), adapter_rows)
        q = q.unflatten(-1, (self.num_heads, -1))  # [T, H, N + P]
        q_plain, q_rotated = q.split((sizes.plain_size, sizes.rotated_size), dim=2)
        k_rotated = k_rotated.unsqueeze(1)
        if sizes.interleaved:
            # Even features, then odd ones: the order that rotates halves.
            q_rotated = q_rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
            k_rotated = k_rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        q_rotated, k_rotated = apply_rope(q_rotated, k_rotated, cos_sin, positions)

        absorbed = head_linear(q_plain, self.kv_b_proj[:, : sizes.plain_size])  # [T, H, C]
        query = torch.cat([absorbed, q_rotated], dim=-1)
        key = torch.cat([rms_norm(latent, self.kv_norm, _EPS).unsqueeze(1), k_rotated], dim=-1)
        out = attend(query, key, key, positions, cos_sin, layer, self.scale)  # [T, H, C]
        out = head_linear(out, self.kv_b_proj[:, sizes.plain_size :].transpose(1, 2))  # [T, H, V]
        return self.o_proj(out.flatten(1), adapter_rows)

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Projections that adapters can change, by their names' prefix; kv_b_proj is none."""
        yield prefix, self.down_proj
        if self.q_b_proj is not None:
            yield prefix, self.q_b_proj
        yield prefix, self.o_proj

    def last_weights(self) -> Iterator[Tensor]:
        """The weight and bias of the last product."""
        yield from self.o_proj.parameters()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.down_proj.weight_slots(prefix)
        if self.q_norm is not None and self.q_b_proj is not None:
            yield f"{prefix}.q_a_layernorm.weight", self.q_norm
            yield from self.q_b_proj.weight_slots(prefix)
        yield f"{prefix}.kv_a_layernorm.weight", self.kv_norm
        yield f"{prefix}.kv_b_proj.weight", self.kv_b_proj.flatten(0, 1)
        yield from self.o_proj.weight_slots(prefix)
