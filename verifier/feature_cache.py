"""Hidden states of the target, one row per token, in pages beside its KV cache.

Shape letters: T tokens, F features of a token.
"""

import torch
from torch import Tensor


class FeatureCache:
    """Mirrors the block ids of the target's KV cache: a token's slot is the same in both.

    One block lies on top of the pool: tokens without a slot write there, and nothing that is read
    from there is used.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_features: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        slots = (num_blocks + 1) * block_size
        self.data = torch.zeros(slots, num_features, dtype=dtype, device=device)
        self._dump_slot = num_blocks * block_size

    def write(self, features: Tensor, slot_mapping: Tensor) -> None:
        """Store ``features`` [T, F] at ``slot_mapping`` [T] int64; PAD_SLOT_ID is no slot."""
        self.data.index_copy_(0, self._rows(slot_mapping), features)

    def read(self, slot_mapping: Tensor) -> Tensor:
        """[T, F]: what was stored at these slots, anything for PAD_SLOT_ID."""
        return self.data.index_select(0, self._rows(slot_mapping))

    def _rows(self, slot_mapping: Tensor) -> Tensor:
        return torch.where(slot_mapping < 0, self._dump_slot, slot_mapping)
