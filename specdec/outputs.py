"""What the engine gives back: texts, events of a stream, counts and records."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec.verifier.modes import BatchDescriptor


@dataclass(slots=True)
class DraftCounts:
    """Drafted tokens and how many of them were accepted."""

    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def add(self, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted


@dataclass(slots=True)
class GenerationStats:
    """What speculation did for one text.

    ``drafted_per_step`` and ``accepted_per_step`` have one entry per decode step, 0 included. The
    first token comes from the prefill and is not a step.
    """

    drafted_per_step: list[int] = field(default_factory=list)
    accepted_per_step: list[int] = field(default_factory=list)
    committed_by_steps: int = 0

    def record(self, drafted: int, accepted: int, committed: int) -> None:
        self.drafted_per_step.append(drafted)
        self.accepted_per_step.append(accepted)
        self.committed_by_steps += committed

    @property
    def steps(self) -> int:
        return len(self.drafted_per_step)

    @property
    def drafted(self) -> int:
        return sum(self.drafted_per_step)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_step)

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_tokens_per_step(self) -> float:
        return self.committed_by_steps / self.steps if self.steps else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Of the steps that drafted a position, the share that accepted it."""
        width = max(self.drafted_per_step, default=0)
        rates = []
        for position in range(width):
            drafted = sum(count > position for count in self.drafted_per_step)
            accepted = sum(count > position for count in self.accepted_per_step)
            rates.append(accepted / drafted)
        return rates

    def __str__(self) -> str:
        return (
            f"steps={self.steps} drafted={self.drafted} accepted={self.accepted} "
            f"acceptance_rate={self.acceptance_rate:.3f} "
            f"mean_tokens_per_step={self.mean_tokens_per_step:.2f}"
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-softmax of the raw logits at one token."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(slots=True)
class Generation:
    """One prompt's result. With ``n`` > 1, ``choices`` holds all n; the fields are choice 0's.

    ``finish_reason`` is "stop" (end of sequence, stop token or stop string), "length", "abort" or
    "error"; ``error`` says what went wrong then. An end-of-sequence or stop token is the last of
    ``token_ids`` and is not in ``text``. ``simulated``: acceptance was drawn, so that the tokens
    mean nothing; ``text`` is empty.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    stats: GenerationStats
    logprobs: list[TokenLogprob] | None = None
    simulated: bool = False
    error: str | None = None
    further_choices: list["Generation"] = field(default_factory=list, repr=False)

    @property
    def choices(self) -> list["Generation"]:
        """All n results, this one first."""
        return [self, *self.further_choices]


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """Tokens and text that a step added to one request's choice ``index``.

    ``times`` has one entry per token: ``time.perf_counter()`` when the engine committed it.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    times: list[float] = field(default_factory=list)
    error: str | None = None  # what went wrong, where ``finish_reason`` is "error"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One launch of the engine: which graph it took, or why none.

    ``num_tokens`` are those of one round.
    """

    mode: str
    descriptor: BatchDescriptor
    num_reqs: int
    num_tokens: int
    k: int
    reason: str | None
    rounds: int = 1  # steps in this launch
    rounds_reason: str | None = None  # why one, where ``steps_per_replay`` allows more


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine started."""

    total_kv_blocks: int
    free_kv_blocks: int
    steps_by_mode: dict[str, int]
    drafted: int = 0
    accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    by_adapter: dict[str, DraftCounts] = field(default_factory=dict)
    # Decode steps of each adapter's rows by graph mode.
    row_steps_by_adapter: dict[str, dict[str, int]] = field(default_factory=dict)
    by_source: dict[str, DraftCounts] = field(default_factory=dict)  # by name of the drafter
    prefill_chunks: int = 0
    preemptions: int = 0
    adapter_loads: int = 0  # copies of an adapter into a slot
    padded_rows: int = 0
    live_rows: int = 0

    def note(self, record: StepRecord) -> None:
        """Count a launch."""
        self.steps_by_mode[record.mode] += 1
        if record.descriptor.uniform:
            self.live_rows += record.num_reqs
            self.padded_rows += record.descriptor.num_reqs - record.num_reqs

    def record(
        self,
        adapter: str,
        mode: str,
        drafted: int,
        accepted: int,
        from_sources: Mapping[str, tuple[int, int]],
        times: int = 1,
    ) -> None:
        """A row's step, ``times`` over. ``from_sources``: drafted and accepted of each drafter."""
        self.drafted += drafted * times
        self.accepted += accepted * times
        self.by_adapter.setdefault(adapter, DraftCounts()).add(drafted * times, accepted * times)
        by_mode = self.row_steps_by_adapter.setdefault(adapter, {})
        by_mode[mode] = by_mode.get(mode, 0) + times
        for source, (of_drafted, of_accepted) in from_sources.items():
            counts = self.by_source.setdefault(source, DraftCounts())
            counts.add(of_drafted * times, of_accepted * times)
        missing = drafted - len(self.drafted_by_position)
        self.drafted_by_position.extend([0] * missing)
        self.accepted_by_position.extend([0] * missing)
        for position in range(drafted):
            self.drafted_by_position[position] += times
            self.accepted_by_position[position] += times * (position < accepted)
