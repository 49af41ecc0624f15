"""The parts of a decoder layer. Fused weights know the checkpoint tensors they are made of.

Shape letters: T tokens, H query heads, G key/value heads, D head size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specdec.kernels.activation import gelu_tanh_mul, silu_mul
from specdec.kernels.linear import linear, linear_silu_mul
from specdec.kernels.norm import rms_norm
from specdec.kernels.ready_linear import Norm
from specdec.verifier.attention.op import LayerAttention, PagedAttention
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.lora import AdapterRows, LoraStack
from specdec.verifier.parallel.collectives import all_reduce
from specdec.verifier.parallel.sharding import WHOLE, TensorParallel

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
        sum_over: str = "",
    ) -> None:
        """``sum_over``: the ranks that hold the other columns, and add their products."""
        super().__init__()
        self.parts = parts
        self.sum_over = sum_over
        rows = sum(parts.values())
        self.weight = empty_parameter(rows, in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(rows, dtype=dtype, device=device) if bias else None
        self.adapters: LoraStack | None = None

    def forward(self, x: Tensor, adapter_rows: AdapterRows | None = None) -> Tensor:
        """x [T, in_features]; ``adapter_rows`` of the T rows, or None for a batch without.

        A product that is summed over ranks is rounded on each, then their sum, then the bias.
        """
        bias = None if self.sum_over else self.bias
        if adapter_rows is None or self.adapters is None:
            out = linear(x, self.weight, bias)
        else:
            out = self.adapters.linear(x, self.weight, bias, adapter_rows)
        if not self.sum_over:
            return out
        out = all_reduce(out, self.sum_over)
        return out if self.bias is None else out + self.bias

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
        *,
        sliding_window: int | None = None,
        tp: TensorParallel = WHOLE,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """``config``: of this rank's heads alone."""
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_size = config.head_size
        self.scale = config.attention_scale or config.head_size**-0.5
        self.sliding_window = sliding_window
        self.soft_cap = config.attention_soft_cap
        self.eps = config.rms_norm_eps
        self.unit_offset = config.family.is_gemma
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
            sum_over=tp.group,
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
        attend: LayerAttention,
        layer: int,
        adapter_rows: AdapterRows | None = None,
    ) -> Tensor:
        options = (self.scale, self.sliding_window, self.soft_cap)
        if adapter_rows is None and self.q_norm is None and isinstance(attend, PagedAttention):
            return self.o_proj(self.attend_normed(x, None, positions, cos_sin, attend, layer))
        heads = self.qkv_proj(x, adapter_rows)
        heads = heads.unflatten(-1, (-1, self.head_size))  # [T, H + 2 G, D]
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = heads.split(sizes, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(q, self.q_norm, self.eps, self.unit_offset)
            k = rms_norm(k, self.k_norm, self.eps, self.unit_offset)
        out = attend(q, k, v, positions, cos_sin, layer, *options)  # [T, H, D]
        return self.o_proj(out.flatten(1), adapter_rows)

    @property
    def is_plain(self) -> bool:
        """Nothing stands between the projections and attention, nor behind the last product."""
        is_alone = self.o_proj.bias is None and not self.o_proj.sum_over
        return is_alone and self.q_norm is None and not self.unit_offset

    def attend_normed(
        self,
        x: Tensor,
        norm: Norm | None,
        positions: Tensor,
        cos_sin: Tensor,
        attend: PagedAttention,
        layer: int,
    ) -> Tensor:
        """What attention gives for the ``norm`` of x, or for x itself, [T, H * D]."""
        out = attend.project(
            x,
            self.qkv_proj.weight,
            self.qkv_proj.bias,
            positions,
            cos_sin,
            layer,
            self.scale,
            self.sliding_window,
            self.soft_cap,
            norm,
        )
        return out.flatten(1)

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Projections that adapters can change, by their names' prefix."""
        yield prefix, self.qkv_proj
        yield prefix, self.o_proj

    def last_weights(self) -> Iterator[Tensor]:
        """The weight and bias of the last product."""
        yield from self.o_proj.parameters()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.qkv_proj.weight_slots(prefix)
        yield from self.o_proj.weight_slots(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield f"{prefix}.q_norm.weight", self.q_norm
            yield f"{prefix}.k_norm.weight", self.k_norm


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up in one product."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        width: int | None = None,
        tp: TensorParallel = WHOLE,
    ) -> None:
        """``width``: this rank's features inside; ``intermediate_size`` by default."""
        super().__init__()
        width = width or config.intermediate_size
        self.activation = config.family.activation
        self.gate_up_proj = Linear(
            config.hidden_size,
            {"gate_proj": width, "up_proj": width},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )
        self.down_proj = Linear(
            width,
            {"down_proj": config.hidden_size},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
            sum_over=tp.group,
        )

    def forward(self, x: Tensor, adapter_rows: AdapterRows | None = None) -> Tensor:
        gate_up = self.gate_up_proj
        if self.activation == "gelu_tanh":
            hidden = gelu_tanh_mul(gate_up(x, adapter_rows))
        elif gate_up.bias is not None:
            hidden = silu_mul(gate_up(x, adapter_rows))
        elif adapter_rows is None or gate_up.adapters is None:
            hidden = linear_silu_mul(x, gate_up.weight)
        else:
            hidden = gate_up.adapters.linear_silu_mul(x, gate_up.weight, adapter_rows)
        return self.down_proj(hidden, adapter_rows)

    @property
    def is_plain(self) -> bool:
        """SiLU, no bias, and whole on this rank."""
        has_bias = self.gate_up_proj.bias is not None or self.down_proj.bias is not None
        return self.activation == "silu" and not has_bias and not self.down_proj.sum_over

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        yield prefix, self.gate_up_proj
        yield prefix, self.down_proj

    def last_weights(self) -> Iterator[Tensor]:
        yield from self.down_proj.parameters()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.gate_up_proj.weight_slots(prefix)
        yield from self.down_proj.weight_slots(prefix)
