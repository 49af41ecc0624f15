"""Where adapters lie: packed on the host, and those that run in slots on the device."""

from torch import Tensor

from specdec.verifier.lora import LoraSlots
from specdec.verifier.peft_format import AdapterWeights


class AdapterMemory:
    """The slots of a target, and of its draft model where that has adapters too.

    Every rank has one, with its own part of each adapter. Which adapter lies where is decided by
    ``AdapterTable``.
    """

    def __init__(self, slots: LoraSlots, draft_slots: LoraSlots | None = None) -> None:
        self.slots = slots
        self.draft_slots = draft_slots
        self._packed: dict[str, tuple[Tensor, Tensor | None]] = {}

    def keep(
        self, key: str, weights: AdapterWeights, draft_weights: AdapterWeights | None = None
    ) -> None:
        """Hold an adapter on the host. Raises AdapterError, holding nothing, if it does not fit."""
        draft_packed = None
        if draft_weights is not None:
            assert self.draft_slots is not None
            draft_packed = self.draft_slots.pack(draft_weights)
        self._packed[key] = self.slots.pack(weights), draft_packed

    def load(self, slot: int, key: str) -> None:
        """Copy an adapter into a slot; ordered after all work launched before."""
        packed, draft_packed = self._packed[key]
        self.slots.load(slot, packed)
        if self.draft_slots is not None:
            self.draft_slots.load(slot, draft_packed)

    def forget(self, key: str) -> None:
        """Give up the host's copy."""
        del self._packed[key]

    def attach(self) -> None:
        """Let the models read their adapters from the slots, with all kernels compiled."""
        for slots in (self.slots, self.draft_slots):
            if slots is not None:
                slots.attach()
                if slots.data.is_cuda:
                    slots.warm_up()

    def release(self) -> None:
        """Let go of the models that the slots are attached to."""
        for slots in (self.slots, self.draft_slots):
            if slots is not None:
                slots.detach()
