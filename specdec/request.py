"""A request: its life on the host, from arrival to its last token."""

import time
from collections import deque
from dataclasses import dataclass, field

from specdec.adapters import Adapter
from specdec.config import BASE
from specdec.grammar import GrammarState
from specdec.outputs import GenerationStats, StreamEvent, TokenLogprob
from specdec.params import SamplingParams


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One text to be generated. With ``n`` > 1 a prompt is n requests, one per choice.

    The host's counts lag behind the device by the passes in flight; ``tokens_in_flight`` bounds
    what those may still add.
    """

    id: str
    index: int
    prompt_ids: list[int]
    params: SamplingParams
    k: int  # drafts per step; changes from step to step where the request adapts
    adapts: bool
    end: int  # length of prompt and output at which the text ends
    seed: int
    coupled: bool
    stop_ids: frozenset[int]
    bad_words: list[list[int]]
    grammar: GrammarState | None = None
    arrival: int
    adapter: Adapter | None = None  # None: the base model
    streamed: bool = False  # somebody waits for each token
    arrival_time: float = field(default_factory=time.perf_counter)

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None  # why the text ended in "error"
    stats: GenerationStats = field(default_factory=GenerationStats)
    events: deque[StreamEvent] = field(default_factory=deque)
    token_times: list[float] = field(default_factory=list)

    last_step: int = 0  # scheduler's step in which it last ran
    row: int = -1  # row of the device state; -1 while it waits
    blocks: list[int] = field(default_factory=list)
    prefill_goal: int = 0  # positions that the prefill computes
    num_cached: int = 0  # positions whose KV came from the prefix cache
    num_published: int = 0  # blocks whose content the pool knows
    prefix_key: bytes = b""  # of the text up to there, see ``block_contents``
    num_computed: int = 0  # positions whose KV the prefill has computed or launched
    passes_in_flight: int = 0  # rounds of them
    tokens_in_flight: int = 0
    undrafted_steps: int = 0  # steps since the drafter last read this text
    acceptance: float = 1.0  # running mean of its drafts; high until its own say otherwise
    num_failures: int = 0  # steps with it that failed since its last token
    failure: Exception | None = None  # what the last of those raised
    k_limit: int = field(init=False)  # the most that it drafts where it adapts
    # It cannot take the greedy graph: a temperature, a logit rule, or logprobs.
    needs_sampling: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        self.k_limit = self.k
        self.needs_sampling = (
            params.temperature > 0
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
            or params.repetition_penalty != 1
            or bool(params.logit_bias)
            or bool(self.bad_words)
            or params.min_tokens > 0
            or params.logprobs is not None
            or self.grammar is not None
        )

    @property
    def adapter_name(self) -> str:
        """What this text's counts go by."""
        return self.adapter.name if self.adapter is not None else BASE

    @property
    def adapter_slot(self) -> int:
        return self.adapter.slot if self.adapter is not None else -1

    @property
    def cache_salt(self) -> str:
        """Texts share KV only with those of the same adapter and version."""
        return self.adapter.salt if self.adapter is not None else BASE

    @property
    def rank(self) -> tuple[int, int, int]:
        """Lower ranks are admitted first and preempted last."""
        return (self.params.priority, self.arrival, self.index)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    def tokens_between(self, start: int, end: int) -> list[int]:
        """``token_ids[start:end]``, without a copy of all of them."""
        skipped = start - len(self.prompt_ids)
        return (
            self.output_ids[skipped : skipped + end - start]
            if skipped >= 0
            else (self.token_ids[start:end])
        )

    @property
    def num_committed(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_prefilled(self) -> bool:
        return self.row >= 0 and self.num_computed >= self.prefill_goal

    @property
    def surely_done(self) -> bool:
        """The passes in flight reach ``end``: each adds one token at least."""
        return self.num_committed + self.passes_in_flight >= self.end

    def slots_needed(self, num_tokens: int) -> int:
        """KV positions that must exist before passes over ``num_tokens`` more are launched.

        The token at ``end - 1`` is never fed, so a request needs ``end - 1`` positions at most.
        """
        return min(self.num_committed + self.tokens_in_flight + num_tokens - 1, self.end - 1)

    @property
    def steps_left(self) -> float:
        """Decode steps that are expected, from the tokens of a step so far; 1 before any."""
        per_step = self.stats.mean_tokens_per_step or 1.0
        return self.remaining / per_step - self.passes_in_flight

    @property
    def repeats_by_steps(self) -> bool:
        """It must repeat its text for a seed, and the text depends on where its steps begin."""
        seeded = self.params.seed is not None and self.params.temperature > 0
        return seeded and not self.coupled

    @property
    def remaining(self) -> int:
        return self.end - self.num_committed
