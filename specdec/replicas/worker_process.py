"""A replica's process as its keeper sees it: started, asked, stopped."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from specdec.replicas.plan import ServePlan

COMMAND = (sys.executable, "-P", "-m", "specdec.replicas.worker")
# What a replica that is told to end has to close its engine in.
_STOP_SECONDS = 20.0
# Shorter than uvicorn's, so that no request goes out on a connection that is being closed.
_KEEP_ALIVE_SECONDS = 2.0
_CONNECT_SECONDS = 10.0


class StartError(Exception):
    """A replica's process did not become ready; the message says why."""


class WorkerProcess:
    """A process that serves on a Unix socket, which no other user can reach.

    ``http`` speaks to it; a request has no time limit but its caller's.
    """

    def __init__(self, process: asyncio.subprocess.Process, socket: Path) -> None:
        self._process = process
        self._socket = socket
        self._ended = asyncio.create_task(process.wait())
        self.about = ""
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=256,
            keepalive_expiry=_KEEP_ALIVE_SECONDS,
        )
        self.http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=limits),
            base_url="http://replica",
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
        )

    @classmethod
    async def start(
        cls,
        plan: ServePlan,
        socket: Path,
        environ: Mapping[str, str],
        command: Sequence[str] | None = None,
    ) -> "WorkerProcess":
        """A process that has said that it is ready. Raises StartError, and leaves no process.

        ``command`` speaks as ``specdec.replicas.worker`` does, which is the default.
        """
        command = command if command is not None else COMMAND
        socket.unlink(missing_ok=True)
        pipe = asyncio.subprocess.PIPE
        # A session of its own: Control-C is for the front, which ends it in order.
        try:
            process = await asyncio.create_subprocess_exec(
                *command, str(socket), stdin=pipe, stdout=pipe, env=environ, start_new_session=True
            )
        except OSError as error:
            raise StartError(f"its process does not start: {error}") from error
        worker = cls(process, socket)
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(plan.to_json().encode() + b"\n")
            line = await process.stdout.readline()
            try:
                said = json.loads(line or b"{}")
            except ValueError as error:
                raise StartError(f"its process said {line[:200]!r}") from error
            if "ready" not in said:
                code = await worker.wait()
                raise StartError(said.get("error", f"its process ended with code {code}"))
            worker.about = said["ready"]
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Its return code, once it has ended."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """Tell it to end: what still runs there is told, and it takes no more."""
        if not self._ended.done():
            self._process.terminate()

    async def stop(self) -> None:
        """Terminate it, and kill it where it does not end."""
        self.terminate()
        try:
            await asyncio.wait_for(self.wait(), _STOP_SECONDS)
        except TimeoutError:
            pass
        finally:
            await self.kill()

    async def kill(self) -> None:
        if not self._ended.done():
            self._process.kill()
        await self.wait()
        await self.http.aclose()
        self._socket.unlink(missing_ok=True)
