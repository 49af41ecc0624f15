"""Keeps the replicas: starts, watches, restarts and drains them."""

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Container, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from specdec.replicas.plan import ServePlan
from specdec.replicas.routing import Router, RoutingKey
from specdec.replicas.worker_process import StartError, WorkerProcess
from specdec.server.errors import ApiError

_log = logging.getLogger(__name__)


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


# In other states its end is wanted, or known.
_RUNNING = (State.READY, State.DRAINING)
# From a connection's end to its process's, where that has ended.
_LOSS_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """In seconds.

    Attributes:
        probe_every, probe_timeout: a replica is asked for its health; after ``max_probes`` without
            an answer it is killed.
        first_pause, longest_pause: before a replica that ended by itself is restarted; doubled each
            time until it has been up for ``healthy_after``.
        wait_for_ready: a request waits as long for a replica.
    """

    probe_every: float = 2.0
    probe_timeout: float = 10.0
    max_probes: int = 3
    first_pause: float = 0.5
    longest_pause: float = 30.0
    healthy_after: float = 60.0
    wait_for_ready: float = 60.0


@dataclass(eq=False, slots=True)
class Replica:
    """A place for one process after the other."""

    number: int
    environ: Mapping[str, str]
    state: State = State.STARTING
    worker: WorkerProcess | None = None
    num_restarts: int = 0
    num_texts: int = 0  # that were sent there and have not ended
    num_requests: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "replica": self.number,
            "state": str(self.state),
            "requests": self.num_requests,
            "texts": self.num_texts,
            "restarts": self.num_restarts,
        }


@dataclass(slots=True)
class _Changes:
    """Wakes whoever waits for a condition on the replicas."""

    event: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        self.event.set()
        self.event = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.event.wait()


class Fleet:
    """``start`` it, then ``close`` it. ``catch_up`` is called with each worker before it serves.

    All methods are for one event loop.
    """

    def __init__(
        self,
        plan: ServePlan,
        environs: Sequence[Mapping[str, str]],
        *,
        router: "Router[int] | None" = None,
        timing: Timing | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self.replicas = [Replica(i, environ) for i, environ in enumerate(environs)]
        self.router: Router[int] = router if router is not None else Router()
        self.timing = timing if timing is not None else Timing()
        self.catch_up: Callable[[WorkerProcess], Any] | None = None
        self.is_ending = False
        self._plan = plan
        self._command = command
        self._folder = Path(tempfile.mkdtemp(prefix="specdec-"))
        self._keepers: list[asyncio.Task[None]] = []
        self._changes = _Changes()
        self._rolling: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_waiting = 0

    async def start(self) -> None:
        """Start all. Raises ValueError with what the first one says that does not start."""
        starts = [asyncio.create_task(self._start(replica)) for replica in self.replicas]
        try:
            await asyncio.gather(*starts)
        except StartError as error:
            raise ValueError(str(error)) from error
        finally:
            # Where one has failed the others are not waited for.
            for task in starts:
                task.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        self._keepers = [asyncio.create_task(self._keep(replica)) for replica in self.replicas]

    async def close(self) -> None:
        self.is_ending = True
        rolling = [self._rolling] if self._rolling is not None else []
        tasks = [*self._keepers, *self._tasks, *rolling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(r.worker.stop() for r in self.replicas if r.worker is not None))
        shutil.rmtree(self._folder, ignore_errors=True)

    async def end_all(self) -> None:
        """Every request is ended where it stands, by its replica, which tells its client."""
        self.is_ending = True
        for replica in self.replicas:
            if replica.worker is not None:
                replica.worker.terminate()

    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state is State.READY]

    async def choose(self, key: RoutingKey, without: Container[Any]) -> Replica | None:
        """A replica that takes requests; None where all such are in ``without``.

        Waits where there is none. Raises ApiError: 503 when none came, 429 where too many wait.
        """
        if not self.ready():
            await self._wait_for_ready()
        loads = {r.number: r.num_texts for r in self.ready() if r.worker not in without}
        if not loads:
            if self.is_ending:
                raise ApiError(503, "the server is shutting down", code="shutting_down")
            return None
        return self.replicas[self.router.choose(key, loads)]

    async def _wait_for_ready(self) -> None:
        if self._num_waiting >= self._plan.settings.max_waiting:
            raise ApiError(
                429,
                "no replica is ready, and too many requests wait for one",
                code="overloaded",
                headers={"Retry-After": "5"},
            )
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self.timing.wait_for_ready):
                await self._changes.until(lambda: bool(self.ready()) or self.is_ending)
        except TimeoutError as error:
            headers = {"Retry-After": "5"}
            raise ApiError(
                503, "no replica is ready", code="no_replica", headers=headers
            ) from error
        finally:
            self._num_waiting -= 1

    async def note_loss(self, replica: Replica, worker: WorkerProcess) -> None:
        """A connection has broken. Returns when it is known whether the process has ended."""
        with suppress(TimeoutError):
            await asyncio.wait_for(worker.wait(), _LOSS_SECONDS)
            if replica.worker is worker and replica.state in _RUNNING:
                self._set(replica, State.DOWN)

    @contextmanager
    def held(self, replica: Replica, num_texts: int) -> Iterator[None]:
        """Counts a request as long as the replica has it."""
        replica.num_texts += num_texts
        replica.num_requests += 1
        try:
            yield
        finally:
            replica.num_texts -= num_texts
            replica.num_requests -= 1
            self._changes.tell()

    @property
    def num_texts(self) -> int:
        return sum(replica.num_texts for replica in self.replicas)

    @property
    def is_rolling(self) -> bool:
        return self._rolling is not None and not self._rolling.done()

    def begin_rolling_restart(self) -> bool:
        """Restart all replicas, one after the other. False where that is being done already."""
        if self.is_rolling:
            return False
        self._rolling = asyncio.create_task(self._roll())
        return True

    def restart(self, replica: Replica, why: str) -> None:
        """End a replica at once, whatever it runs; its keeper starts it anew."""
        _log.error("replica %d is restarted: %s", replica.number, why)
        self._set(replica, State.DOWN)
        if replica.worker is not None:
            self._in_background(replica.worker.stop())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _roll(self) -> None:
        _log.warning("rolling restart of %d replicas", len(self.replicas))
        for replica in self.replicas:
            await self._changes.until(partial(self._is_another_ready, replica))
            if replica.state is not State.READY:
                # It has ended by itself, and is being restarted as it is.
                continue
            await self._drain(replica)
            await self._changes.until(partial(_is_settled, replica))
            if replica.state is State.DOWN:
                _log.error("rolling restart: replica %d did not come back", replica.number)
                return
        _log.warning("rolling restart: done")

    def _is_another_ready(self, replica: Replica) -> bool:
        return len(self.replicas) == 1 or any(other is not replica for other in self.ready())

    async def _drain(self, replica: Replica) -> None:
        """Restart a replica when its last request has ended. Requests have a time limit."""
        self._set(replica, State.DRAINING)
        await self._changes.until(
            lambda: not replica.num_requests or replica.state is not State.DRAINING
        )
        if replica.state is State.DRAINING and replica.worker is not None:
            self._set(replica, State.STARTING)
            await replica.worker.stop()

    async def _keep(self, replica: Replica) -> None:
        """Restart a replica whenever it has ended."""
        pause = self.timing.first_pause
        while True:
            began = time.monotonic()
            if replica.worker is not None:
                await self._watch(replica, replica.worker)
                self.router.forget(replica.number)
                replica.worker = None
            if self.is_ending:
                return
            if replica.state is not State.STARTING:
                if time.monotonic() - began > self.timing.healthy_after:
                    pause = self.timing.first_pause
                self._set(replica, State.DOWN)
                await asyncio.sleep(pause)
                pause = min(2 * pause, self.timing.longest_pause)
                self._set(replica, State.STARTING)
            replica.num_restarts += 1
            try:
                await self._start(replica)
            except StartError as error:
                _log.error("%s", error)
                self._set(replica, State.DOWN)

    async def _start(self, replica: Replica) -> None:
        # A name of its own: the process before may still be taking its socket away.
        socket = self._folder / f"{replica.number}.{replica.num_restarts}"
        try:
            worker = await WorkerProcess.start(self._plan, socket, replica.environ, self._command)
        except StartError as error:
            raise StartError(f"replica {replica.number}: {error}") from error
        replica.worker = worker
        try:
            if self.catch_up is not None:
                await self.catch_up(worker)
        except (httpx.HTTPError, StartError) as error:
            await worker.kill()
            replica.worker = None
            raise StartError(f"replica {replica.number}: {error}") from error
        self._set(replica, State.READY)

    async def _watch(self, replica: Replica, worker: WorkerProcess) -> None:
        """Returns when the process has ended, by itself or not."""
        probes = asyncio.create_task(self._probe(replica, worker))
        try:
            code = await worker.wait()
        finally:
            probes.cancel()
            await asyncio.gather(probes, return_exceptions=True)
        await worker.kill()
        if replica.state in _RUNNING:
            self._set(replica, State.DOWN)
        _log.log(
            logging.ERROR if code else logging.INFO,
            "replica %d: its process ended with code %d",
            replica.number,
            code,
        )

    async def _probe(self, replica: Replica, worker: WorkerProcess) -> None:
        """Kill a process that does not answer, or whose engine has failed."""
        missed = 0
        while missed < self.timing.max_probes:
            await asyncio.sleep(self.timing.probe_every)
            if replica.state not in _RUNNING:
                return
            try:
                answer = await worker.http.get("/health", timeout=self.timing.probe_timeout)
            except httpx.HTTPError:
                missed += 1
                continue
            missed = 0
            if answer.status_code != 200:
                self.restart(replica, f"its health is {answer.status_code}: {answer.text[:200]}")
                return
        self.restart(replica, f"it did not answer {missed} times")
        await worker.kill()

    def _set(self, replica: Replica, state: State) -> None:
        replica.state = state
        self._changes.tell()


def _is_settled(replica: Replica) -> bool:
    return replica.state in (State.READY, State.DOWN)
