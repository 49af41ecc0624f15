"""Adapters are loaded into every replica, into those that start later too."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import httpx
from starlette.requests import Request
from starlette.responses import Response

from specdec.replicas.fleet import Fleet, Replica
from specdec.replicas.worker_process import StartError, WorkerProcess
from specdec.server.body import parse_object, read_body
from specdec.server.errors import ApiError
from specdec.server.settings import ServerSettings

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@dataclass(slots=True)
class _Journal:
    """What a replica that starts must be told: each adapter's last body, by name."""

    bodies: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    version: int = 0

    def note(self, path: str, name: str, body: bytes) -> None:
        # Anew, so that the order is that of the last calls.
        self.bodies.pop(name, None)
        self.bodies[name] = (path, body)
        self.version += 1


class FleetAdapters:
    """/v1/load_lora_adapter and /v1/unload_lora_adapter for all replicas.

    One replica is asked first; what it refuses is refused. Another one that does not follow is
    restarted, so that all have the same adapters.
    """

    def __init__(self, fleet: Fleet, settings: ServerSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._journal = _Journal()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        fleet.catch_up = self.catch_up

    async def load(self, request: Request) -> Response:
        return await self._tell_all(request, LOAD)

    async def unload(self, request: Request) -> Response:
        return await self._tell_all(request, UNLOAD)

    async def catch_up(self, worker: WorkerProcess) -> None:
        """Bring a replica that has just started to where the others are. Raises StartError."""
        version = -1
        while version != self._journal.version:
            version = self._journal.version
            for path, body in list(self._journal.bodies.values()):
                answer = await self._post(worker, path, body)
                # It may have been started with an adapter less.
                if answer.status_code not in (200, 404 if path == UNLOAD else 200):
                    raise StartError(f"{path}: {answer.text}")

    async def _tell_all(self, request: Request, path: str) -> Response:
        settings = self._settings
        body = await read_body(request, max_bytes=settings.max_body, timeout=settings.timeout)
        name = parse_object(body).get("lora_name")
        # The replica says what is wrong with another name.
        key = name if isinstance(name, str) else ""
        # Two calls for one name reach all replicas in one order.
        async with self._locks.setdefault(key, asyncio.Lock()):
            return await self._in_turn(path, key, body)

    async def _in_turn(self, path: str, name: str, body: bytes) -> Response:
        ready = self._fleet.ready()
        if not ready:
            raise ApiError(503, "no replica is ready", code="no_replica")
        first = ready[0]
        assert first.worker is not None
        try:
            answer = await self._post(first.worker, path, body)
        except httpx.HTTPError as error:
            message = f"replica {first.number} was lost: {error!r}"
            raise ApiError(503, message, code="replica_lost") from error
        if answer.status_code == 200:
            # Who becomes ready from now on has read it in the journal.
            self._journal.note(path, name, body)
            others = [replica for replica in self._fleet.ready() if replica is not first]
            await asyncio.gather(*(self._follow(replica, path, body) for replica in others))
        kind = answer.headers.get("content-type")
        return Response(answer.content, answer.status_code, media_type=kind)

    async def _follow(self, replica: Replica, path: str, body: bytes) -> None:
        worker = replica.worker
        assert worker is not None
        try:
            answer = await self._post(worker, path, body)
        except httpx.HTTPError:
            # Its keeper knows that it has ended.
            return
        if answer.status_code != 200 and replica.worker is worker:
            self._fleet.restart(replica, f"{path}: {_message(answer)}")

    async def _post(self, worker: WorkerProcess, path: str, body: bytes) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        return await worker.http.post(path, content=body, headers=headers)


def _message(answer: httpx.Response) -> Any:
    try:
        return answer.json()["error"]["message"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return answer.text[:200]
