"""Answers that watch their client: server-sent events, and work that ends when the client goes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
# How long a client that reads nothing is given to take the reason why its stream ends.
_LAST_WORD_SECONDS = 1.0


class ClientGoneError(Exception):
    """The client closed the connection before it had its answer."""


def event(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes: ClientGoneError then.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Sends ``lines`` as they come.

    Args:
        lines: encoded events.
        on_error: makes the last event out of what ``lines`` raised, TimeoutError included.
        close: called once at the end, whatever it was.
        deadline: when all must have been sent, on the event loop's clock.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        lines: AsyncIterator[bytes],
        *,
        on_error: Callable[[Exception], bytes],
        close: Callable[[], None],
        deadline: float,
    ) -> None:
        self._lines = lines
        self._on_error = on_error
        self._close = close
        self._deadline = deadline
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGoneError:
            pass
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        async def send_body(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with asyncio.timeout_at(self._deadline):
                async for line in self._lines:
                    await send_body(line)
                await send_body(b"", more=False)
        except OSError as error:
            if not isinstance(error, TimeoutError):
                raise ClientGoneError from error
            async with asyncio.timeout(_LAST_WORD_SECONDS):
                await send_body(self._on_error(error), more=False)
        except Exception as error:
            await send_body(self._on_error(error), more=False)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
