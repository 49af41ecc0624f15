"""Replicas that are lost, refuse, freeze or do not start, played by processes without an engine."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdec.replicas.app import create_front
from specdec.replicas.fleet import Fleet, State, Timing
from specdec.replicas.plan import ServePlan
from specdec.server.settings import ServerSettings

COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("fake_worker.py")))
COMPLETIONS = "/v1/completions"
QUICK = Timing(probe_every=0.1, probe_timeout=0.3, max_probes=2, first_pause=0.1, wait_for_ready=5)


class Front:
    """A front over fakes, called without a socket of its own."""

    def __init__(self, fleet: Fleet, http: httpx.AsyncClient) -> None:
        self.fleet, self.http = fleet, http

    async def ask(self, prompt: Any, **body: Any) -> httpx.Response:
        return await self.http.post(COMPLETIONS, json={"prompt": prompt, **body})

    async def number(self, prompt: Any, **body: Any) -> int:
        """The replica that answers."""
        answer = await self.ask(prompt, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["number"]

    async def events(self, prompt: Any, path: str = COMPLETIONS) -> list[Any]:
        name = "messages" if "chat" in path else "prompt"
        answer = await self.http.post(path, json={name: prompt, "stream": True})
        assert answer.status_code == 200, answer.text
        blocks = answer.text.split("\n\n")
        assert blocks.pop() == ""
        lines = [block.removeprefix("data: ") for block in blocks]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    async def until(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end, [r.as_dict() for r in self.fleet.replicas]
            await asyncio.sleep(0.02)

    async def all_ready(self) -> None:
        await self.until(lambda: len(self.fleet.ready()) == len(self.fleet.replicas))

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.http.get("/metrics")).text
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
        return sum(
            s.value for s in samples if s.name == name and labels.items() <= s.labels.items()
        )

    def pid(self, number: int) -> int:
        worker = self.fleet.replicas[number].worker
        assert worker is not None
        return worker.pid


@asynccontextmanager
async def front_of(
    num: int, folder: Path, timing: Timing = QUICK, **settings: Any
) -> AsyncIterator[Front]:
    made = ServerSettings(model_name="fake", **{"timeout": 20.0} | settings)
    plan = ServePlan(model="m", draft=None, k=0, fields={}, settings=made)
    environs = [{**os.environ, "FAKE": str(folder), "FAKE_NUMBER": str(i)} for i in range(num)]
    fleet = Fleet(plan, environs, timing=timing, command=COMMAND)
    headers = {} if made.api_key is None else {"Authorization": f"Bearer {made.api_key}"}
    try:
        app = create_front(fleet, made)
        await fleet.start()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://front", timeout=30, headers=headers
        ) as http:
            yield Front(fleet, http)
    finally:
        await fleet.close()


def with_front(num: int, **settings: Any) -> Callable[..., Callable[[Path], None]]:
    """Makes a test of a coroutine that takes a front of ``num`` fakes and their folder."""

    def decorate(test: Callable[[Front, Path], Coroutine[Any, Any, None]]):
        def run(tmp_path: Path) -> None:
            async def body() -> None:
                async with front_of(num, tmp_path, **settings) as front:
                    await test(front, tmp_path)

            asyncio.run(body())

        run.__doc__ = test.__doc__
        return run

    return decorate


@with_front(2)
async def test_a_request_whose_replica_is_lost_goes_to_another(front: Front, folder: Path) -> None:
    """Nothing of its answer had come; the lost one is started anew."""
    pids = [front.pid(0), front.pid(1)]
    # Idle replicas take turns, and 0 begins.
    assert await front.number(["die", "0"]) == 1
    assert await front.metric("specdec_front_retried_total", reason="lost") == 1
    await front.all_ready()
    assert front.pid(0) != pids[0] and front.pid(1) == pids[1]
    assert not any(replica.num_texts for replica in front.fleet.replicas)


@with_front(3)
async def test_a_request_that_loses_every_replica_does_not_get_them_all(front, folder) -> None:
    answer = await front.ask("die")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "replica_lost"
    # OpenAI's client would repeat it.
    assert answer.headers["x-should-retry"] == "false"
    await front.all_ready()
    assert sum(replica.num_restarts for replica in front.fleet.replicas) == 2
    assert await front.number("well") in (0, 1, 2)


@with_front(1)
async def test_a_stream_that_has_begun_says_that_it_was_lost(front: Front, folder: Path) -> None:
    """What a replica had written of an event is not passed on."""
    begun, last = await front.events("die begun")
    assert begun["choices"] == [{"text": "begun"}]
    assert last["error"]["code"] == "replica_lost"
    await front.all_ready()
    assert await front.events("again") == [
        {"choices": [{"text": "0"}]},
        {"choices": [{"text": "", "finish_reason": "stop"}]},
        "[DONE]",
    ]


@with_front(2)
async def test_a_chat_that_has_said_no_more_than_its_role_goes_elsewhere(front, folder) -> None:
    for _ in range(2):
        role, text, _, done = await front.events(["die opening", "0"], "/v1/chat/completions")
        assert role["choices"][0]["delta"]["role"] == "assistant"
        assert text["choices"] == [{"text": "1"}] and done == "[DONE]"
    assert await front.metric("specdec_front_retried_total", reason="lost") >= 1


@with_front(2)
async def test_a_full_replica_s_requests_go_to_the_other(front: Front, folder: Path) -> None:
    for _ in range(3):
        assert await front.number(["full", "0"]) == 1
    answer = await front.ask(["full", "0", "1"])
    assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
    assert answer.json()["error"]["code"] == "overloaded"
    assert await front.metric("specdec_front_retried_total", reason="refused") >= 3


@with_front(2)
async def test_what_a_leaving_replica_refuses_goes_to_the_other(front: Front, folder: Path) -> None:
    for _ in range(3):
        assert await front.number(["leaving", "0"]) == 1
        assert (await front.events(["leaving", "1"]))[0]["choices"] == [{"text": "0"}]


@with_front(2)
async def test_other_errors_are_the_replica_s_answer(front: Front, folder: Path) -> None:
    answer = await front.ask("wrong")
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "wrong"
    for raw in (b"{", b"[1]", b'{"prompt": "\\ud800"}'):
        answer = await front.http.post(COMPLETIONS, content=raw)
        assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]
    assert (await front.http.get("/nothing")).status_code == 404
    assert (await front.http.get("/replicas/7/stats")).status_code == 404
    assert (await front.http.get("/replicas/1/stats")).json() == {"data": ["fake"]}
    assert "/replicas/1/stats" in (await front.http.get("/")).text
    assert await front.metric("specdec_front_retried_total") == 0


@with_front(2)
async def test_a_failed_and_a_frozen_replica_are_restarted(front: Front, folder: Path) -> None:
    sick = await front.number("sick")
    await front.until(lambda: front.fleet.replicas[sick].num_restarts == 1)
    await front.all_ready()
    other, frozen = 1 - sick, front.pid(1 - sick)
    os.kill(frozen, signal.SIGSTOP)
    await front.until(lambda: front.fleet.replicas[other].num_restarts == 1)
    await front.all_ready()
    assert front.pid(other) != frozen
    with pytest.raises(ProcessLookupError):
        os.kill(frozen, 0)
    assert {await front.number(f"{i}") for i in range(4)} == {0, 1}


@with_front(2)
async def test_a_replica_that_does_not_come_back_is_tried_less_and_less_often(
    front, folder
) -> None:
    (folder / "refuse-0").touch()
    os.kill(front.pid(0), signal.SIGKILL)
    replica = front.fleet.replicas[0]
    times = []
    for count in (2, 3, 4):
        await front.until(lambda count=count: replica.num_restarts >= count)
        times.append(time.monotonic())
        health = (await front.http.get("/health")).json()
        assert health["status"] == "degraded"
        assert await front.number("served") == 1
    # Pauses of 0.1, 0.2 and 0.4 s, then 0.8 s.
    assert times[2] - times[1] > 0.7
    (folder / "refuse-0").unlink()
    await front.all_ready()
    assert (await front.http.get("/health")).json()["status"] == "ok"


def test_a_request_waits_for_a_replica_and_not_for_ever(tmp_path: Path) -> None:
    timing = Timing(first_pause=0.1, wait_for_ready=0.6)

    async def body() -> None:
        async with front_of(1, tmp_path, timing, max_waiting=2) as front:
            (tmp_path / "refuse-0").touch()
            os.kill(front.pid(0), signal.SIGKILL)
            await front.until(lambda: not front.fleet.ready())
            answer = await front.http.get("/health")
            assert answer.status_code == 503 and answer.json()["replicas"][0]["state"] != "ready"
            for path in ("/v1/models", "/replicas/0/stats"):
                assert (await front.http.get(path)).status_code == 503
            answers = await asyncio.gather(*(front.ask("x") for _ in range(3)))
            codes = sorted((a.status_code, a.json()["error"]["code"]) for a in answers)
            assert codes == [(429, "overloaded"), (503, "no_replica"), (503, "no_replica")]
            waiting = asyncio.create_task(front.ask("served at last"))
            (tmp_path / "refuse-0").unlink()
            while not waiting.done():
                await asyncio.sleep(0.05)
                # The pause may be longer than one request waits.
                if waiting.done() and waiting.result().status_code == 503:
                    waiting = asyncio.create_task(front.ask("served at last"))
            assert waiting.result().status_code == 200

    asyncio.run(body())


def test_a_replica_that_does_not_start_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "refuse-1").touch()

    async def body() -> None:
        async with front_of(3, tmp_path):
            pass

    with pytest.raises(ValueError, match="replica 1: it is refused"):
        asyncio.run(body())
    mine = [p for p in Path("/proc").glob("[0-9]*/environ") if _names(p, str(tmp_path))]
    assert mine == []


def _names(environ: Path, text: str) -> bool:
    try:
        return f"FAKE={text}".encode() in environ.read_bytes()
    except OSError:
        return False


@with_front(2)
async def test_adapters_are_loaded_into_all_and_into_those_that_start_later(front, folder) -> None:
    async def post(path: str, **body: Any) -> httpx.Response:
        return await front.http.post(f"/v1/{path}_lora_adapter", json=body)

    async def adapters() -> list[dict[str, str]]:
        asked = {}
        while len(asked) < 2:
            said = (await front.ask("adapters?")).json()
            asked[said["number"]] = said["adapters"]
        return [asked[0], asked[1]]

    assert (await post("load", lora_name="x", lora_path="missing")).status_code == 400
    assert await adapters() == [{}, {}]
    for name, path in (("x", "old"), ("y", "p"), ("x", "new"), ("z", "q")):
        answer = await post("load", lora_name=name, lora_path=path)
        assert answer.json() == {"status": "loaded", "lora_name": name}
    assert (await post("unload", lora_name="z")).status_code == 200
    assert (await post("unload", lora_name="z")).status_code == 404
    now = {"x": "new", "y": "p"}
    assert await adapters() == [now, now]
    os.kill(front.pid(1), signal.SIGKILL)
    await front.until(lambda: front.fleet.replicas[1].num_restarts == 1)
    await front.all_ready()
    assert await adapters() == [now, now]
    # A replica that does not follow is restarted, until it does.
    (folder / "no-odd-1").touch()
    assert (await post("load", lora_name="w", lora_path="odd")).status_code == 200
    await front.until(lambda: front.fleet.replicas[1].num_restarts >= 3)
    assert [replica.number for replica in front.fleet.ready()] == [0]
    (folder / "no-odd-1").unlink()
    await front.all_ready()
    assert await adapters() == [now | {"w": "odd"}] * 2
    assert front.fleet.replicas[0].num_restarts == 0


@with_front(2)
async def test_an_adapter_s_requests_stay_with_one_replica(front: Front, folder: Path) -> None:
    for model in "abc":
        assert len({await front.number(f"{i}", model=model) for i in range(4)}) == 1
    assert len({await front.number("long " * 99 + str(i)) for i in range(4)}) == 1
    assert {await front.number(f"{i}", model="fake") for i in range(4)} == {0, 1}


@with_front(2)
async def test_metrics_of_all_replicas_are_one_text(front: Front, folder: Path) -> None:
    await front.ask("x")
    text = (await front.http.get("/metrics")).text
    assert text.count("# TYPE fake_total counter") == 1
    for number in (0, 1):
        label = {"replica": str(number)}
        assert await front.metric("fake_total", model="m", **label) == number + 1
        assert await front.metric("specdec_front_replica_state", state="ready", **label) == 1
    assert await front.metric("specdec_front_requests_total", route=COMPLETIONS) == 1


@with_front(2, api_key="key")
async def test_a_rolling_restart_lets_requests_end_and_loses_none(front: Front, folder) -> None:
    """Long requests end on the process on which they began; others are served all the time."""
    pids = {front.pid(0), front.pid(1)}
    long = [asyncio.create_task(front.ask(["hold", 1])) for _ in range(4)]
    # A prompt of two entries counts for two texts.
    await front.until(lambda: front.fleet.num_texts == 2 * len(long))
    is_over = False
    short: list[httpx.Response] = []

    async def keep_asking() -> None:
        while not is_over:
            short.append(await front.ask("short"))

    askers = [asyncio.create_task(keep_asking()) for _ in range(4)]
    answer = await front.http.post("/v1/restart_replicas")
    assert answer.status_code == 202
    assert (await front.http.post("/v1/restart_replicas")).status_code == 409
    states = set()
    while front.fleet.is_rolling:
        states |= {replica.state for replica in front.fleet.replicas}
        assert front.fleet.ready()
        if State.DRAINING in states:
            (folder / "go").touch()
        await asyncio.sleep(0.01)
    is_over = True
    await asyncio.gather(*askers)
    assert states == {State.READY, State.DRAINING, State.STARTING}
    assert {task.result().json()["pid"] for task in long} == pids
    assert {answer.status_code for answer in short} == {200} and len(short) > 20
    assert not pids & {front.pid(0), front.pid(1)}
    assert await front.metric("specdec_front_retried_total") == 0


@with_front(2)
async def test_a_rolling_restart_ends_where_a_replica_does_not_come_back(front, folder) -> None:
    (folder / "refuse-0").touch()
    other = front.pid(1)
    assert front.fleet.begin_rolling_restart()
    await front.until(lambda: not front.fleet.is_rolling)
    assert front.pid(1) == other and await front.number("served") == 1
    answer = await front.http.post("/v1/restart_replicas")
    assert answer.status_code == 404 and "--api-key" in answer.json()["error"]["message"]


def test_a_replica_that_never_answers_does_not_hold_its_client(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("specdec.replicas.forward._GRACE_SECONDS", 0.1)

    async def body() -> None:
        async with front_of(1, tmp_path, timeout=0.2) as front:
            answer = await front.ask(["wait", 30])
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "timeout"
            await front.until(lambda: front.fleet.num_texts == 0)

    asyncio.run(body())
