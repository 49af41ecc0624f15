"""Clients of an OpenAI-compatible server, and what each of them sees."""

import argparse
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(kw_only=True, slots=True)
class Served:
    """What one client saw. Seconds count from when it sent its request."""

    model: str
    first_token: float = 0.0
    last_token: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    text: str = ""

    @property
    def per_token(self) -> float | None:
        return (self.last_token - self.first_token) / (self.tokens - 1) if self.tokens > 1 else None


class OpenAIClient:
    """The ``openai`` package."""

    name = "openai"

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        import openai

        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=900)
        self._args = args

    async def __call__(self, model: str, prompt: str, max_tokens: int) -> Served:
        return await watch(model, self._chunks(body_for(self._args, model, prompt, max_tokens)))

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        extra = {"return_token_ids": body.pop("return_token_ids")}
        create = (
            self._client.chat.completions.create
            if "messages" in body
            else self._client.completions.create
        )
        async for chunk in await create(**body, extra_body=extra):
            yield chunk.model_dump()


class HttpClient:
    """httpx alone, where the ``openai`` package is not installed."""

    name = "httpx"

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=900)
        self._args = args

    async def __call__(self, model: str, prompt: str, max_tokens: int) -> Served:
        return await watch(model, self._chunks(body_for(self._args, model, prompt, max_tokens)))

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        async with self._client.stream("POST", path, json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))


def client_for(url: str, args: argparse.Namespace) -> OpenAIClient | HttpClient:
    try:
        return OpenAIClient(url, args)
    except ImportError:
        return HttpClient(url, args)


def body_for(args: argparse.Namespace, model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    asked: dict[str, Any] = {"prompt": prompt}
    if not args.tiny:
        asked = {"messages": [{"role": "user", "content": prompt}]}
    return asked | {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": args.temperature,
        "seed": args.seed if args.temperature else None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


async def watch(model: str, chunks: AsyncIterator[dict[str, Any]]) -> Served:
    """Read a stream to its end."""
    served, started = Served(model=model), time.perf_counter()
    async for chunk in chunks:
        for choice in chunk["choices"]:
            served.text += choice["text"] if "text" in choice else choice["delta"]["content"] or ""
            # A token may have no text, so what arrives is told by its ids.
            if choice.get("token_ids"):
                served.last_token = time.perf_counter() - started
                served.first_token = served.first_token or served.last_token
        if chunk.get("usage"):
            served.prompt_tokens = chunk["usage"]["prompt_tokens"]
            served.tokens = chunk["usage"]["completion_tokens"]
            served.drafted, served.accepted = chunk["usage"]["drafted"], chunk["usage"]["accepted"]
    return served
