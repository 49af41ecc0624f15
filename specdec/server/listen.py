"""Sockets, and uvicorn's server with an end in two stages."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from specdec.server.connection import Connection

# What aborted requests have to tell their clients so before connections are cut.
_FAREWELL_SECONDS = 5


class Abortable(Protocol):
    """What runs behind a server."""

    async def end_all(self) -> None:
        """End every request where it stands, and tell its client."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that nobody can connect to before it listens. Raises OSError naming the address."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sets TCP_NODELAY only where the protocol is named, and without it a small answer
        # waits 40 ms for the acknowledgement of the one before.
        bound = socket.socket(*info[:3])
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


class Server(uvicorn.Server):
    """uvicorn's server, with an end in two stages that is not a failure."""

    def __init__(
        self,
        app: ASGIApp,
        behind: Abortable,
        drain_timeout: float,
        on_ready: Callable[[], None],
    ) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=int(drain_timeout) + _FAREWELL_SECONDS,
        )
        super().__init__(config)
        self._behind = behind
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
        await self._behind.end_all()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            # uvicorn would raise the signal again, and the process would not exit with 0.
            self._captured_signals.clear()
