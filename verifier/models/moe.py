"""The sparse layers of a mixture-of-experts model.

Shape letters: T tokens, E experts, k experts of a token, F features inside an expert.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specdec.kernels.linear import linear
from specdec.kernels.moe import apply_experts, route_experts
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.layers import MLP, Linear, WeightSlot, empty_parameter
from specdec.verifier.models.lora import AdapterRows

# What checkpoints call an expert's gate, up and down projections.
_PLAIN_NAMES = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_NAMES = ("w1", "w3", "w2")


class SparseMLP(nn.Module):
    """A router, its experts, and perhaps one more expert that every token takes."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe = moe = config.moe
        self.is_mixtral = config.architecture == "MixtralForCausalLM"
        hidden, width = config.hidden_size, moe.intermediate_size

        def weight(*shape: int) -> nn.Parameter:
            return empty_parameter(*shape, dtype=dtype, device=device)

        self.is_deepseek = config.latent is not None
        router_dtype = torch.float32 if moe.float32_router else dtype
        self.router = empty_parameter(moe.num_experts, hidden, dtype=router_dtype, device=device)
        self.router_bias: nn.Parameter | None = None
        if moe.sigmoid:
            self.router_bias = empty_parameter(moe.num_experts, dtype=torch.float32, device=device)
        self.gate_up = weight(moe.num_experts, 2 * width, hidden)
        self.down = weight(moe.num_experts, hidden, width)
        self.shared_expert: MLP | None = None
        self.shared_gate: nn.Parameter | None = None
        if moe.shared_intermediate_size:
            self.shared_expert = MLP(
                config, dtype=dtype, device=device, width=moe.shared_intermediate_size
            )
        if moe.shared_gate:
            self.shared_gate = weight(1, hidden)

    def forward(self, x: Tensor, adapter_rows: AdapterRows | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. Experts have no adapters; a shared one may."""
        moe = self.moe
        logits = linear(x.to(self.router.dtype), self.router)  # [T, E]
        experts, weights = route_experts(
            *(logits, self.router_bias, moe.experts_per_token, moe.sigmoid, moe.normalize),
            *(moe.scale, moe.num_groups, moe.top_groups),
        )
        if not moe.float32_weights:
            weights = weights.to(self.router.dtype)
        out = apply_experts(x, self.gate_up, self.down, experts, weights)
        if self.shared_expert is None:
            return out
        shared = self.shared_expert(x, adapter_rows)
        if self.shared_gate is not None:
            shared = torch.sigmoid(linear(x, self.shared_gate)) * shared
        return out + shared

    @property
    def _shared_name(self) -> str:
        return "shared_experts" if self.is_deepseek else "shared_expert"

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Projections that adapters can change: those of no expert but the shared one."""
        if self.shared_expert is not None:
            yield from self.shared_expert.linears(f"{prefix}.{self._shared_name}")

    def last_weights(self) -> Iterator[Tensor]:
        """The weights and biases of the last products."""
        yield self.down
        if self.shared_expert is not None:
            yield from self.shared_expert.last_weights()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """``prefix``: the name of the layer's MLP."""
        if self.is_mixtral:
            prefix = prefix.removesuffix("mlp") + "block_sparse_moe"
        yield f"{prefix}.gate.weight", self.router
        if self.router_bias is not None:
            yield f"{prefix}.gate.e_score_correction_bias", self.router_bias
        gate, up, down = _MIXTRAL_NAMES if self.is_mixtral else _PLAIN_NAMES
        width = self.moe.intermediate_size
        for i in range(self.moe.num_experts):
            expert = f"{prefix}.experts.{i}"
            yield f"{expert}.{gate}.weight", self.gate_up[i, :width]
            yield f"{expert}.{up}.weight", self.gate_up[i, width:]
            yield f"{expert}.{down}.weight", self.down[i]
        if self.shared_expert is not None:
            yield from self.shared_expert.weight_slots(f"{prefix}.{self._shared_name}")
        if self.shared_gate is not None:
            yield f"{prefix}.shared_expert_gate.weight", self.shared_gate
