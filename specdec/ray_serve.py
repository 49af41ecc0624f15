"""specdec on Ray Serve: ``serve run specdec.ray_serve:app model=PATH replicas=2``.

Two deployments: ``engine``, whose replicas hold an engine each and the whole server's application
with it, and ``front``, which checks the key, routes and forwards. Needs the extra ``ray``.
"""

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, field_validator
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec.replicas.app import TEXT_ROUTES, ForwardedTexts
from specdec.replicas.forward import Call, Forwarder, ReplicaLostError, Reply
from specdec.replicas.inside import Head, call_app
from specdec.replicas.metrics import FrontMetrics, merged
from specdec.replicas.plan import ServePlan
from specdec.replicas.routing import Router, RoutingKey
from specdec.server.command import DEFAULT_NAME, draft_width, named_paths
from specdec.server.errors import ApiError
from specdec.server.gate import Gate
from specdec.server.settings import ServerSettings
from specdec.server.tell import tell_errors

_ENGINES = "engine"
_ASK_SECONDS = 10.0
# Beyond the requests' own time limit, for a replica that is replaced.
_GRACE_SECONDS = 30.0


class Options(BaseModel):
    """What ``serve run`` takes, as NAME=VALUE or in a configuration file's ``args``.

    Attributes:
        model, draft, k, served_model_name, api_key, max_waiting, max_body, timeout, device: as of
            ``specdec serve``; the key's default is SPECDEC_API_KEY where this is read.
        replicas: engines; each takes one GPU, unless ``device`` is "cpu".
        num_cpus: that Ray sets aside for each.
        lora: adapters by name, or "NAME=PATH,NAME=PATH".
        engine: further fields of the engine, or their JSON.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    draft: str = "auto"
    k: str = "4"
    replicas: int = 1
    num_cpus: float = 1.0
    device: str = "auto"
    lora: dict[str, str] = {}
    engine: dict[str, Any] = {}
    served_model_name: str | None = None
    api_key: str | None = None
    max_waiting: int = 1024
    max_body: int = 4 << 20
    timeout: float = 600.0

    @field_validator("lora", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        return named_paths("lora", value.split(",")) if isinstance(value, str) else value

    @field_validator("engine", mode="before")
    @classmethod
    def _parsed(cls, value: object) -> object:
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("k", mode="before")
    @classmethod
    def _text(cls, value: object) -> object:
        return str(value)


def app(args: Options) -> serve.Application:
    """The application that ``serve run`` deploys. Raises ValueError naming the option."""
    key = args.api_key if args.api_key is not None else os.environ.get("SPECDEC_API_KEY")
    settings = ServerSettings(
        model_name=args.served_model_name or args.model or DEFAULT_NAME,
        api_key=key,
        max_waiting=args.max_waiting,
        max_body=args.max_body,
        timeout=args.timeout,
    )
    if settings.model_name in args.lora:
        raise ValueError(f"lora: {settings.model_name!r} is what the base model is called")
    application: serve.Application = _front(args, settings).bind(_engines(args, settings))
    return application


def _engines(args: Options, settings: ServerSettings) -> serve.Application:
    plan = ServePlan(
        model=args.model,
        draft=None if args.draft.lower() == "none" else args.draft,
        k=draft_width(args.k),
        fields={"device": args.device, **args.engine},
        # The front asks for the key; nobody else reaches the engines.
        settings=replace(settings, api_key=None),
    )
    num_gpus = 0 if args.device == "cpu" else 1
    deployment = serve.deployment(
        name=_ENGINES,
        num_replicas=args.replicas,
        ray_actor_options={"num_cpus": args.num_cpus, "num_gpus": num_gpus},
        request_router_config={
            "request_router_class": "specdec.ray_serve:AffinityRouter",
            "request_router_kwargs": {"max_adapters": args.engine.get("max_loras") or 8},
        },
        # Not among the arguments of the class: where only this is another one, Ray keeps the
        # processes and tells them.
        user_config={"lora": args.lora},
        # An engine bounds the texts that it holds and says so; Ray's bound is not to be met first.
        max_ongoing_requests=args.max_waiting + 1,
        graceful_shutdown_timeout_s=args.timeout + _GRACE_SECONDS,
    )
    return deployment(EngineReplica).bind(plan)


def _front(args: Options, settings: ServerSettings) -> serve.Deployment:
    def build() -> FastAPI:
        name = serve.get_replica_context().app_name
        return create_ray_front(serve.get_deployment_handle(_ENGINES, name), settings)

    deployment = serve.deployment(
        name="front",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=args.replicas * args.max_waiting + 1,
        graceful_shutdown_timeout_s=args.timeout + _GRACE_SECONDS,
    )
    return deployment(serve.ingress(build)())


class EngineReplica:
    """An engine with the whole server's application, which is called inside the process."""

    def __init__(self, plan: ServePlan) -> None:
        self._plan = plan
        self._name = serve.get_replica_context().replica_id.unique_id
        self._paths: dict[str, str] | None = None

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Takes the adapters of ``user_config``: all of them, before the replica is ready, too.

        Requests on an adapter that is unloaded, or replaced, end on it.
        """
        paths: dict[str, str] = dict(config["lora"])
        if self._paths is None:
            self._start(paths)
        else:
            for name in self._paths.keys() - paths.keys():
                await self._front.call(lambda name=name: self._engine.remove_lora(name, wait=False))
            for name, path in paths.items():
                if self._paths.get(name) != path:
                    await self._front.add_lora(name, Path(path))
        self._paths = paths

    async def answer(
        self, path: str, body: bytes, *, key: RoutingKey, without: frozenset[Hashable]
    ) -> AsyncGenerator[Any, None]:
        """First this replica's name, then what ``call_app`` yields.

        ``key`` and ``without`` are for ``AffinityRouter``, which reads them on the way here.
        """
        yield self._name
        parts = call_app(self._app, "POST", path, body)
        try:
            async for part in parts:
                yield part
        finally:
            await parts.aclose()

    async def ask(self, path: str) -> tuple[str, Head, bytes]:
        """This replica's name, and its answer to GET."""
        head: Head | None = None
        body = b""
        async for part in call_app(self._app, "GET", path):
            if isinstance(part, bytes):
                body += part
            else:
                head = part
        assert head is not None
        return self._name, head, body

    async def check_health(self) -> None:
        """Ray restarts a replica that raises here."""
        if self._front.has_failed:
            raise RuntimeError("the engine has failed")

    def __del__(self) -> None:
        if self._paths is not None:
            self._front.close()

    def _start(self, lora: dict[str, str]) -> None:
        from specdec.engine import Engine
        from specdec.server.app import create_app
        from specdec.server.front import ServingEngine

        plan = self._plan
        self._engine = Engine(plan.model, plan.draft, plan.k, lora=lora or None, **plan.fields)
        self._front = ServingEngine(self._engine, max_waiting=plan.settings.max_waiting)
        self._app = create_app(self._front, plan.settings)


class AffinityRouter(RequestRouter):
    """Ray's extension point for ``Router``, the policy of ``specdec serve --replicas`` too.

    Loads are the texts that this front has sent: run one front, or each sees its own only.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._policy: Router[Any] = Router(**kwargs)
        self._loads: dict[Any, int] = {}
        self._sent: dict[str, int] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        if pending_request is None or "key" not in pending_request.kwargs:
            return [candidate_replicas]
        without = pending_request.kwargs["without"]
        left = [name for name in replicas if name.unique_id not in without]
        # Where none is left any of them answers, and the front sees that it has been asked.
        loads = {name: self._loads.get(name, 0) for name in left or replicas}
        if not loads:
            return []
        chosen = self._policy.choose(pending_request.kwargs["key"], loads)
        return [[replicas[chosen]], [replicas[name] for name in loads if name != chosen]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: Any, result: Any
    ) -> None:
        key = pending_request.kwargs.get("key")
        if key is not None:
            self._sent[pending_request.metadata.internal_request_id] = key.num_texts
            self._loads[replica_id] = self._loads.get(replica_id, 0) + key.num_texts

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        num_texts = self._sent.pop(internal_request_id, 0)
        if replica_id in self._loads:
            self._loads[replica_id] -= num_texts

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._loads.pop(replica_id, None)
        self._policy.forget(replica_id)


class RayReplies:
    """Opens replies of Ray's replicas, as ``Forwarder`` wants them."""

    def __init__(self, engines: DeploymentHandle) -> None:
        self._answer = engines.options(stream=True).answer

    @asynccontextmanager
    async def __call__(self, call: Call, without: set[Hashable]) -> AsyncIterator[Reply | None]:
        parts: Any = self._answer.remote(
            call.path, call.body, key=call.key, without=frozenset(without)
        )
        name: Hashable = None

        async def read() -> AsyncIterator[Any]:
            try:
                async for part in parts:
                    yield part
            except (RayError, RayServeException) as error:
                raise ReplicaLostError(type(error).__name__, was_sent=True) from error

        try:
            found = read()
            name = await anext(found)
            if name in without:
                yield None
                return
            status, headers = await anext(found)
            yield Reply(replica=name, status=status, headers=headers, chunks=found)
        finally:
            parts.cancel()


def create_ray_front(engines: DeploymentHandle, settings: ServerSettings) -> FastAPI:
    """The front's application: the routes of ``specdec serve``, answered by Ray's replicas."""
    made = FastAPI(title="specdec", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = FrontMetrics()
    made.add_middleware(Gate, api_key=settings.api_key, requests=metrics.requests)
    tell_errors(made)
    forwarder = Forwarder(RayReplies(engines), timeout=settings.timeout, count=metrics.retry)
    texts = ForwardedTexts(forwarder, settings)
    about = _AboutRay(engines, metrics)
    for path in TEXT_ROUTES:
        made.add_api_route(path, texts.answer, methods=["POST"])
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        made.add_api_route(path, about.adapters, methods=["POST"])
    for path in ("/v1/models", "/v1/models/{name:path}"):
        made.add_api_route(path, about.from_any, methods=["GET"])
    made.add_api_route("/health", about.health, methods=["GET"])
    made.add_api_route("/metrics", about.metrics, methods=["GET"])
    return made


class _AboutRay:
    """What the front says about its replicas."""

    def __init__(self, engines: DeploymentHandle, metrics: FrontMetrics) -> None:
        self._engines = engines
        self._metrics = metrics

    async def adapters(self) -> Response:
        message = "on Ray adapters are those of the deployment's user_config; deploy another one"
        raise ApiError(404, message, code="not_enabled")

    async def from_any(self, request: Request) -> Response:
        """What any replica says."""
        try:
            _, (status, headers), body = await self._engines.ask.remote(request.url.path)
        except (RayError, RayServeException) as error:
            raise ApiError(503, f"no replica answers: {error}", code="no_replica") from error
        return Response(body, status, media_type=headers.get("content-type"))

    async def health(self) -> Response:
        answers = await self._from_all("/health")
        replicas = [
            {"replica": name, "state": "ready" if head[0] == 200 else "down"}
            for name, head, _ in answers
        ]
        if all(replica["state"] == "down" for replica in replicas):
            error = ApiError(503, "no replica is ready", code="no_replica")
            return JSONResponse(error.body | {"replicas": replicas}, 503)
        return JSONResponse({"status": "ok", "replicas": replicas})

    async def metrics(self) -> Response:
        answers = await self._from_all("/metrics")
        texts = {name: body.decode() for name, head, body in answers if head[0] == 200}
        text = merged(self._metrics.registry, texts)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _from_all(self, path: str) -> list[tuple[str, Head, bytes]]:
        """The answers of the replicas that run; what they raise is no answer."""
        answers = await self._engines.broadcast("ask", path).results_async(
            timeout_s=_ASK_SECONDS, return_exceptions=True
        )
        return [answer for answer in answers if not isinstance(answer, BaseException)]
