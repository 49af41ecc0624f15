"""The front's process, from its replicas' start to the last answer."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable

from specdec.replicas.app import create_front
from specdec.replicas.fleet import Fleet
from specdec.replicas.plan import ServePlan, environments, gpus_of_replicas
from specdec.replicas.routing import Router
from specdec.server.listen import Server
from specdec.server.settings import ServerSettings


def serve_replicas(
    plan: ServePlan,
    settings: ServerSettings,
    bound: socket.socket,
    *,
    num_replicas: int,
    drain_timeout: float,
    on_ready: Callable[[list[str]], None],
) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP restarts the replicas one after the other.

    ``on_ready`` is given what each replica says of its graphs. Raises ValueError where a replica
    does not start, or there are fewer GPUs than replicas.
    """
    gpus_each = max(1, plan.fields.get("tensor_parallel_size", 1))
    gpus = gpus_of_replicas(num_replicas, plan.fields["device"], os.environ, gpus_each)
    environs = environments(num_replicas, gpus, os.environ, os.cpu_count() or 1)
    router: Router[int] = Router(max_adapters=plan.fields.get("max_loras") or 8)
    asyncio.run(_serve(plan, settings, bound, environs, router, drain_timeout, on_ready))


async def _serve(
    plan: ServePlan,
    settings: ServerSettings,
    bound: socket.socket,
    environs: list[dict[str, str]],
    router: Router[int],
    drain_timeout: float,
    on_ready: Callable[[list[str]], None],
) -> None:
    fleet = Fleet(plan, environs, router=router)

    def ready() -> None:
        on_ready([r.worker.about for r in fleet.replicas if r.worker is not None])

    try:
        await fleet.start()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, fleet.begin_rolling_restart)
        server = Server(create_front(fleet, settings), fleet, drain_timeout, ready)
        await server.serve(sockets=[bound])
    finally:
        await fleet.close()
