"""The routes."""

import time
from importlib import resources
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from specdec import __version__
from specdec.server.adapters import AdapterService
from specdec.server.errors import ApiError, as_api_error, model_not_found
from specdec.server.front import ServingEngine
from specdec.server.gate import Gate
from specdec.server.metrics import Metrics
from specdec.server.settings import ServerSettings
from specdec.server.stats import Snapshot, as_json, take_snapshot
from specdec.server.tell import tell_errors
from specdec.server.texts import TextService


def create_app(front: ServingEngine, settings: ServerSettings) -> FastAPI:
    """An application over a running engine, which stays the caller's to close."""
    app = FastAPI(title="specdec", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics()
    app.add_middleware(Gate, api_key=settings.api_key, requests=metrics.requests)
    tell_errors(app)
    texts = TextService(front, settings, metrics)
    adapters = AdapterService(front, settings)
    about = AboutService(front, settings, metrics)
    for path, method, endpoint in (
        ("/v1/completions", "POST", texts.completions),
        ("/v1/chat/completions", "POST", texts.chat_completions),
        ("/v1/load_lora_adapter", "POST", adapters.load),
        ("/v1/unload_lora_adapter", "POST", adapters.unload),
        ("/v1/models", "GET", about.models),
        ("/v1/models/{name:path}", "GET", about.model),
        ("/health", "GET", about.health),
        ("/metrics", "GET", about.metrics),
        ("/stats", "GET", about.stats),
        ("/", "GET", about.page),
    ):
        app.add_api_route(path, endpoint, methods=[method])
    return app


class AboutService:
    """What the server says about itself."""

    def __init__(self, front: ServingEngine, settings: ServerSettings, metrics: Metrics) -> None:
        self._front = front
        self._settings = settings
        self._metrics = metrics
        self._started = time.time()
        self._page = resources.files("specdec.server").joinpath("status.html").read_bytes()

    async def models(self) -> Response:
        names = [self._settings.model_name, *self._front.engine.loras]
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, name: str) -> Response:
        if name != self._settings.model_name and name not in self._front.engine.loras:
            raise model_not_found(name)
        return JSONResponse(self._model(name))

    async def health(self) -> Response:
        if self._front.has_failed:
            raise ApiError(503, "the engine has failed", code="engine_dead")
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        text = self._metrics.render(await self._snapshot())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def stats(self) -> Response:
        return JSONResponse(self._own_stats() | as_json(await self._snapshot()))

    async def page(self) -> Response:
        policy = "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
        return Response(self._page, media_type="text/html; charset=utf-8", headers=headers)

    async def _snapshot(self) -> Snapshot:
        try:
            snapshot: Snapshot = await self._front.call(take_snapshot, self._front)
        except Exception as error:
            raise as_api_error(error) or error from error
        return snapshot

    def _own_stats(self) -> dict[str, Any]:
        engine = self._front.engine
        return {
            "model": self._settings.model_name,
            "version": __version__,
            "device": str(engine.config.torch_device),
            "k": engine.k,
            "max_model_len": engine.max_model_len,
            "uptime_seconds": time.time() - self._started,
            "tokens_per_second": self._metrics.rate.per_second,
        }

    def _model(self, name: str) -> dict[str, Any]:
        base = self._settings.model_name
        return {
            "id": name,
            "object": "model",
            "created": int(self._started),
            "owned_by": "specdec",
            "parent": None if name == base else base,
            "max_model_len": self._front.engine.max_model_len,
        }
