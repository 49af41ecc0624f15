"""One decoder layer, put together as its model's configuration says."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specdec.kernels.norm import add_rms_norm, rms_norm
from specdec.kernels.qkv import is_fused
from specdec.kernels.ready_linear import is_ready, norm_linear_silu_mul, ready_linear_add
from specdec.verifier.attention.op import LayerAttention, PagedAttention
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.latent import LatentAttention
from specdec.verifier.models.layers import MLP, Attention, Linear, WeightSlot, empty_parameter
from specdec.verifier.models.lora import AdapterRows
from specdec.verifier.models.mamba import MambaMixer
from specdec.verifier.models.moe import SparseMLP
from specdec.verifier.parallel.sharding import WHOLE, TensorParallel


class DecoderLayer(nn.Module):
    """The weights of layer ``index``; its norms are fused with the residual adds."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        *,
        tp: TensorParallel = WHOLE,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """``config``: of this rank's part of the layer."""
        super().__init__()

        def norm() -> nn.Parameter:
            return empty_parameter(config.hidden_size, dtype=dtype, device=device)

        self.index = config.cache_index(index)
        self.norm_settings = (config.rms_norm_eps, config.family.is_gemma)
        window = config.window_of(index)
        self.has_local_rope = window is not None and config.local_rope is not None
        self.input_norm = norm()
        # What brings the tokens of a text together: attention, or a recurrence in its place.
        self.attention: Attention | LatentAttention | MambaMixer
        if config.is_recurrent(index):
            self.attention = MambaMixer(config, dtype=dtype, device=device)
        elif config.latent is None:
            self.attention = Attention(
                config, sliding_window=window, tp=tp, dtype=dtype, device=device
            )
        else:
            self.attention = LatentAttention(config, dtype=dtype, device=device)
        self.names = config.family.names
        self.attention_name = "mamba" if config.is_recurrent(index) else "self_attn"
        self.mlp_norm = norm()
        # What attention and MLP give is normed before it is added to the residual stream.
        self.attention_out_norm = norm() if config.family.is_gemma else None
        self.mlp_out_norm = norm() if config.family.is_gemma else None
        is_sparse = config.moe is not None and index not in config.moe.dense_layers
        self.mlp: MLP | SparseMLP
        if is_sparse:
            self.mlp = SparseMLP(config, dtype=dtype, device=device)
        else:
            self.mlp = MLP(config, dtype=dtype, device=device, tp=tp)

    def forward(
        self,
        hidden: Tensor,  # [T, hidden], the residual stream after this layer's first norm
        residual: Tensor,  # [T, hidden]
        next_norm: Tensor,  # the weight of the norm that follows
        positions: Tensor,  # [T] int64
        cos_sin: Tensor,
        attend: LayerAttention,
        adapter_rows: AdapterRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after this layer, normed and as it is."""
        norm = self.norm_settings
        hidden = self.attention(hidden, positions, cos_sin, attend, self.index, adapter_rows)
        if self.attention_out_norm is not None:
            hidden = rms_norm(hidden, self.attention_out_norm, *norm)
        hidden, residual = add_rms_norm(hidden, residual, self.mlp_norm, *norm)
        hidden = self.mlp(hidden, adapter_rows)
        if self.mlp_out_norm is not None:
            hidden = rms_norm(hidden, self.mlp_out_norm, *norm)
        return add_rms_norm(hidden, residual, next_norm, *norm)

    def is_ready(
        self,
        residual: Tensor,
        cos_sin: Tensor,
        attend: LayerAttention,
        adapter_rows: AdapterRows | None,
    ) -> bool:
        """Whether ``ready_forward`` is this layer's fast way: few rows, small and plain parts."""
        attention, mlp = self.attention, self.mlp
        return (
            isinstance(attend, PagedAttention)
            and adapter_rows is None
            and isinstance(attention, Attention)
            and isinstance(mlp, MLP)
            and attention.is_plain
            and mlp.is_plain
            and is_fused(residual, cos_sin, attend.kv_cache.keys[self.index])
            and is_ready(residual, [each.weight.shape[1] for _, each in self.linears("")])
        )

    def ready_forward(
        self, residual: Tensor, positions: Tensor, cos_sin: Tensor, attend: PagedAttention
    ) -> Tensor:
        """``forward`` with the norms as parts of the projections behind them.

        residual [T, hidden] -> the residual stream after this layer. No bit differs.
        """
        attention, mlp, eps = self.attention, self.mlp, self.norm_settings[0]
        assert isinstance(attention, Attention) and isinstance(mlp, MLP)
        norm = (self.input_norm, eps)
        mixed = attention.attend_normed(residual, norm, positions, cos_sin, attend, self.index)
        residual = ready_linear_add(mixed, attention.o_proj.weight, residual)
        gated = norm_linear_silu_mul(residual, (self.mlp_norm, eps), mlp.gate_up_proj.weight)
        return ready_linear_add(gated, mlp.down_proj.weight, residual)

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Projections that adapters can change, by their names' prefix."""
        yield from self.attention.linears(f"{prefix}.{self.attention_name}")
        yield from self.mlp.linears(f"{prefix}.{self.names.mlp}")

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield f"{prefix}.input_layernorm.weight", self.input_norm
        yield from self.attention.weight_slots(f"{prefix}.{self.attention_name}")
        if self.attention_out_norm is None or self.mlp_out_norm is None:
            yield f"{prefix}.{self.names.mlp_norm}.weight", self.mlp_norm
        else:
            yield f"{prefix}.post_attention_layernorm.weight", self.attention_out_norm
            yield f"{prefix}.pre_feedforward_layernorm.weight", self.mlp_norm
            yield f"{prefix}.post_feedforward_layernorm.weight", self.mlp_out_norm
        yield from self.mlp.weight_slots(f"{prefix}.{self.names.mlp}")
