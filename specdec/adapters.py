"""Adapters by name: their versions, who still needs them, and which of them lie in slots."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from specdec.adapter_memory import AdapterMemory
from specdec.config import EngineConfig
from specdec.verifier.lora import LoraSlots
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.peft_format import AdapterWeights, read_adapter

DEFAULT_MAX_LORAS = 8
MIN_DEFAULT_RANK = 16


@dataclass(eq=False, slots=True, kw_only=True)
class Adapter:
    """One version of an adapter. Loading the same name again makes another version."""

    name: str
    version: int
    slot: int = -1  # where it lies on the device; -1 outside
    num_requests: int = 0  # that have not ended
    num_running: int = 0  # of those, how many hold a row, so that the slot must stay
    is_loaded: bool = True  # new requests may ask for it
    last_use: int = 0

    @property
    def salt(self) -> str:
        """Tells apart KV that different adapters or versions have computed."""
        return f"{self.name}#{self.version}"


class AdapterTable:
    """All adapters of an engine.

    A running request pins its adapter's slot. Where more adapters are asked for than there are
    slots, the longest unused without a running request gives up its own; its host copy stays.
    """

    def __init__(self, memory: AdapterMemory) -> None:
        self.memory = memory
        self.num_loads = 0  # copies into slots
        self._loaded: dict[str, Adapter] = {}
        self._owners: list[Adapter | None] = [None] * memory.slots.max_loras
        self._to_load: list[Adapter] = []
        self._leaving: list[Adapter] = []
        self._versions = itertools.count(1)
        self._clock = itertools.count(1)

    @property
    def names(self) -> list[str]:
        """Adapters that new requests may ask for."""
        return list(self._loaded)

    @property
    def unloading(self) -> list[str]:
        """Adapters that were removed or replaced and that some request still needs."""
        return [adapter.name for adapter in self._leaving]

    def leaving(self, name: str) -> list[Adapter]:
        """Versions under ``name`` that were removed or replaced and that some request needs."""
        return [adapter for adapter in self._leaving if adapter.name == name]

    def get(self, name: str) -> Adapter:
        """Raises ValueError naming an adapter that is not loaded."""
        return find_adapter(self, name)

    def add(
        self, name: str, weights: AdapterWeights, draft_weights: AdapterWeights | None = None
    ) -> Adapter:
        """Make an adapter known, or a new version of it; requests on the old one stay there.

        Raises AdapterError, a ValueError, where it does not fit; nothing has changed then.
        """
        adapter = Adapter(name=name, version=next(self._versions))
        self.memory.keep(adapter.salt, weights, draft_weights)
        if name in self._loaded:
            self.remove(name)
        self._loaded[name] = adapter
        return adapter

    def remove(self, name: str) -> Adapter:
        """Refuse new requests for an adapter; its memory goes with the last that it has."""
        adapter = self.get(name)
        del self._loaded[name]
        adapter.is_loaded = False
        self._leaving.append(adapter)
        self._free_if_unused(adapter)
        return adapter

    # -- requests ---------------------------------------------------------------------------------

    def hold(self, adapter: Adapter) -> None:
        """A request on ``adapter`` has arrived."""
        adapter.num_requests += 1

    def drop(self, adapter: Adapter) -> None:
        """A request on ``adapter`` has ended."""
        adapter.num_requests -= 1
        self._free_if_unused(adapter)

    def pin(self, adapter: Adapter) -> bool:
        """Give a request that starts to run its adapter in a slot; False where all are in use."""
        if adapter.slot < 0:
            slot = self._slot_to_take()
            if slot is None:
                return False
            evicted = self._owners[slot]
            if evicted is not None:
                evicted.slot = -1
            self._owners[slot] = adapter
            adapter.slot = slot
            self._to_load.append(adapter)
        adapter.num_running += 1
        adapter.last_use = next(self._clock)
        return True

    def unpin(self, adapter: Adapter) -> None:
        """A request gave up its row."""
        adapter.num_running -= 1
        adapter.last_use = next(self._clock)

    def load_pending(self) -> None:
        """Copy adapters that were given slots; to be called before the pass that reads them."""
        for adapter in self._to_load:
            if adapter.slot >= 0:
                self.memory.load(adapter.slot, adapter.salt)
                self.num_loads += 1
        self._to_load.clear()

    def check_integrity(
        self, alive: Iterable[Adapter | None], running: Iterable[Adapter | None]
    ) -> None:
        """References are those of the requests given. Raises AssertionError with the numbers."""
        requests, rows = list(alive), list(running)
        known = {*self._loaded.values(), *requests, *(o for o in self._owners if o)} - {None}
        wrong = {
            adapter.salt: (adapter.num_requests, adapter.num_running, adapter.slot)
            for adapter in known
            if adapter is not None
            and (
                adapter.num_requests != requests.count(adapter)
                or adapter.num_running != rows.count(adapter)
                or (adapter.slot >= 0) != (adapter in self._owners)
                or (adapter.num_running and adapter.slot < 0)
            )
        }
        if wrong:
            raise AssertionError(f"adapters (requests, running, slot) held wrongly: {wrong}")

    def _slot_to_take(self) -> int | None:
        unused = [
            (owner.last_use if owner is not None else 0, slot)
            for slot, owner in enumerate(self._owners)
            if owner is None or owner.num_running == 0
        ]
        return min(unused)[1] if unused else None

    def _free_if_unused(self, adapter: Adapter) -> None:
        if adapter.is_loaded or adapter.num_requests:
            return
        if adapter.slot >= 0:
            self._owners[adapter.slot] = None
            adapter.slot = -1
        self.memory.forget(adapter.salt)
        self._leaving.remove(adapter)


def find_adapter(table: AdapterTable | None, name: str) -> Adapter:
    """The loaded adapter of that name. Raises ValueError (TypeError) naming what is not one."""
    if not isinstance(name, str):
        raise TypeError(f"lora must be the name of an adapter or None, got {name!r}")
    loaded = table._loaded if table is not None else {}
    if name not in loaded:
        known = f"loaded are {', '.join(loaded)}" if loaded else "none is"
        raise ValueError(f"lora: no adapter {name!r} is loaded; {known}")
    return loaded[name]


def read_adapters(
    paths: Mapping[str, str | Path] | None, config: ModelConfig, max_rank: int | None
) -> dict[str, AdapterWeights]:
    """Every adapter of a ``lora`` field, read and checked against a model's configuration."""
    return {
        name: read_adapter(path, config, max_rank=max_rank) for name, path in (paths or {}).items()
    }


def make_slots(
    config: EngineConfig, model: CausalLM, weights: Iterable[AdapterWeights]
) -> LoraSlots:
    """Empty slots that hold each of ``weights``, of the sizes asked for where any are."""
    known = list(weights)
    return LoraSlots(
        model,
        max_loras=config.max_loras or DEFAULT_MAX_LORAS,
        max_rank=config.max_lora_rank or max([MIN_DEFAULT_RANK, *(each.rank for each in known)]),
        vocabulary=config.lora_vocabulary or any(each.adapts_vocabulary for each in known),
    )
