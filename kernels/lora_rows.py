"""Rows of a batch, sorted by adapter: what the kernels of ``specdec.kernels.lora`` walk."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Up to this many rows a tile has all that share a slot: the tiles' slots are those of the batch,
# each once, which is what ``lora_linear_triton`` reads.
FEW_ROWS = 64
# Up to this many a tile has 16: enough programs for every multiprocessor matter more than reading a
# weight once.
_SMALL_BATCH = 512


@dataclass(frozen=True, slots=True)
class SlotTiles:
    """Tiles of rows that share a slot. G tiles, of which the last may be unused.

    All four tensors are views of one, [T + 3 G] int32, which is how they are handed around.
    """

    order: Tensor  # [T] int32: row numbers, those of one slot together, in their own order
    slot: Tensor  # [G] int32: a tile's slot; -1 of rows without an adapter, -2 of an unused tile
    first: Tensor  # [G] int32: where a tile's rows begin in ``order``
    end: Tensor  # [G] int32
    block_m: int  # rows of a tile at most

    @classmethod
    def of(
        cls, packed: Tensor, num_rows: int, dtype: torch.dtype, block_m: int | None = None
    ) -> "SlotTiles":
        """What ``slot_tiles`` made of ``num_rows`` rows, in tiles of ``block_m`` where given."""
        num_tiles = (packed.shape[0] - num_rows) // 3
        order, slot, first, end = packed.split([num_rows, num_tiles, num_tiles, num_tiles])
        return cls(order, slot, first, end, block_m or tile_rows(dtype, num_rows))

    @property
    def num_tiles(self) -> int:
        return self.slot.shape[0]


def tile_rows(dtype: torch.dtype, num_rows: int) -> int:
    """Rows of a tile at most."""
    if num_rows <= FEW_ROWS:
        return FEW_ROWS
    return 16 if num_rows <= _SMALL_BATCH or dtype == torch.float32 else 64


def max_tiles(num_rows: int, num_groups: int, block_m: int) -> int:
    """Tiles that ``num_rows`` rows of at most ``num_groups`` different slots can be cut into."""
    return (num_rows + (block_m - 1) * min(num_groups, num_rows)) // block_m


def packed_size(
    num_rows: int, num_groups: int, dtype: torch.dtype, block_m: int | None = None
) -> int:
    """Elements of what ``slot_tiles`` makes on a GPU."""
    return num_rows + 3 * max_tiles(num_rows, num_groups, block_m or tile_rows(dtype, num_rows))


def slot_tiles(
    slot_of_token: Tensor, num_groups: int, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Sort the rows by their slots [T], -1 being none: packed ``SlotTiles``, int32.

    Empty on the CPU, which needs no tiles.

    Args:
        num_groups: an upper bound on the number of different slots, -1 included.
        dtype: of the layers' input.
        out: where to put them, ``packed_size`` elements; a new tensor by default.
    """
    if not slot_of_token.is_cuda:
        return slot_of_token.new_empty(0, dtype=torch.int32) if out is None else out
    from specdec.kernels.lora_rows_triton import slot_tiles as run

    return run(slot_of_token, num_groups, dtype, out)
