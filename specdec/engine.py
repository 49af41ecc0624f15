"""The engine: requests in, tokens out. ``Engine.step`` is the whole pipeline."""

from __future__ import annotations

import copy
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from specdec import draft_notes
from specdec.adaptation import Adaptation
from specdec.adapters import Adapter
from specdec.config import EngineConfig, check_adapter_name, check_k
from specdec.drafters.adaptive import CrossoverRow
from specdec.ends import TextTail, close, commit, event
from specdec.failures import find_culprit
from specdec.intake import Intake, Prompt, prompts_of
from specdec.launch import Launched, install, launch
from specdec.lora import LoraManager, ReadAdapter, lora_names
from specdec.outputs import EngineStats, Generation, StepRecord
from specdec.parallel.ranks import RankLostError
from specdec.params import SamplingParams, params_of
from specdec.request import Request
from specdec.results import result_of, results_of
from specdec.rounds import RoundsChoice
from specdec.scheduler import StepPlan
from specdec.stream import Stream
from specdec.verifier.batch import RowResult
from specdec.verifier.graph import GraphRow

if TYPE_CHECKING:
    from specdec.drafters.base import Drafter

MAX_RECORDS = 10_000


class Engine:
    """A speculative-decoding engine over one target model and one drafter.

    Args:
        model: a Hugging Face folder or hub id, or a ``.gguf`` file; None is the bundled default.
        draft: None, "auto", "ngram", "suffix", "layer_skip:N", "eagle:PATH", the path of a smaller
            checkpoint with the same tokenizer, "ngram+" or "suffix+" before one of the last three
            (lookup where its match is long, the model elsewhere), or a ``Drafter``.
        k: drafts per row and step; "auto" takes, step by step, the k up to ``k_max`` that promises
            the most tokens per second, down to 0.
        fields: see ``EngineConfig``.

    Not for use from several threads at once. A context manager: leaving it closes the engine.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | Drafter | None = None,
        k: int | str = 4,
        **fields: Any,
    ) -> None:
        unknown = sorted(set(fields) - EngineConfig.field_names())
        if unknown:
            raise TypeError(f"Engine has no field {', '.join(unknown)}")
        from specdec.build import build

        parts = build(model, draft, check_k(k) if draft is not None else 0, EngineConfig(**fields))
        self.config = parts.config
        self.model_config = parts.model_config
        self.tokenizer = parts.tokenizer
        self.drafter = parts.drafter
        self.k = parts.max_k
        self.max_model_len = parts.max_model_len
        self.capture_seconds = parts.capture_seconds
        self.block_size = parts.scheduler.block_size  # positions per KV block
        self.attention = parts.attention  # which backend serves the target, and why that one
        self.device = parts.runner.device
        self._runner = parts.runner
        self._ranks = parts.ranks
        self._scheduler = parts.scheduler
        self._pool = parts.scheduler.pool
        self._intake: Intake = parts.intake
        self._lora: LoraManager = parts.lora
        self._rounds: RoundsChoice = parts.rounds
        self._last_decode: float | None = None  # when the last of a run of decode-only steps ended
        self._waited = 0.0  # seconds since then that the host waited for the device
        # A drafter on the host reads the newest tokens, so its steps cannot overlap.
        host_drafts = self.drafter is not None and not self.drafter.capturable
        wanted = parts.config.async_scheduling
        on_gpu = parts.runner.device.type == "cuda"
        self._reads_late = (on_gpu if wanted == "auto" else bool(wanted)) and not host_drafts
        self._adaptation: Adaptation | None = None
        if parts.costs is not None:
            self._adaptation = Adaptation(parts.costs, parts.runner, reads_late=self._reads_late)
        self._launched: deque[Launched] = deque()
        self._num_grammars = 0  # requests in the engine whose output follows a format
        self._tails: dict[Request, TextTail] = {}
        self._records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        self._stats = EngineStats(
            total_kv_blocks=self._pool.num_blocks,
            free_kv_blocks=self._pool.num_free,
            steps_by_mode={"FULL": 0, "PIECEWISE": 0, "NONE": 0},
        )
        # Decode steps of rows that are not in the totals yet, see ``draft_notes.count``.
        self._tally: Counter[tuple[str, str, int, int, int]] = Counter()
        self._closed = False

    # -- what a user calls ------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> Generation | list[Generation]:
        """One Generation for a single prompt, else a list in the prompts' order.

        All requests are checked before any runs. A text whose steps fail ends with the finish
        reason "error"; where this befalls all of them, what their steps raised is raised.
        """
        many, single = prompts_of(prompts)
        requests = zip(many, params_of(many, params), lora_names(many, lora), strict=True)
        groups = [self._intake.make(*request) for request in requests]
        for group in groups:
            self._admit(group)
        try:
            while any(r.finish_reason is None for group in groups for r in group):
                self.step()
        except BaseException:
            for group in groups:
                self._end(group)
            raise
        results = results_of(groups, self.config.simulated_acceptance is not None)
        return results[0] if single else results

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, lora: str | None = None
    ) -> Stream:
        """Generate one prompt, yielding what each step adds. Closing the iterator aborts it."""
        return Stream(self, self.add_request(prompt, params, lora, streamed=True))

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        lora: str | None = None,
        *,
        streamed: bool = False,
    ) -> list[Request]:
        """Queue a request, one per choice; ``step`` runs it. For callers with their own loop.

        ``streamed``: somebody waits for each token, so ``steps_per_replay="auto"`` keeps to 1.
        """
        group = self._intake.make(prompt, params or SamplingParams(), lora)
        for request in group:
            request.streamed = streamed
        self._admit(group)
        return group

    def prepare_format(self, response_format: object) -> None:
        """Compile a ``response_format``, so that requests with it start at once.

        May be called in any thread, beside a step. Raises what ``generate`` raises for it.
        """
        self._intake.prepare_format(response_format)

    def abort(self, request_id: str) -> None:
        """End a request where it stands; others are not disturbed. Unknown ids are ignored."""
        self._end([r for r in self._tails if r.id == request_id])

    @property
    def takes_draft_lora(self) -> bool:
        """Whether adapters may come with one of the draft model."""
        return self._lora.has_draft_slots

    def read_lora(self, path: str | Path, draft_path: str | Path | None = None) -> ReadAdapter:
        """Read an adapter's files, for ``add_lora``. May be called in any thread, beside a step."""
        return self._lora.read(path, draft_path)

    def add_lora(
        self, name: str, path: str | Path | ReadAdapter, draft_path: str | Path | None = None
    ) -> None:
        """Load an adapter in PEFT's format, or a new version of it under the same name.

        Requests that run on an older version end on it. ``draft_path``: an adapter of the draft
        model for the same rows, in an engine with ``draft_lora``. Raises FileNotFoundError or
        ValueError naming what is missing or not supported; nothing has changed then.
        """
        self._check_open()
        check_adapter_name("name", name)
        read = path if isinstance(path, ReadAdapter) else self.read_lora(path, draft_path)
        self._lora.add(name, read)

    def remove_lora(self, name: str, *, wait: bool = True) -> list[Adapter]:
        """Unload an adapter: new requests for it are refused at once, those it has end on it.

        With ``wait`` the engine steps until they have. Raises ValueError for an unknown name.
        Returns the versions under that name that had requests, each with its ``num_requests``.
        """
        self._check_open()
        versions = self._lora.remove(name)
        while wait and any(version.num_requests for version in versions):
            self.step()
        return versions

    @property
    def loras(self) -> list[str]:
        """Names of the adapters that requests may ask for."""
        return self._lora.names

    @property
    def unloading_loras(self) -> list[str]:
        """Names of adapters that were removed and that running requests still use."""
        return self._lora.unloading

    def crossover(self) -> list[CrossoverRow]:
        """With k="auto": by number of requests and context, the k that wins now and what each gets.

        By the measured costs, and the acceptance of rows without an adapter.
        """
        return self._adaptation.choice.crossover() if self._adaptation is not None else []

    def abort_all(self, group: Sequence[Request]) -> None:
        """End these requests where they stand; those that have ended are left alone."""
        self._end(group)

    def graph_table(self) -> list[GraphRow]:
        """One row per captured graph."""
        return self._runner.graph_table()

    def stats(self) -> EngineStats:
        """Totals since the engine started, as of now."""
        self._stats.free_kv_blocks = self._pool.num_free
        self._stats.preemptions = self._scheduler.num_preemptions
        self._stats.adapter_loads = self._lora.num_loads
        draft_notes.count(self._stats, self.drafter, self._tally)
        self._tally.clear()
        return copy.deepcopy(self._stats)

    def recent_steps(self, n: int = 100) -> list[StepRecord]:
        """The last n launches, oldest first."""
        return list(self._records)[-n:] if n > 0 else []

    def check_integrity(self) -> None:
        """Raise AssertionError where a block or a row is held other than once."""
        self._scheduler.check_integrity()
        self._lora.check_integrity(self._tails, self._scheduler.running)

    def close(self) -> None:
        """Abort what runs and release the device memory."""
        if self._closed:
            return
        self._end(list(self._tails))
        with suppress(RankLostError):
            self._drain()
        self._closed = True
        self._runner.release()
        self._lora.release()
        self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the pipeline -----------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule, launch (draft, verify and accept in one replay), then commit.

        On a GPU the results committed here are those of the step before. With several steps per
        replay this is all of them. A step that fails is as if it had not been; the request that
        makes it fail is found and ends with "error".
        """
        if self._num_grammars or self._scheduler.suspects:
            # A row with a grammar needs its newest tokens on the host before it goes on, and
            # whether a suspect is cleared shows in its tokens.
            self._drain()
        rounds = self._rounds.choose(self._scheduler.running)
        if self._adaptation is not None:
            self._adaptation.before_step(self._scheduler.running, rounds.count)
        plan = self._scheduler.schedule(may_preempt=not self._launched, rounds=rounds)
        if plan is None:
            return self._drain()
        of_last_step = len(self._launched)
        try:
            install(self._runner, self._lora, plan)
            if not plan.is_empty:
                self._track(*launch(self._runner, plan))
                self._stats.prefill_chunks += len(plan.prefills)
        except BaseException as error:
            # Nothing of this step counts. What was launched before it is whole; its requests are
            # computed anew from what they have committed.
            self._ranks.recover(error)
            self._drain()
            self._scheduler.give_back(plan)
            return self._end_culprit(plan, error)
        if self._reads_late and not plan.is_empty:
            self._drain(of_last_step)
        else:
            self._drain()
        self._note_cost(plan)

    def _end_culprit(self, plan: StepPlan, error: BaseException) -> None:
        self._last_decode = None
        culprit = find_culprit(self._scheduler, plan, error, self.device)
        if culprit is not None:
            self._end([culprit], "error")

    def _note_cost(self, plan: StepPlan) -> None:
        """Between two launches of decode rows alone lies what one of them takes."""
        now, seconds = time.perf_counter(), None
        alone = bool(plan.decodes) and not plan.prefills
        rounds = self._records[-1].rounds if alone else 1
        if alone and self._last_decode is not None:
            seconds = now - self._last_decode
            self._rounds.observe(rounds, seconds, self._waited)
        if self._adaptation is not None:
            self._adaptation.after_step(plan, seconds, self._waited, rounds)
        self._last_decode, self._waited = now if alone else None, 0.0

    def _track(self, launched: list[Launched], records: list[StepRecord]) -> None:
        """Keep what has been launched until it is read, and note which graphs it took."""
        for each in launched:
            for request in each.requests:
                request.passes_in_flight += each.rounds
                request.tokens_in_flight += each.most_tokens
        self._launched.extend(launched)
        for record in records:
            self._records.append(record)
            self._stats.note(record)

    def _drain(self, count: int | None = None) -> None:
        """Commit the oldest ``count`` passes in flight, or all of them."""
        for _ in range(len(self._launched) if count is None else count):
            self._commit(self._launched.popleft())

    def _commit(self, launched: Launched) -> None:
        """Read a launch's results and append them to its requests."""
        self._waited += launched.results.wait()
        for request, results in zip(launched.requests, launched.results.read(), strict=True):
            request.passes_in_flight -= launched.rounds
            request.tokens_in_flight -= launched.most_tokens
            for result in results:
                # What the device ran after a request's end is counted nowhere.
                if request.finish_reason is None:
                    self._commit_row(request, result, launched)

    def _commit_row(self, request: Request, result: RowResult, launched: Launched) -> None:
        tail = self._tails[request]
        committed = commit(request, tail, result)
        if launched.is_decode:
            accepted = min(result.num_accepted, committed)
            request.stats.record(result.num_drafted, accepted, committed)
            if self._adaptation is not None:
                self._adaptation.after_row(request, result.num_drafted, result.num_accepted)
            drafted, first = result.num_drafted, result.num_from_first
            self._tally[request.adapter_name, launched.mode, drafted, accepted, first] += 1
        request.events.append(event(request, tail, committed))
        if request.finish_reason != "error":
            self._scheduler.publish(request)
        if request.finish_reason is not None:
            self._retire(request)

    # -- requests ---------------------------------------------------------------------------------

    def _admit(self, group: list[Request]) -> None:
        self._check_open()
        for request in group:
            self._lora.hold(request)
            # Simulated tokens are no text.
            tokenizer = self.tokenizer if self.config.simulated_acceptance is None else None
            self._tails[request] = TextTail(tokenizer, request.params.stop_strings)
            self._scheduler.add(request)
            self._num_grammars += request.grammar is not None

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")

    def _retire(self, request: Request) -> None:
        self._scheduler.finish(request)
        draft_notes.after_end(self._runner, request)
        self._lora.drop(request)
        self._num_grammars -= request.grammar is not None
        del self._tails[request]

    def _end(self, group: Sequence[Request], reason: str = "abort") -> None:
        for request in group:
            if request in self._tails:
                tail = self._tails[request]
                close(request, tail)
                request.finish_reason = reason
                request.events.append(event(request, tail, 0))
                self._retire(request)

    def generation(self, group: list[Request]) -> Generation:
        """The result of a request that ``add_request`` queued and that has ended."""
        return result_of(group, self.config.simulated_acceptance is not None)
