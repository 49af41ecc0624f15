"""The server's process: from an engine to the last answer."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from specdec.engine import Engine
from specdec.server.app import create_app
from specdec.server.front import ServingEngine
from specdec.server.settings import ServerSettings

# What aborted requests have to tell their clients so before connections are cut.
_FAREWELL_SECONDS = 5


def bind(host: str, port: int) -> socket.socket:
    """A socket that nobody can connect to before it listens. Raises OSError naming the address."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(info[0], info[1])
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(info[4])
    except OSError as error:
        raise OSError(f"cannot serve on {host}:{port}: {error}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(bound: socket.socket) -> bool:
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def serve(
    engine: Engine,
    settings: ServerSettings,
    bound: socket.socket,
    *,
    drain_timeout: float,
    on_ready: Callable[[], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then end what runs, and close the engine.

    From the signal on nobody can connect. What runs is given ``drain_timeout`` seconds to end, then
    it is aborted and its clients are told.
    """
    front = ServingEngine(engine, max_waiting=settings.max_waiting)
    try:
        server = Server(create_app(front, settings), front, drain_timeout, on_ready)
        asyncio.run(server.serve(sockets=[bound]))
    finally:
        front.close()


class Server(uvicorn.Server):
    """uvicorn's server, with an end in two stages that is not a failure."""

    def __init__(
        self,
        app: FastAPI,
        front: ServingEngine,
        drain_timeout: float,
        on_ready: Callable[[], None],
    ) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=int(drain_timeout) + _FAREWELL_SECONDS,
        )
        super().__init__(config)
        self._front = front
        self._drain_timeout = drain_timeout
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        late = asyncio.create_task(self._abort_late())
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    async def _abort_late(self) -> None:
        await asyncio.sleep(self._drain_timeout)
        await self._front.call(self._front.abort_all)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            # uvicorn would raise the signal again, and the process would not exit with 0.
            self._captured_signals.clear()
