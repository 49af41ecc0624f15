"""Which graphs fit into a budget of memory, from what two probe captures of each kind took.

Pure Python: tested without a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key")


@dataclass(slots=True)
class KeyGroup(Generic[Key]):
    """Keys of one kind (a pass, a query length), largest first.

    The first is captured first and pays for the memory that the others share; the second is the
    probe of what each further key takes.
    """

    keys: Sequence[Key]
    probed: list[int] = field(default_factory=list)  # bytes of the first keys, as captured

    @property
    def probes(self) -> Sequence[Key]:
        return self.keys[:2]

    @property
    def rest(self) -> Sequence[Key]:
        return self.keys[2:]

    @property
    def bytes_per_key(self) -> int:
        """What one of the rest takes at most."""
        return self.probed[-1] if self.probed else 0


def thinned(keys: Sequence[Key], count: int) -> list[Key]:
    """``count`` of the keys, evenly spread, in their order."""
    count = min(count, len(keys))
    return [keys[(2 * i + 1) * len(keys) // (2 * count)] for i in range(count)]


def keys_that_fit(groups: Sequence[KeyGroup[Key]], limit: int | None) -> list[list[Key]]:
    """Of each group's rest, the keys to capture under ``limit`` bytes; all where it is None.

    Where not all fit, every group gives up the same share, so that no kind of batch pays alone: a
    batch whose own size is gone takes the next larger graph. Raises ValueError where the probes
    alone are over the limit, with the numbers.
    """
    if limit is None:
        return [list(group.rest) for group in groups]
    used = sum(sum(group.probed) for group in groups)
    if used > limit:
        widest = ", ".join(str(group.keys[0]) for group in groups if group.probed)
        raise ValueError(
            f"graph_memory_limit is {limit} bytes, but the largest graphs alone take {used}: "
            f"{widest}"
        )
    wanted = sum(group.bytes_per_key * len(group.rest) for group in groups)
    if wanted <= limit - used:
        return [list(group.rest) for group in groups]
    share = (limit - used) / wanted
    return [thinned(group.rest, int(share * len(group.rest))) for group in groups]
