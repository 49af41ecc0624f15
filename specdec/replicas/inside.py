"""An ASGI application called from inside its process, its answer read while it comes."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp, Message

Head = tuple[int, dict[str, str]]


async def call_app(
    app: ASGIApp, method: str, path: str, body: bytes = b""
) -> AsyncGenerator[Head | bytes, None]:
    """First the answer's status and headers (lower-case names), then its chunks.

    Closing it early is to ``app`` what a client's leaving is.
    """
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }
    request: Message | None = {"type": "http.request", "body": body, "more_body": False}
    has_left = asyncio.Event()
    # Of one message, so that whoever reads slowly slows the sender, as a socket does.
    messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=1)

    async def receive() -> Message:
        nonlocal request
        if request is not None:
            first, request = request, None
            return first
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if not has_left.is_set():
            await messages.put(message)

    async def run() -> None:
        try:
            await app(scope, receive, send)
        finally:
            if not has_left.is_set():
                await messages.put(None)

    running = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                names = {name.decode(): value.decode() for name, value in message["headers"]}
                yield message["status"], names
            elif message.get("body"):
                yield message["body"]
        await running
    finally:
        has_left.set()
        # What waits for room in the queue must see it.
        while not messages.empty():
            messages.get_nowait()
        await asyncio.gather(running, return_exceptions=True)
