"""What an engine does with adapters: loads and unloads them, and makes room for the first."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.adapter_memory import AdapterMemory
from specdec.adapters import Adapter, AdapterTable, find_adapter, make_slots
from specdec.config import EngineConfig
from specdec.drafters.combined import CombinedDrafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.intake import Intake
from specdec.parallel.ranks import Ranks
from specdec.request import Request
from specdec.runner import Runner
from specdec.scheduler import Scheduler
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.peft_format import AdapterWeights, read_adapter


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter's files, read and checked."""

    weights: AdapterWeights
    draft_weights: AdapterWeights | None


class LoraManager:
    """The adapters of one engine. Before the first there are neither slots nor LoRA graphs."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        scheduler: Scheduler,
        intake: Intake,
        ranks: Ranks,
    ) -> None:
        self._config = config
        self._runner = runner
        self._scheduler = scheduler
        self._intake = intake
        self._ranks = ranks
        self._model = runner.step.model
        drafter = runner.step.drafter
        self._drafter = drafter.second if isinstance(drafter, CombinedDrafter) else drafter
        self._table: AdapterTable | None = None

    def start(
        self,
        memory: AdapterMemory,
        weights: Mapping[str, AdapterWeights],
        draft_weights: Mapping[str, AdapterWeights],
    ) -> None:
        """Take adapters from the start: before graphs are captured."""
        table = self._use(memory)
        for name, each in weights.items():
            table.add(name, each, draft_weights.get(name))

    @property
    def has_draft_slots(self) -> bool:
        return self._table is not None and self._table.memory.draft_slots is not None

    def read(self, path: str | Path, draft_path: str | Path | None = None) -> ReadAdapter:
        """See ``Engine.read_lora``."""
        table = self._table
        max_rank = self._config.max_lora_rank if table is None else table.memory.slots.max_rank
        weights = read_adapter(path, self._model.config, max_rank=max_rank)
        draft_weights = None
        if draft_path is not None:
            if not self.has_draft_slots:
                raise ValueError("draft_path: this engine was not started with draft_lora")
            assert table is not None and table.memory.draft_slots is not None
            assert isinstance(self._drafter, DraftModelDrafter)
            draft_weights = read_adapter(
                draft_path, self._drafter.model.config, max_rank=table.memory.draft_slots.max_rank
            )
        return ReadAdapter(weights, draft_weights)

    def add(self, name: str, adapter: ReadAdapter) -> None:
        """See ``Engine.add_lora``."""
        table = self._table
        if table is None:
            assert isinstance(self._model, CausalLM)
            table = self._use(
                self._ranks.add_memory(make_slots(self._config, self._model, [adapter.weights]))
            )
            if self._config.capture == "eager":
                self._runner.capture_all()
        table.add(name, adapter.weights, adapter.draft_weights)

    def remove(self, name: str) -> list[Adapter]:
        """Refuse new requests for an adapter. Raises ValueError naming an unknown one.

        Returns its versions that requests still need.
        """
        adapter = find_adapter(self._table, name)
        assert self._table is not None
        self._table.remove(adapter.name)
        return self._table.leaving(name)

    @property
    def names(self) -> list[str]:
        return self._table.names if self._table is not None else []

    @property
    def unloading(self) -> list[str]:
        return self._table.unloading if self._table is not None else []

    @property
    def num_loads(self) -> int:
        return self._table.num_loads if self._table is not None else 0

    def hold(self, request: Request) -> None:
        """A request has arrived; its adapter stays until it has ended."""
        if self._table is not None and request.adapter is not None:
            self._table.hold(request.adapter)

    def drop(self, request: Request) -> None:
        """A request has ended."""
        if self._table is not None and request.adapter is not None:
            self._table.drop(request.adapter)

    def load_pending(self) -> None:
        """Copy adapters that the plan of this step has put in slots."""
        if self._table is not None:
            self._table.load_pending()

    def release(self) -> None:
        """Let go of the device memory."""
        if self._table is not None:
            self._table.memory.release()

    def check_integrity(self, alive: Iterable[Request], running: Iterable[Request]) -> None:
        """Raise AssertionError where an adapter is held other than once for each request."""
        if self._table is not None:
            self._table.check_integrity(
                [request.adapter for request in alive], [request.adapter for request in running]
            )

    def _use(self, memory: AdapterMemory) -> AdapterTable:
        memory.attach()
        table = AdapterTable(memory)
        self._table = self._scheduler.adapters = self._intake.adapters = table
        self._runner.enable_lora(memory.slots.max_loras)
        return table


def lora_names(prompts: list[Any], lora: Any) -> list[str | None]:
    """The adapter's name of each prompt, or None."""
    if lora is None or isinstance(lora, str):
        return [lora] * len(prompts)
    if not isinstance(lora, Sequence):
        raise TypeError(f"lora must be a name, a list of names or None, got {lora!r}")
    if len(lora) != len(prompts):
        raise ValueError(f"lora: {len(lora)} names given for {len(prompts)} prompts")
    return list(lora)
