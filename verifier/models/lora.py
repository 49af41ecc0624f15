"""What an adapted layer reads. Shape letters: T tokens, S slots, P fused projections, r rank."""

from dataclasses import dataclass

from torch import Tensor

from specdec.kernels.lora import lora_delta_, lora_linear, lora_linear_silu_mul


@dataclass(frozen=True, slots=True)
class LoraStack:
    """One layer's low-rank weights of all slots, at fixed addresses (``specdec.verifier.lora``)."""

    a: Tensor  # [S, P * r, K]; of an embedding [S, vocab, r]
    b: Tensor  # [S, N, r], with the adapters' scales in it
    parts: tuple[int, ...]  # output features of each projection

    def add_delta_(self, out: Tensor, x: Tensor, slot_of_token: Tensor) -> Tensor:
        """Add each row's delta to the rounded products ``out`` [T, N] of ``x`` [T, K]."""
        return lora_delta_(out, x, self.a, self.b, slot_of_token, self.parts)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, slot_of_token: Tensor
    ) -> Tensor:
        """The layer's own product and the rows' deltas."""
        return lora_linear(x, weight, bias, self.a, self.b, slot_of_token, self.parts)

    def linear_silu_mul(self, x: Tensor, weight: Tensor, slot_of_token: Tensor) -> Tensor:
        """The same of a gate and an up projection, and ``silu_mul`` of the two."""
        return lora_linear_silu_mul(x, weight, self.a, self.b, slot_of_token)
