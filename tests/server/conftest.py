"""Servers in threads of the test process, over tiny models."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from adapters import write_adapter
from harness import cpu_engine, greedy
from tiny import make_tiny

from specdec.server.app import create_app
from specdec.server.front import ServingEngine
from specdec.server.listen import Server, bind, url_of
from specdec.server.settings import ServerSettings

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Served:
    """An engine behind a real socket. ``close`` ends it as SIGTERM would."""

    def __init__(self, engine: Any, *, drain_timeout: float = 5, **settings: Any) -> None:
        self.engine = engine
        self.settings = ServerSettings(**({"model_name": "tiny", "timeout": 60} | settings))
        self.front = ServingEngine(engine, max_waiting=self.settings.max_waiting)
        bound = bind("127.0.0.1", 0)
        self.url, self.address = url_of(bound), bound.getsockname()
        ready = threading.Event()
        app = create_app(self.front, self.settings)
        self._server = Server(app, self.front, drain_timeout, ready.set)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[bound])), daemon=True
        )
        self._thread.start()
        assert ready.wait(30)
        key = self.settings.api_key
        self.http = httpx.Client(
            base_url=self.url,
            timeout=60,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
        )
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key or "none", max_retries=0, timeout=60
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def text(self, prompt: Any, max_tokens: int = 12, **body: Any) -> str:
        """A greedy text."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **body}
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def ask(self, function: Any, *arguments: Any) -> Any:
        """Call ``function`` in the engine's thread."""
        return self.front._enqueue(function, *arguments).result(30)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        text = self.http.get("/metrics").text
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
        return sum(
            s.value for s in samples if s.name == name and labels.items() <= s.labels.items()
        )

    def wait_until(self, condition: Any, seconds: float = 20) -> None:
        """Wait for something that is to be seen in the engine's thread."""
        end = time.monotonic() + seconds
        while not self.ask(condition):
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.01)

    def wait_until_idle(self) -> None:
        """All texts have left, with all that they held."""

        def is_idle() -> bool:
            stats = self.engine.stats()
            return not self.front.num_requests and stats.free_kv_blocks == stats.total_kv_blocks

        self.wait_until(is_idle)
        self.ask(self.engine.check_integrity)
        assert self.front._num_texts == 0

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.front.close()


def sse(text: str) -> list[Any]:
    """The events of a stream; the last one must be the end mark."""
    events = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    assert events[-1] == "[DONE]", events[-1]
    return [json.loads(event) for event in events[:-1]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model with a byte tokenizer and a chat template, and two adapters in a folder."""
    root = tmp_path_factory.mktemp("served")
    model = make_tiny(
        root / "tiny", seed=1, vocab=300, tokenizer="bytes", eos=0, chat_template=CHAT_TEMPLATE
    )
    adapters = root / "adapters"
    for number, name in enumerate(("a", "b")):
        write_adapter(adapters / name, model, seed=20 + number)
    return SimpleNamespace(model=str(model), adapters=adapters)


@pytest.fixture(scope="session")
def expected(tiny: SimpleNamespace):
    """The Generation that an engine without a drafter and without a server makes."""
    paths = {name: str(tiny.adapters / name) for name in "ab"}
    with cpu_engine(tiny.model, None, 0, lora=paths, capture="lazy") as engine:

        def generate(prompt: Any, max_tokens: int = 12, lora: str | None = None, **params: Any):
            return engine.generate(prompt, greedy(max_tokens, **params), lora=lora)

        yield generate


@pytest.fixture(scope="session")
def start(tiny: SimpleNamespace):
    """Starts servers; all are closed at the end."""
    servers: list[Served] = []

    def make(draft: Any = "layer_skip:1", *, engine: dict[str, Any] | None = None, **settings: Any):
        options = {"capture": "lazy"} | (engine or {})
        served = Served(cpu_engine(tiny.model, draft, 3, **options), **settings)
        servers.append(served)
        return served

    yield make
    for served in servers:
        served.close()


@pytest.fixture(scope="session")
def server(start, tiny: SimpleNamespace) -> Served:
    """The server that tests share: with a drafter, two adapters, and room for more."""
    paths = {name: str(tiny.adapters / name) for name in "ab"}
    return start(engine={"lora": paths, "max_loras": 4}, lora_root=tiny.adapters)
