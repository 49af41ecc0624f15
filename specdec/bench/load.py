"""Load on an OpenAI-compatible server: Poisson arrivals, and what each client sees.

Tokens are counted by what the server says of them (``usage``, which streams report at their end
when asked), never by chunks: a server that speculates sends several tokens in one.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

import specdec
from specdec.bench.environment import checkout_commit, command_line
from specdec.bench.points import percentiles
from specdec.bench.prompts import Prompt, load_prompts, spread
from specdec.bench.report import digits
from specdec.tables import plain_table

SCHEMA_VERSION = 1
TIMEOUT_SECONDS = 600.0


@dataclass(kw_only=True, slots=True)
class Call:
    """One request as its client saw it; seconds from when it was due."""

    due: float
    chunk_times: list[float] = field(default_factory=list)
    tokens: int = 0
    # Of the last event that belongs to the text: the one that tells why it ended may bring a token
    # without characters, such as an end of sequence.
    last_token: float = 0.0
    end: float = 0.0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.chunk_times[0]

    @property
    def seconds_per_token(self) -> float | None:
        """Mean after the first chunk; None where nothing came after it.

        How many tokens the first chunk held is not known, so it counts for one: where it held more
        this is too slow, never too fast.
        """
        if self.tokens < 2 or len(self.chunk_times) < 2:
            return None
        return (self.last_token - self.chunk_times[0]) / (self.tokens - 1)


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which ``count`` requests of a Poisson process of ``rate`` per second are due."""
    generator = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += generator.expovariate(rate)
        times.append(now)
    return times


def run_load(
    url: str,
    *,
    model: str | None = None,
    rate: float = 1.0,
    num_requests: int = 32,
    prompts: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    ignore_eos: bool = False,
    chat: bool = True,
    commit: str | None = None,
) -> dict[str, Any]:
    """Send ``num_requests`` and return the report.

    ``model`` None asks the server for the first of its models. Raises ValueError for a bad rate or
    number, ConnectionError naming a server that cannot be reached.
    """
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate must be above 0, got {rate}")
    if num_requests < 1:
        raise ValueError(f"num_requests must be at least 1, got {num_requests}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    try:
        import httpx
    except ImportError as error:
        raise ValueError("--serve needs httpx: pip install httpx") from error
    chosen = spread(load_prompts(prompts), None)
    base = url.rstrip("/").removesuffix("/v1")
    try:
        if model is None:
            listed = httpx.get(f"{base}/v1/models", timeout=30)
            listed.raise_for_status()
            model = listed.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConnectionError(f"{url}: no model to ask for: {error}") from error
    options: dict[str, Any] = {
        "model": model,
        "max_tokens": max_new_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    # Servers differ in what they take beyond OpenAI's own: nothing is sent that was not asked for.
    asked = {"ignore_eos": ignore_eos, "top_k": top_k, "top_p": top_p if top_p != 1.0 else None}
    options |= {name: value for name, value in asked.items() if value}
    due = arrivals(rate, num_requests, seed)
    started = time.perf_counter()
    calls = asyncio.run(_all(base, options, chosen, due, chat, seed))
    seconds = time.perf_counter() - started
    return {
        "benchmark": "load",
        "schema_version": SCHEMA_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "commit": commit if commit is not None else checkout_commit(),
        "versions": {"specdec": specdec.__version__, "httpx": httpx.__version__},
        "url": url,
        "settings": {
            "rate": rate,
            "num_requests": num_requests,
            "prompts": prompts,
            "seed": seed,
            "chat": chat,
            **options,
        },
        **summary(calls, seconds),
    }


def summary(calls: list[Call], seconds: float) -> dict[str, Any]:
    """Percentiles over the calls that ended well, and the errors of the others."""
    good = [call for call in calls if call.error is None and call.chunk_times]
    per_token = [1e3 * each for call in good if (each := call.seconds_per_token) is not None]
    gaps = [
        1e3 * (after - before)
        for call in good
        for before, after in zip(call.chunk_times, call.chunk_times[1:], strict=False)
    ]
    tokens = sum(call.tokens for call in good)
    chunks = sum(len(call.chunk_times) for call in good)
    return {
        "completed": len(good),
        "errors": [call.error or "no token came" for call in calls if call not in good],
        "seconds": seconds,
        "tokens": tokens,
        "chunks": chunks,
        "tokens_per_chunk": tokens / chunks if chunks else 0.0,
        "tokens_per_second": tokens / seconds,
        "ttft_ms": percentiles([1e3 * call.ttft for call in good]),
        "ms_per_token": percentiles(per_token),
        "ms_between_chunks": percentiles(gaps),
        "end_to_end_ms": percentiles([1e3 * call.end for call in good]),
    }


async def _all(
    base: str,
    options: dict[str, Any],
    prompts: list[Prompt],
    due: list[float],
    chat: bool,
    seed: int,
) -> list[Call]:
    import httpx

    # As many connections as there are requests: a waiting client would hide the server's queue.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, limits=limits) as client:
        begun = time.perf_counter()

        async def one(number: int) -> Call:
            call = Call(due=due[number])
            await asyncio.sleep(max(0.0, due[number] - (time.perf_counter() - begun)))
            body = options | _prompt(prompts[number % len(prompts)].text, chat)
            if options["temperature"] > 0:
                body["seed"] = seed + number
            path = "/v1/chat/completions" if chat else "/v1/completions"
            try:
                await _stream(client, base + path, body, call, begun)
            # Whatever a server sends, the other requests go on.
            except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
                call.error = f"{type(error).__name__}: {error}"
            return call

        return list(await asyncio.gather(*(one(number) for number in range(len(due)))))


def _prompt(text: str, chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}


async def _stream(client: Any, url: str, body: dict[str, Any], call: Call, begun: float) -> None:
    """Read one stream. Raises ValueError where the server does not say how many tokens it sent."""
    usage = None
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            raise ValueError(f"HTTP {response.status_code}: {response.text[:200]}")
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.strip() == "data: [DONE]":
                continue
            event = json.loads(line[len("data:") :])
            if "error" in event:
                raise ValueError(str(event["error"]))
            usage = event.get("usage") or usage
            choices = event.get("choices") or ()
            now = time.perf_counter() - begun - call.due
            if any(_content(choice) for choice in choices):
                call.chunk_times.append(now)
                call.last_token = now
            elif any(choice.get("finish_reason") for choice in choices):
                call.last_token = now
    call.end = time.perf_counter() - begun - call.due
    if usage is None or not isinstance(usage.get("completion_tokens"), int):
        raise ValueError("the server sent no usage, so its tokens cannot be counted")
    call.tokens = usage["completion_tokens"]


def _content(choice: dict[str, Any]) -> bool:
    """Whether a choice brings a part of the text: what a model thinks or calls is one too."""
    delta = choice.get("delta") or {}
    parts = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")
    return bool(choice.get("text") or any(delta.get(name) for name in parts))


def show_load(load: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"\n{load['url']}, {load['settings']['model']}: {load['completed']} requests of "
        f"{load['settings']['num_requests']} at {load['settings']['rate']:g} a second; "
        f"{load['tokens']} tokens in {load['seconds']:.1f} s "
        f"({load['tokens_per_second']:.1f} tokens/s), {load['tokens_per_chunk']:.2f} a chunk",
        highlight=False,
    )
    table = plain_table("Milliseconds, as the clients saw them", [""], ["p50", "p95", "p99"])
    rows = {
        "first token": "ttft_ms",
        "per token after it": "ms_per_token",
        "between chunks": "ms_between_chunks",
        "whole request": "end_to_end_ms",
    }
    for label, name in rows.items():
        values = load[name].values()
        table.add_row(label, *(digits(value) if any(values) else "-" for value in values))
    console.print(table)
    for error in load["errors"]:
        console.print(f"failed: {error}", style="bold red", highlight=False, markup=False)


def save_load(load: dict[str, Any], folder: str) -> None:
    path = Path(folder) / "load.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(load, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {path}")
