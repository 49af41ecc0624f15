"""The front's routes: those of one server, answered by its replicas."""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from specdec.replicas.adapters import LOAD, UNLOAD, FleetAdapters
from specdec.replicas.fleet import Fleet, Replica
from specdec.replicas.forward import Call, Forwarder, ReplicaLostError, Reply
from specdec.replicas.metrics import FrontMetrics, merged
from specdec.replicas.routing import routing_key
from specdec.server.body import parse_object, read_body
from specdec.server.errors import ApiError
from specdec.server.gate import Gate
from specdec.server.settings import ServerSettings
from specdec.server.tell import tell_errors

TEXT_ROUTES = ("/v1/completions", "/v1/chat/completions")
_ASK_SECONDS = 10.0


def create_front(fleet: Fleet, settings: ServerSettings) -> FastAPI:
    """An application over a started fleet, which stays the caller's to close."""
    app = FastAPI(title="specdec", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = FrontMetrics(fleet)
    app.add_middleware(Gate, api_key=settings.api_key, requests=metrics.requests)
    tell_errors(app)
    forwarder = Forwarder(WorkerReplies(fleet), timeout=settings.timeout, count=metrics.retry)
    texts = ForwardedTexts(forwarder, settings)
    adapters = FleetAdapters(fleet, settings)
    about = AboutFleet(fleet, settings, metrics)
    routes: list[tuple[str, str, Callable[..., Any]]] = [
        *((path, "POST", texts.answer) for path in TEXT_ROUTES),
        (LOAD, "POST", adapters.load),
        (UNLOAD, "POST", adapters.unload),
        ("/v1/restart_replicas", "POST", about.restart),
        ("/v1/models", "GET", about.from_any),
        ("/v1/models/{name:path}", "GET", about.from_any),
        ("/health", "GET", about.health),
        ("/metrics", "GET", about.metrics),
        ("/replicas/{number}/stats", "GET", about.stats),
        ("/", "GET", about.page),
    ]
    for path, method, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method])
    return app


class WorkerReplies:
    """Opens replies of a fleet's worker processes, as ``Forwarder`` wants them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    @asynccontextmanager
    async def __call__(self, call: Call, without: set[Hashable]) -> AsyncIterator[Reply | None]:
        replica = await self._fleet.choose(call.key, without)
        if replica is None or replica.worker is None:
            yield None
            return
        worker = replica.worker
        with self._fleet.held(replica, call.key.num_texts):
            headers = {"Content-Type": "application/json"}
            request = worker.http.build_request(
                "POST", call.path, content=call.body, headers=headers
            )
            try:
                response = await worker.http.send(request, stream=True)
            except httpx.TransportError as error:
                await self._fleet.note_loss(replica, worker)
                was_sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                raise ReplicaLostError(repr(error), was_sent=was_sent) from error

            async def chunks() -> AsyncIterator[bytes]:
                try:
                    async for chunk in response.aiter_raw():
                        yield chunk
                except (httpx.TransportError, httpx.StreamError) as error:
                    await self._fleet.note_loss(replica, worker)
                    raise ReplicaLostError(repr(error), was_sent=True) from error

            try:
                yield Reply(
                    replica=worker,
                    status=response.status_code,
                    headers=dict(response.headers),
                    chunks=chunks(),
                )
            finally:
                await response.aclose()


class ForwardedTexts:
    """/v1/completions and /v1/chat/completions."""

    def __init__(self, forwarder: Forwarder, settings: ServerSettings) -> None:
        self._forwarder = forwarder
        self._settings = settings

    async def answer(self, request: Request) -> Response:
        settings = self._settings
        body = await read_body(request, max_bytes=settings.max_body, timeout=settings.timeout)
        key = routing_key(parse_object(body), settings.model_name)
        call = Call(path=request.url.path, body=body, key=key)
        return await self._forwarder.answer(request, call)


class AboutFleet:
    """What the front says about its replicas, and their rolling restart."""

    def __init__(self, fleet: Fleet, settings: ServerSettings, metrics: FrontMetrics) -> None:
        self._fleet = fleet
        self._settings = settings
        self._metrics = metrics

    async def health(self) -> Response:
        num_ready = len(self._fleet.ready())
        replicas = [replica.as_dict() for replica in self._fleet.replicas]
        about = {"replicas": replicas, "rolling_restart": self._fleet.is_rolling}
        if not num_ready:
            error = ApiError(503, "no replica is ready", code="no_replica")
            return JSONResponse(error.body | about, 503)
        status = "ok" if num_ready == len(replicas) else "degraded"
        return JSONResponse({"status": status} | about)

    async def restart(self) -> Response:
        """Begin a rolling restart. It is over when /health says so."""
        if self._settings.api_key is None:
            message = "replicas are restarted over HTTP only with --api-key; or send SIGHUP"
            raise ApiError(404, message, code="not_enabled")
        if not self._fleet.begin_rolling_restart():
            raise ApiError(409, "the replicas are being restarted already", code="in_progress")
        return JSONResponse({"status": "restarting"}, 202)

    async def from_any(self, request: Request) -> Response:
        """What any replica says."""
        for replica in self._fleet.ready():
            answer = await self._ask(replica, request.url.path)
            if answer is not None:
                return _copy(answer)
        raise ApiError(503, "no replica is ready", code="no_replica")

    async def metrics(self) -> Response:
        ready = self._fleet.ready()
        answers = await asyncio.gather(*(self._ask(replica, "/metrics") for replica in ready))
        texts = {
            str(replica.number): answer.text
            for replica, answer in zip(ready, answers, strict=True)
            if answer is not None and answer.status_code == 200
        }
        text = merged(self._metrics.registry, texts)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def stats(self, number: str) -> Response:
        """One replica's /stats."""
        for replica in self._fleet.replicas:
            if number == str(replica.number):
                answer = await self._ask(replica, "/stats")
                if answer is None:
                    raise ApiError(503, f"replica {number} is {replica.state}", code="no_replica")
                return _copy(answer)
        raise ApiError(404, f"there is no replica {number!r}", code="no_replica")

    async def page(self) -> Response:
        rows = "".join(
            f"<tr><td><a href='/replicas/{r.number}/stats'>{r.number}</a><td>{r.state}"
            f"<td>{r.num_texts}<td>{r.num_restarts}"
            for r in self._fleet.replicas
        )
        head = "<tr><th>replica<th>state<th>texts<th>restarts"
        policy = "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
        return HTMLResponse(
            f"<!doctype html><title>specdec</title><table>{head}{rows}</table>",
            headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"},
        )

    async def _ask(self, replica: Replica, path: str) -> httpx.Response | None:
        """None where it does not answer."""
        if replica.worker is None:
            return None
        try:
            return await replica.worker.http.get(path, timeout=_ASK_SECONDS)
        except httpx.HTTPError:
            return None


def _copy(answer: httpx.Response) -> Response:
    kind = answer.headers.get("content-type")
    return Response(answer.content, answer.status_code, media_type=kind)
