"""Passes a request to a replica and its answer back, and to another one where that may be done.

Nothing that a client has seen is ever begun anew: until then a request whose replica is lost, or
takes no more, goes to another one; after it the stream ends with an event that says why.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from specdec.replicas.routing import RoutingKey
from specdec.server.errors import CLIENT_GONE, ApiError, as_api_error
from specdec.server.sse import ClientGoneError, EventStream, event, while_connected

_log = logging.getLogger(__name__)
# A request that was in a replica as often when that was lost may be what loses them.
MAX_LOST = 2
# Of those that were not even reached.
MAX_TRIES = 8
# The replica's own time limit comes first; this one is for a replica that has stopped.
_GRACE_SECONDS = 10.0
# What a replica says that takes no more requests, or none now.
_REFUSALS = ("engine_dead", "shutting_down", "overloaded")
_PASSED_ON = ("content-type", "retry-after", "x-should-retry")
_END = b"\n\n"


class ReplicaLostError(Exception):
    """A replica went before its answer was whole."""

    def __init__(self, why: str, *, was_sent: bool) -> None:
        """``was_sent``: the request had reached it."""
        super().__init__(why)
        self.was_sent = was_sent


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    path: str
    body: bytes
    key: RoutingKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A replica's answer.

    Attributes:
        replica: what ``without`` knows it by.
        headers: lower-case names.
        chunks: raises ReplicaLostError.
    """

    replica: Hashable
    status: int
    headers: dict[str, str]
    chunks: AsyncIterator[bytes]

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


class Open(Protocol):
    def __call__(
        self, call: Call, without: set[Hashable]
    ) -> AbstractAsyncContextManager[Reply | None]:
        """A replica's answer while it comes; leaving it early aborts the request there.

        None where no replica outside ``without`` takes requests. Raises ReplicaLostError, and
        ApiError where there is no replica at all.
        """


class Forwarder:
    """Answers requests for texts with what a replica answers."""

    def __init__(
        self, open_reply: Open, *, timeout: float, count: Callable[[str], None] = lambda why: None
    ) -> None:
        """
        Args:
            open_reply: sends a request to a replica that it chooses.
            timeout: seconds that a replica gives a request.
            count: is told of each request that goes to another replica: "lost" or "refused".
        """
        self._open = open_reply
        self._timeout = timeout + _GRACE_SECONDS
        self._count = count
        self._closing: set[asyncio.Task[Any]] = set()

    async def answer(self, request: Request, call: Call) -> Response:
        """``request``'s body must have been read."""
        deadline = asyncio.get_running_loop().time() + self._timeout

        async def work() -> Response:
            async with asyncio.timeout_at(deadline):
                return await self._answer(call, deadline)

        try:
            return await while_connected(request.receive, work())
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        except TimeoutError as error:
            raise as_api_error(error) or error from error

    async def _answer(self, call: Call, deadline: float) -> Response:
        without: set[Hashable] = set()
        num_lost = num_tries = 0
        refusal: Response | None = None
        while True:
            async with AsyncExitStack() as stack:
                try:
                    reply = await stack.enter_async_context(self._open(call, without))
                    if reply is None:
                        return refusal or _lost("no other replica is ready").response()
                    start = await _start_of(reply)
                except ReplicaLostError as error:
                    # It may be asked again, if it has only closed an idle connection.
                    num_lost += error.was_sent
                    num_tries += 1
                    self._count("lost")
                    if num_lost >= MAX_LOST or num_tries >= MAX_TRIES:
                        return _lost(str(error)).response()
                    continue
                if start.is_refusal:
                    refusal = start.response()
                    without.add(reply.replica)
                    self._count("refused")
                    continue
                if start.rest is None:
                    return start.response()
                held = stack.pop_all()
                return EventStream(
                    _lines(start.body, start.rest),
                    on_error=_last_event,
                    close=partial(self._close_later, held),
                    deadline=deadline,
                )

    def _close_later(self, held: AsyncExitStack) -> None:
        task = asyncio.ensure_future(held.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """An answer as far as it decides whether it is passed on.

    Attributes:
        body: all of it, or the events up to the first that has something to show.
        rest: the events after that; None where ``body`` is all.
        code: of an error that it begins with.
    """

    reply: Reply
    body: bytes
    rest: AsyncIterator[bytes] | None
    code: str | None

    @property
    def is_refusal(self) -> bool:
        return self.code in _REFUSALS

    def response(self) -> Response:
        if self.rest is not None:
            message = "the replica takes no more requests"
            return ApiError(503, message, code=self.code).response()
        names = self.reply.headers
        headers = {name: names[name] for name in _PASSED_ON if name in names}
        return Response(self.body, self.reply.status, headers)


async def _start_of(reply: Reply) -> _Start:
    if not reply.is_stream:
        body = b"".join([chunk async for chunk in reply.chunks])
        code = _code(body) if reply.status in (429, 503) else None
        return _Start(reply=reply, body=body, rest=None, code=code)
    rest, held, code = _blocks(reply.chunks), b"", None
    async for block in rest:
        held += block
        says, code = _reads(block)
        if says:
            break
    return _Start(reply=reply, body=held, rest=rest, code=code)


async def _lines(start: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield start
    async for block in rest:
        yield block


async def _blocks(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole events: what a replica had written of one when it was lost is of no use."""
    rest = b""
    async for chunk in chunks:
        rest += chunk
        end = rest.rfind(_END)
        if end >= 0:
            end += len(_END)
            yield rest[:end]
            rest = rest[end:]


def _reads(block: bytes) -> tuple[bool, str | None]:
    """Whether events have anything to show, and the code where one of them is an error."""
    for line in block.split(_END):
        if not line.startswith(b"data: {"):
            if line:
                return True, None
            continue
        value = json.loads(line.removeprefix(b"data: "))
        if "error" in value:
            return True, value["error"].get("code")
        for choice in value.get("choices", ()):
            # A chat's first event names the role and no more.
            shown = choice.get("text") or choice.get("delta", {}).get("content")
            if shown or choice.get("finish_reason") or choice.get("token_ids"):
                return True, None
    return False, None


def _code(body: bytes) -> str | None:
    try:
        code: str | None = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return code


def _lost(why: str) -> ApiError:
    # OpenAI's client would send it again, to the next replica.
    headers = {"x-should-retry": "false"}
    message = f"the replica that ran this request was lost: {why}"
    return ApiError(503, message, code="replica_lost", headers=headers)


def _last_event(error: Exception) -> bytes:
    match error:
        case ReplicaLostError():
            told = _lost(str(error))
        case ApiError() | TimeoutError():
            told = as_api_error(error) or ApiError(500, "internal server error")
        case _:
            _log.error("a stream failed", exc_info=error)
            told = ApiError(500, "internal server error")
    return event(told.body)
