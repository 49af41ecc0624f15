"""What an adapted layer reads. Shape letters: T tokens, S slots, P fused projections, r rank."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.lora import lora_delta_, lora_linear, lora_linear_silu_mul
from specdec.kernels.lora_rows import SlotTiles, slot_tiles


class AdapterRows:
    """The adapter slot of each row of a pass; its layers share the rows sorted by slot."""

    def __init__(self, slots: Tensor, num_reqs: int) -> None:
        self.slots = slots  # [T] int64, -1 for a row without an adapter
        self._num_reqs = num_reqs
        self._tiles: SlotTiles | None = None

    def tiles(self, num_slots: int, dtype: torch.dtype) -> SlotTiles | None:
        """Sorted when the first adapted layer asks."""
        if self._tiles is None:
            # Padding may be one group more than the requests.
            num_groups = 1 + min(self._num_reqs, num_slots)
            self._tiles = slot_tiles(self.slots, num_groups, dtype)
        return self._tiles


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
        tiles = rows.tiles(self.a.shape[0], x.dtype)
        return lora_linear(x, weight, bias, self.a, self.b, rows.slots, self.parts, tiles)

    def linear_silu_mul(self, x: Tensor, weight: Tensor, rows: AdapterRows) -> Tensor:
        """The same of a gate and an up projection, and ``silu_mul`` of the two."""
        tiles = rows.tiles(self.a.shape[0], x.dtype)
        return lora_linear_silu_mul(x, weight, self.a, self.b, rows.slots, tiles)
