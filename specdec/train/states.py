"""The target's states of all training rows, computed once and kept on the device.

Shape letters: S rows, T tokens of a row.
"""

import torch
from torch import Tensor

from specdec.train.rows import Batch
from specdec.train.target import FrozenTarget, TargetStates

# Device memory that stays free for the training itself.
SPARE_BYTES = 24 * 2**30


class KeptStates:
    """Runs the target over a batch whose rows are new, and remembers those that are not."""

    def __init__(self, target: FrozenTarget) -> None:
        self.target = target
        self._kept: list[Tensor] = []  # [S, T, ...] each, in the order of ``TargetStates``
        self._known: set[int] = set()

    def __call__(self, batch: Batch) -> TargetStates:
        if self._known.issuperset(batch.rows):
            index = torch.tensor(batch.rows, device=batch.tokens.device)
            return TargetStates(*(kept[index] for kept in self._kept))
        states = self.target(batch)
        if not self._kept:
            self._allocate(states, batch.num_rows)
        if self._kept:
            index = torch.tensor(batch.rows, device=batch.tokens.device)
            for kept, new in zip(self._kept, states.tensors, strict=True):
                kept[index] = new
            self._known.update(batch.rows)
        return states

    def _allocate(self, states: TargetStates, num_rows: int) -> None:
        """Make room for all rows where the device has it."""
        device = states.hidden.device
        shapes = [(num_rows, *each.shape[1:]) for each in states.tensors]
        size = sum(
            torch.Size(shape).numel() * each.itemsize
            for shape, each in zip(shapes, states.tensors, strict=True)
        )
        if has_room(size, device):
            self._kept = [
                torch.empty(shape, dtype=each.dtype, device=device)
                for shape, each in zip(shapes, states.tensors, strict=True)
            ]


def has_room(num_bytes: int, device: torch.device) -> bool:
    """Whether that much may be kept on a device.

    Never on a CPU: the bits of a row's states may depend there on its neighbours in the batch, and
    a run that goes on where it was stopped would see other ones.
    """
    return device.type == "cuda" and num_bytes + SPARE_BYTES <= torch.cuda.mem_get_info(device)[0]
