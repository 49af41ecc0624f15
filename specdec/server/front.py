"""The engine as the server sees it: several prompts a request, read while they run."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.async_engine import AsyncEngine
from specdec.engine import Engine
from specdec.errors import EngineOverloadedError
from specdec.intake import Prompt
from specdec.outputs import StreamEvent
from specdec.params import SamplingParams
from specdec.request import Request
from specdec.server.errors import ModelNotFoundError


@dataclass(slots=True)
class Piece:
    """What was added to text ``number`` of a job since it was last read."""

    number: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    error: str | None = None

    def add(self, event: StreamEvent) -> None:
        self.text += event.text
        self.token_ids += event.token_ids
        self.finish_reason = event.finish_reason
        self.error = event.error


class Job:
    """The texts of one HTTP request. ``close`` must be called; it aborts what still runs.

    ``texts`` are in the order of OpenAI's ``index``: all choices of the first prompt, then those
    of the second.
    """

    def __init__(self, front: "ServingEngine", callers: Sequence[Any], num_texts: int) -> None:
        self._front = front
        self._callers = callers
        self._num_texts = num_texts
        self._pumps: list[asyncio.Task[None]] = []
        self._closed = False
        self.texts: list[Request] = [text for caller in callers for text in caller.group]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(caller.group[0].prompt_ids) for caller in self._callers)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What steps add, until all texts have ended: one piece a text, for all its events so far.

        Raises what ended the engine.
        """
        numbers = {(text.id, text.index): i for i, text in enumerate(self.texts)}
        events = self._merged()
        running = len(self._callers)
        while running:
            pieces: dict[int, Piece] = {}
            item = await events.get()
            while True:
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    number = numbers[item.request_id, item.index]
                    piece = pieces.setdefault(number, Piece(number, "", [], None))
                    piece.add(item)
                if events.empty():
                    break
                item = events.get_nowait()
            if pieces:
                yield list(pieces.values())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for pump in self._pumps:
                pump.cancel()
            self._front.end(self._callers, self._num_texts)

    def _merged(self) -> "asyncio.Queue[Any]":
        if len(self._callers) == 1:
            return self._callers[0].events
        merged: asyncio.Queue[Any] = asyncio.Queue()

        async def pump(source: "asyncio.Queue[Any]") -> None:
            item: Any = True
            while item is not None and not isinstance(item, BaseException):
                item = await source.get()
                merged.put_nowait(item)

        self._pumps = [asyncio.create_task(pump(caller.events)) for caller in self._callers]
        return merged


class ServingEngine(AsyncEngine):
    """An ``AsyncEngine`` that takes several prompts at once and counts texts, not prompts."""

    def __init__(self, engine: Engine, *, max_waiting: int) -> None:
        """``max_waiting``: texts that may run or wait."""
        super().__init__(engine, max_waiting=max_waiting)
        self._num_texts = 0

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def count_texts(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        """The texts of one request. Raises ValueError where the server never holds as many."""
        num_texts = len(prompts) * params.n
        if num_texts > self.max_waiting:
            raise ValueError(
                f"n: {num_texts} texts in one request; this server holds {self.max_waiting}"
            )
        return num_texts

    async def start(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        lora: str | None,
        *,
        streamed: bool = False,
    ) -> Job:
        """Queue all prompts, or none where one of them is refused.

        Raises what ``Engine.add_request`` raises, ModelNotFoundError for an adapter that is not
        loaded, EngineOverloadedError and EngineDeadError.
        """
        num_texts = self.count_texts(prompts, params)
        if self._num_texts + num_texts > self.max_waiting:
            raise EngineOverloadedError(
                f"{self._num_texts} texts run or wait and {num_texts} more were asked for; this "
                f"server holds {self.max_waiting}"
            )
        self._num_texts += num_texts
        tasks = [
            asyncio.create_task(self._submit(prompt, params, lora, streamed=streamed))
            for prompt in prompts
        ]
        try:
            callers = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            started = [t.result() for t in tasks if not t.cancelled() and t.exception() is None]
            self.end(started, num_texts)
            raise
        return Job(self, callers, num_texts)

    def end(self, callers: Sequence[Any], num_texts: int) -> None:
        """A job is over; what it still runs is aborted."""
        self._num_texts -= num_texts
        for caller in callers:
            self._leave(caller)

    def running(self) -> list[Request]:
        """The texts in the engine. To be called in its thread."""
        return [text for caller in self._callers for text in caller.group]

    def abort_all(self) -> None:
        """End every text where it stands; its reader is told. To be called in its thread."""
        for text in self.running():
            self.engine.abort(text.id)

    async def end_all(self) -> None:
        await self.call(self.abort_all)

    def _add(
        self, caller: Any, prompt: Prompt, params: SamplingParams | None, lora: str | None
    ) -> None:
        # Between the look at the list of models and now the adapter may have been unloaded.
        if lora is not None and lora not in self.engine.loras:
            raise ModelNotFoundError(lora)
        super()._add(caller, prompt, params, lora)
