"""A replica's process without an engine, which starts at once: what it does is in the prompt.

``FAKE`` in its environment names a folder: ``refuse-N`` in it keeps replica N from starting.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

FOLDER, NUMBER = Path(os.environ["FAKE"]), os.environ["FAKE_NUMBER"]
is_sick = False
adapters: dict[str, str] = {}


def error(status: int, code: str) -> JSONResponse:
    headers = {"Retry-After": "7"} if status == 429 else None
    return JSONResponse({"error": {"message": f"fake {code}", "code": code}}, status, headers)


def event(**value: object) -> str:
    return f"data: {json.dumps(value)}\n\n"


async def answer(request: Request) -> Response:
    global is_sick
    body = await request.json()
    prompt = body.get("prompt", body.get("messages"))
    match prompt:
        case "die":
            os._exit(9)
        case ["die", number] if number == NUMBER:
            os._exit(9)
        case "sick":
            is_sick = True
        case ["full", *numbers] if NUMBER in numbers:
            return error(429, "overloaded")
        case ["leaving", number] if number == NUMBER and not body.get("stream"):
            return error(503, "shutting_down")
        case ["wait", seconds]:
            await asyncio.sleep(float(seconds))
        case ["hold", 1]:
            while not (FOLDER / "go").exists():
                await asyncio.sleep(0.02)
        case "wrong":
            return error(400, "wrong")
    if body.get("stream"):
        return StreamingResponse(events(prompt), media_type="text/event-stream")
    about = {"pid": os.getpid(), "number": int(NUMBER), "adapters": adapters}
    return JSONResponse(about | {"model": body.get("model")})


async def events(prompt: object):
    match prompt:
        case ["leaving", number] if number == NUMBER:
            yield event(error={"message": "it leaves", "code": "shutting_down"})
            return
        case ["die opening", number]:
            yield event(choices=[{"delta": {"role": "assistant", "content": ""}}])
            await asyncio.sleep(0.05)
            if number == NUMBER:
                os._exit(9)
        case "die begun":
            yield event(choices=[{"text": "begun"}])
            yield event(choices=[{"text": "more"}])[:-9]
            await asyncio.sleep(0.05)
            os._exit(9)
    yield event(choices=[{"text": NUMBER}])
    yield event(choices=[{"text": "", "finish_reason": "stop"}])
    yield "data: [DONE]\n\n"


async def load(request: Request) -> Response:
    body = await request.json()
    name, path = body["lora_name"], body["lora_path"]
    if path == "missing" or (FOLDER / f"no-{path}-{NUMBER}").exists():
        return error(400, f"no {path}")
    adapters[name] = path
    return JSONResponse({"status": "loaded", "lora_name": name})


async def unload(request: Request) -> Response:
    name = (await request.json())["lora_name"]
    if adapters.pop(name, None) is None:
        return error(404, "model_not_found")
    return JSONResponse({"status": "unloaded", "lora_name": name})


async def health(request: Request) -> Response:
    return error(503, "engine_dead") if is_sick else JSONResponse({"status": "ok"})


async def models(request: Request) -> Response:
    return JSONResponse({"data": ["fake", *adapters]})


async def metrics(request: Request) -> Response:
    text = "# HELP fake_total Of the fake\n# TYPE fake_total counter\n"
    return PlainTextResponse(f'{text}fake_total{{model="m"}} {int(NUMBER) + 1}\n')


def main() -> None:
    if (FOLDER / f"refuse-{NUMBER}").exists():
        print(json.dumps({"error": "it is refused"}), flush=True)
        sys.exit(2)
    json.loads(sys.stdin.readline())

    def end_with_starter() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_starter, daemon=True).start()
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(sys.argv[1])
    bound.listen(64)
    routes = [
        Route("/v1/completions", answer, methods=["POST"]),
        Route("/v1/chat/completions", answer, methods=["POST"]),
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
        *(Route(f"/{each.__name__}", each) for each in (health, metrics)),
        Route("/v1/models", models),
        Route("/stats", models),
    ]
    config = uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off")
    config.timeout_graceful_shutdown = 0
    print(json.dumps({"ready": f"fake {NUMBER}"}), flush=True)
    uvicorn.Server(config).run(sockets=[bound])


if __name__ == "__main__":
    main()
