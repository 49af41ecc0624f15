"""The server as a command: ``specdec serve``."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.options import (
    DEFAULT_MODE,
    AttentionOption,
    CompilationOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    EngineOptions,
    KOption,
    LoraOption,
    MaxModelLenOption,
    MaxNumSeqsOption,
    ModelArgument,
    ModeOption,
    NumKvBlocksOption,
    RanksOption,
    StepsOption,
    draft_of,
    draft_width,
    further_options,
    json_object,
    named_paths,
    steps_per_replay,
)

if TYPE_CHECKING:
    import socket

    from specdec.server.settings import ServerSettings

INSTALL = 'pip install "fastapi>=0.115" "uvicorn>=0.30" "prometheus-client>=0.20" "httpx>=0.27"'
DEFAULT_NAME = "SmolLM2-135M-Instruct"


def serve(
    model: ModelArgument = None,
    draft: DraftOption = "auto",
    k: KOption = "4",
    steps: StepsOption = "auto",
    lora: LoraOption = None,
    draft_lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH", help="The draft model's adapter for the rows of adapter NAME."
        ),
    ] = None,
    lora_root: Annotated[
        Path | None,
        typer.Option(
            help="Adapters may be loaded over HTTP from inside this folder.", show_default=False
        ),
    ] = None,
    max_loras: Annotated[
        int | None, typer.Option(help="Adapters that run side by side.", show_default="8")
    ] = None,
    max_lora_rank: Annotated[
        int | None,
        typer.Option(help="The largest rank.", show_default="that of --lora, at least 16"),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SPECDEC_API_KEY",
            help="Asked for on every route but /health.",
            show_default=False,
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="What clients call the base model.", show_default="MODEL"),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Texts that run or wait; more are refused with 429.")
    ] = 1024,
    max_body: Annotated[int, typer.Option(help="Bytes of a request's body at most.")] = 4 << 20,
    timeout: Annotated[float, typer.Option(help="Seconds until a request is ended.")] = 600.0,
    drain_timeout: Annotated[
        float,
        typer.Option(help="Seconds that requests have to end in after SIGTERM.", min=0, max=86400),
    ] = 30.0,
    replicas: Annotated[
        int,
        typer.Option(help="Engines behind the address, each a process on a GPU of its own.", min=1),
    ] = 1,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    tensor_parallel_size: RanksOption = 1,
    cudagraph_mode: ModeOption = DEFAULT_MODE,
    compilation: CompilationOption = None,
    capture: Annotated[
        str, typer.Option(help="eager: all graphs at start-up; lazy: each on first use.")
    ] = "eager",
    attention_backend: AttentionOption = "auto",
    acceptance: Annotated[str, typer.Option(help="auto, coupled or rejection.")] = "auto",
    max_num_seqs: MaxNumSeqsOption = None,
    max_model_len: MaxModelLenOption = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = 2048,
    kv_block_size: Annotated[
        int | None, typer.Option(help="Positions per KV block.", show_default="16")
    ] = None,
    num_kv_blocks: NumKvBlocksOption = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the GPU's memory to fill.")
    ] = 0.9,
    engine_options: EngineOptions = None,
) -> None:
    """Serve a model and its adapters over HTTP, with OpenAI's interface."""
    try:
        from specdec.server.listen import bind, is_loopback, url_of

        for package in ("fastapi", "prometheus_client", *(["httpx"] if replicas > 1 else [])):
            import_module(package)
    except ImportError as error:
        raise ValueError(f"specdec serve needs packages: {INSTALL} ({error})") from error
    from specdec.server.settings import ServerSettings

    settings = ServerSettings(
        model_name=served_model_name or model or DEFAULT_NAME,
        api_key=api_key,
        lora_root=lora_root,
        max_waiting=max_waiting,
        max_body=max_body,
        timeout=timeout,
    )
    width = draft_width(k)
    adapters = named_paths("--lora", lora)
    if settings.model_name in adapters:
        raise ValueError(f"--lora: {settings.model_name!r} is what the base model is called")
    if lora_root is not None and max_loras is None:
        # Graphs for adapters are made at start-up, not while the first one is loaded.
        max_loras = 8
    fields: dict[str, Any] = {
        "lora": adapters or None,
        "draft_lora": named_paths("--draft-lora", draft_lora) or None,
        "max_loras": max_loras,
        "max_lora_rank": max_lora_rank,
        "steps_per_replay": steps_per_replay(steps),
        "dtype": dtype,
        "device": device,
        "tensor_parallel_size": tensor_parallel_size,
        "cudagraph_mode": cudagraph_mode,
        "compilation_config": json_object("--compilation-config", compilation),
        "capture": capture,
        "attention_backend": attention_backend,
        "acceptance": acceptance,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_block_size": "auto" if kv_block_size is None else kv_block_size,
        "num_kv_blocks": num_kv_blocks,
        "gpu_memory_utilization": gpu_memory_utilization,
    }
    fields |= further_options(engine_options, fields)
    chosen = draft_of(draft)
    bound = bind(host, port)
    if not is_loopback(bound) and api_key is None:
        _say(f"warning: whoever reaches {url_of(bound)} may use it; --api-key asks for a key")
    if replicas > 1:
        _serve_replicas(replicas, model, chosen, width, fields, settings, bound, drain_timeout)
        return
    from specdec.engine import Engine
    from specdec.graph_report import start_up_line
    from specdec.server.run import serve as run_server

    engine = Engine(model, chosen, width, **fields)

    def on_ready() -> None:
        graphs = start_up_line(engine.graph_table(), engine.capture_seconds)
        print(f"specdec serves {settings.model_name} on {url_of(bound)} ({graphs})", flush=True)

    run_server(engine, settings, bound, drain_timeout=drain_timeout, on_ready=on_ready)


def _serve_replicas(
    num_replicas: int,
    model: str | None,
    draft: str | None,
    k: int | str,
    fields: dict[str, Any],
    settings: "ServerSettings",
    bound: "socket.socket",
    drain_timeout: float,
) -> None:
    from specdec.replicas.plan import ServePlan
    from specdec.replicas.run import serve_replicas
    from specdec.server.listen import url_of

    def on_ready(graphs: list[str]) -> None:
        where = f"{url_of(bound)} from {num_replicas} replicas"
        print(f"specdec serves {settings.model_name} on {where} ({graphs[0]})", flush=True)

    # The front asks for the key; the replicas' sockets are reached by it alone.
    plan = ServePlan(
        model=model, draft=draft, k=k, fields=fields, settings=replace(settings, api_key=None)
    )
    serve_replicas(
        plan,
        settings,
        bound,
        num_replicas=num_replicas,
        drain_timeout=drain_timeout,
        on_ready=on_ready,
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
