"""What an adapted layer reads. Shape letters: T tokens, S slots, P fused projections, r rank."""

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from specdec.kernels.lora import lora_delta_, lora_linear, lora_linear_silu_mul
from specdec.kernels.lora_rows import slot_tiles

# A trace of a model stops at these two as at the kernels that modules call themselves.
fx.wrap("lora_linear")
fx.wrap("lora_linear_silu_mul")


class AdapterRows:
    """The adapter slot of each row of a pass; its layers share the rows sorted by slot."""

    def __init__(self, slots: Tensor, num_reqs: int, tiles: Tensor | None = None) -> None:
        """``tiles``: the rows sorted already."""
        self.slots = slots  # [T] int64, -1 for a row without an adapter
        self._num_reqs = num_reqs
        self._tiles = tiles

    def tiles(self, num_slots: int, dtype: torch.dtype) -> Tensor:
        """The rows sorted by slot (``lora_rows.slot_tiles``), when the first adapted layer asks."""
        if self._tiles is None:
            self._tiles = slot_tiles(self.slots, max_groups(self._num_reqs, num_slots), dtype)
        return self._tiles


def max_groups(num_reqs: int, num_slots: int) -> int:
    """Different adapter slots in a batch; rows without an adapter, as padding, are one more."""
    return 1 + min(num_reqs, num_slots)


@dataclass(frozen=True, slots=True)
class LoraStack:
    """One layer's low-rank weights of all slots, at fixed addresses (``specdec.verifier.lora``)."""

    a: Tensor  # [S, P * r, K]; of an embedding [S, vocab, r]
    b: Tensor  # [S, N, r], with the adapters' scales in it
    parts: tuple[int, ...]  # output features of each projection

    def add_delta_(self, out: Tensor, x: Tensor, slot_of_token: Tensor) -> Tensor:
        """Add each row's delta to the rounded products ``out`` [T, N] of ``x`` [T, K]."""
        return lora_delta_(out, x, self.a, self.b, slot_of_token, self.parts)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, rows: AdapterRows) -> Tensor:
        """The layer's own product and the rows' deltas."""
        tiles = rows.tiles(self.a.shape[0], self.a.dtype)
        return lora_linear(x, weight, bias, self.a, self.b, rows.slots, self.parts, tiles)

    def linear_silu_mul(self, x: Tensor, weight: Tensor, rows: AdapterRows) -> Tensor:
        """The same of a gate and an up projection, and ``silu_mul`` of the two."""
        tiles = rows.tiles(self.a.shape[0], self.a.dtype)
        return lora_linear_silu_mul(x, weight, self.a, self.b, rows.slots, tiles)
