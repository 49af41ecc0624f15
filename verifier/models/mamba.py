"""A Mamba-2 layer: a recurrence in the place of attention.

Shape letters: T tokens, D inner features, C channels of the convolution, H heads.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specdec.verifier.attention.op import LayerAttention
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.layers import Linear, WeightSlot, empty_parameter
from specdec.verifier.models.lora import AdapterRows
from specdec.verifier.recurrent import MixerSizes, MixerWeights


class MambaMixer(nn.Module):
    """The weights of one layer. Its state lies beside the KV cache, a row per request."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        mamba = config.mamba
        assert mamba is not None
        self.constants = MixerSizes(
            config.rms_norm_eps, mamba.num_groups, mamba.dt_min, mamba.dt_max
        )
        inner, channels = mamba.inner_size, mamba.num_channels

        def vector(size: int) -> nn.Parameter:
            return empty_parameter(size, dtype=dtype, device=device)

        self.in_proj = Linear(
            config.hidden_size,
            {"in_proj": inner + channels + mamba.num_heads},
            bias=mamba.proj_bias,
            dtype=dtype,
            device=device,
        )
        self.conv_weight = empty_parameter(channels, 1, mamba.conv_taps, dtype=dtype, device=device)
        self.conv_bias = vector(channels) if mamba.conv_bias else None
        self.a_log, self.skip, self.dt_bias = (vector(mamba.num_heads) for _ in range(3))
        self.norm = vector(inner)
        self.out_proj = Linear(
            inner,
            {"out_proj": config.hidden_size},
            bias=mamba.proj_bias,
            dtype=dtype,
            device=device,
        )

    def forward(
        self,
        x: Tensor,  # [T, hidden]
        positions: Tensor,
        cos_sin: Tensor,
        attend: LayerAttention,
        layer: int,  # among the recurrent ones
        adapter_rows: AdapterRows | None = None,
    ) -> Tensor:
        # [T, D + C + H] -> [T, D]
        out = attend.recur(self.in_proj(x), self.weights, layer, self.constants)
        return self.out_proj(out)

    @property
    def weights(self) -> MixerWeights:
        """What lies between the two projections."""
        own = self.conv_weight, self.conv_bias, self.a_log, self.skip, self.dt_bias, self.norm
        return MixerWeights(*own)

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """None that adapters can change."""
        yield from ()

    def last_weights(self) -> Iterator[Tensor]:
        """The weight and bias of the last product."""
        yield from self.out_proj.parameters()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.in_proj.weight_slots(prefix)
        yield f"{prefix}.conv1d.weight", self.conv_weight
        if self.conv_bias is not None:
            yield f"{prefix}.conv1d.bias", self.conv_bias
        yield f"{prefix}.A_log", self.a_log
        yield f"{prefix}.D", self.skip
        yield f"{prefix}.dt_bias", self.dt_bias
        yield f"{prefix}.norm.weight", self.norm
        yield from self.out_proj.weight_slots(prefix)
