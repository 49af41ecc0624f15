"""The processes of one engine: where one stands among them, and what they must agree on.

The user's process is rank 0. It alone schedules and decides; the others are told each call that it
makes on its device, and make the same one (``leader.py``, ``follower.py``).
"""

from typing import Any, Protocol

from specdec.adapter_memory import AdapterMemory
from specdec.runner import Runner
from specdec.verifier.lora import LoraSlots
from specdec.verifier.parallel.sharding import WHOLE, TensorParallel


class RankLostError(RuntimeError):
    """A rank of the engine is gone, and with it its part of the model. The engine is of no use."""


class Ranks(Protocol):
    """What an engine's parts see of the ranks."""

    tp: TensorParallel

    def largest(self, value: int) -> int:
        """The largest of all ranks' values, the same on each. They must all ask."""

    def make_runner(self, *args: Any, **options: Any) -> Runner:
        """A runner whose calls all ranks make."""

    def make_memory(self, slots: LoraSlots, draft_slots: LoraSlots | None) -> AdapterMemory:
        """Likewise; the ranks are making theirs."""

    def add_memory(self, slots: LoraSlots) -> AdapterMemory:
        """Likewise, in the midst of traffic: the other ranks are told to make theirs."""

    def begin(self) -> None:
        """All is built: from now on ranks do what they are told."""

    def check(self) -> None:
        """Raise RankLostError where a rank is gone."""

    def recover(self, error: BaseException) -> None:
        """A call failed here with ``error``: go on where it failed on all ranks, or on none.

        Raises RankLostError where a rank is gone, or stuck in that call.
        """

    def explain(self, error: BaseException) -> BaseException:
        """A RankLostError where a rank's end may have been the reason of ``error``, else itself."""

    def close(self) -> None:
        """End the other ranks."""


class OneRank:
    """No others."""

    tp = WHOLE

    def largest(self, value: int) -> int:
        return value

    def make_runner(self, *args: Any, **options: Any) -> Runner:
        return Runner(*args, **options)

    def make_memory(self, slots: LoraSlots, draft_slots: LoraSlots | None) -> AdapterMemory:
        return AdapterMemory(slots, draft_slots)

    def add_memory(self, slots: LoraSlots) -> AdapterMemory:
        return AdapterMemory(slots)

    def begin(self) -> None:
        pass

    def check(self) -> None:
        pass

    def recover(self, error: BaseException) -> None:
        pass

    def explain(self, error: BaseException) -> BaseException:
        return error

    def close(self) -> None:
        pass
