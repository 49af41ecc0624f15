"""An asyncio front: many callers, one engine, which runs in a thread of its own."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from specdec.engine import Engine
from specdec.errors import EngineDeadError, EngineOverloadedError
from specdec.format_threads import FormatThreads
from specdec.intake import Prompt
from specdec.outputs import Generation, StreamEvent
from specdec.params import SamplingParams
from specdec.request import Request

logger = logging.getLogger(__name__)

# Failed steps one after the other after which the engine counts as broken.
MAX_FAILED_STEPS = 3
# A format that takes longer is refused. What has begun to compile goes on in its thread.
COMPILE_SECONDS = 20.0


@dataclass(eq=False, slots=True)
class _Caller:
    """A request in the engine and the coroutine that reads it."""

    group: list[Request]
    loop: asyncio.AbstractEventLoop
    events: "asyncio.Queue[StreamEvent | BaseException | None]"
    streamed: bool

    def send(self, item: StreamEvent | BaseException | None) -> None:
        # A closed event loop refuses: nobody reads this any more.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.events.put_nowait, item)


class AsyncEngine:
    """Serves concurrent callers from one ``Engine``.

    All calls of the engine happen in one thread, which steps it while there is work and sleeps
    otherwise. A caller that is cancelled, or stops iterating, aborts its request; a slow reader
    holds up nobody, since what it has not read is at most its own ``max_new_tokens``. Not more than
    ``max_waiting`` requests are held at once. A request whose steps fail ends with
    ``finish_reason`` "error", and ``error`` of its last event or Generation says why; all others
    go on.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 1024) -> None:
        self.engine = engine
        self.max_waiting = max_waiting
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._callers: set[_Caller] = set()
        self._held = 0
        self._held_lock = threading.Lock()
        self._failure: BaseException | None = None
        self._closing = False
        self._failed_steps = 0
        self._compilers = FormatThreads()
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="specdec-adapter")
        # The current device is one of a thread's own: the engine's thread takes its maker's.
        self._cuda_device = torch.cuda.current_device() if engine.device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
        self._thread.start()

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._callers)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, lora: str | None = None
    ) -> AsyncIterator[StreamEvent]:
        """Generate one prompt, yielding what each step adds.

        Raises what ``Engine.stream`` raises for a bad request, EngineOverloadedError, and
        EngineDeadError.
        """
        caller = await self._submit(prompt, params, lora, streamed=True)
        try:
            while (item := await caller.events.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._leave(caller)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, lora: str | None = None
    ) -> Generation:
        """The whole result of one prompt."""
        caller = await self._submit(prompt, params, lora)
        try:
            while (item := await caller.events.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
            return self.engine.generation(caller.group)
        finally:
            self._leave(caller)

    async def add_lora(
        self, name: str, path: str | Path, draft_path: str | Path | None = None
    ) -> None:
        """``Engine.add_lora``, with the files read outside the engine's thread."""
        loop = asyncio.get_running_loop()
        read = await loop.run_in_executor(self._readers, self.engine.read_lora, path, draft_path)
        await self.call(self.engine.add_lora, name, read)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run ``function`` between two steps, for what must not meet one (adapters, statistics)."""
        return await asyncio.wrap_future(self._enqueue(function, *arguments))

    async def aclose(self) -> None:
        """Abort what runs, stop the thread and close the engine."""
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._commands.put(None)
        self._thread.join()
        self._compilers.close()
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # -- the callers' side ------------------------------------------------------------------------

    async def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        lora: str | None,
        *,
        streamed: bool = False,
    ) -> _Caller:
        with self._held_lock:
            if self._held >= self.max_waiting:
                raise EngineOverloadedError(
                    f"{self._held} requests run or wait; max_waiting is {self.max_waiting}"
                )
            self._held += 1
        caller = _Caller([], asyncio.get_running_loop(), asyncio.Queue(), streamed)
        try:
            if params is not None and params.response_format is not None:
                await self._prepare(params.response_format)
            await asyncio.wrap_future(self._enqueue(self._add, caller, prompt, params, lora))
        except BaseException:
            self._leave(caller)
            raise
        return caller

    def _leave(self, caller: _Caller) -> None:
        with self._held_lock:
            self._held -= 1
        self._commands.put(lambda: self._drop(caller))

    async def _prepare(self, response_format: object) -> None:
        """Compile a format outside the engine's thread, where it would hold up every step."""
        work = self._compilers.submit(COMPILE_SECONDS, self.engine.prepare_format, response_format)
        try:
            await asyncio.wrap_future(work)
        except TimeoutError as error:
            raise ValueError(
                f"response_format: it had not been compiled after {COMPILE_SECONDS:g} s"
            ) from error

    def _enqueue(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

        if self._failure is not None:
            raise EngineDeadError("the engine has failed") from self._failure
        if self._closing:
            raise RuntimeError("the engine is closed")
        self._commands.put(run)
        return future

    # -- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._cuda_device is not None:
                torch.cuda.set_device(self._cuda_device)
            while self._take_commands():
                if self._callers:
                    self._step()
                    self._send_events()
        except BaseException as error:
            self._failure = error
            dead = EngineDeadError("the engine has failed")
            dead.__cause__ = error
            for caller in self._callers:
                caller.send(dead)
            self._callers.clear()
            self._refuse_commands()
        else:
            for caller in self._callers:
                caller.send(RuntimeError("the engine was closed"))
            self._callers.clear()
            self.engine.close()
            self._refuse_commands()

    def _step(self) -> None:
        """What a step raises is no request's fault; a row of such failures is final."""
        try:
            self.engine.step()
            self._failed_steps = 0
        except Exception:
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise
            logger.exception("a step failed")

    def _take_commands(self) -> bool:
        """Run what callers asked for; wait for it where there is nothing else. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self._callers)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _refuse_commands(self) -> None:
        """Let callers that came too late find out."""
        self._closing = True
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()

    def _add(
        self, caller: _Caller, prompt: Prompt, params: SamplingParams | None, lora: str | None
    ) -> None:
        if self._failure is not None:
            raise EngineDeadError("the engine has failed") from self._failure
        caller.group = self.engine.add_request(prompt, params, lora, streamed=caller.streamed)
        self._callers.add(caller)

    def _drop(self, caller: _Caller) -> None:
        """The caller has gone: abort whatever of its request still runs."""
        if caller in self._callers:
            self._callers.discard(caller)
            for request in caller.group:
                self.engine.abort(request.id)

    def _send_events(self) -> None:
        for caller in list(self._callers):
            for request in caller.group:
                while request.events:
                    caller.send(request.events.popleft())
            if all(request.finish_reason is not None for request in caller.group):
                self._callers.discard(caller)
                caller.send(None)
