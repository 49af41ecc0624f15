"""The server's process: from an engine to the last answer."""

import asyncio
import socket
from collections.abc import Callable

from specdec.engine import Engine
from specdec.server.app import create_app
from specdec.server.front import ServingEngine
from specdec.server.listen import Server
from specdec.server.settings import ServerSettings


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
