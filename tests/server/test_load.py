"""Load on a server: tokens are counted, whatever a chunk holds, and times are the client's."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specdec.bench import command, load

CHUNKS, TOKENS_PER_CHUNK, GAP = 5, 4, 0.05


class Fake(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that sends four tokens per chunk, a chunk every 50 ms."""

    protocol_version = "HTTP/1.0"
    bodies: list[dict[str, Any]]
    fault: str | None
    meeting: threading.Barrier | None

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._head(200, "application/json")
        self.wfile.write(json.dumps({"data": [{"id": "fake-model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if self.meeting is not None:
            self.meeting.wait()
        if self.fault == "status" and len(self.bodies) % 2:
            self._head(503, "text/plain")
            self.wfile.write(b"too many")
            return
        self._head(200, "text/event-stream")
        self._send({"choices": [{"delta": {"role": "assistant"}}]})
        if self.fault == "thinks":
            for _ in range(CHUNKS):
                time.sleep(GAP)
                self._send({"choices": [{"delta": {"reasoning_content": "hm"}}]})
            self._send({"choices": [{"delta": {"content": "x"}}]})
            self._send({"choices": [], "usage": {"completion_tokens": CHUNKS + 1}})
            return
        if self.fault == "odd":
            odd = ({"choices": None, "usage": {}}, [1], {"choices": [3]}, {"choices": [{}]})
            self._send(odd[len(self.bodies) % len(odd)])  # type: ignore[arg-type]
            return
        for _ in range(CHUNKS):
            time.sleep(GAP)
            choice = {"delta": {"content": "word " * TOKENS_PER_CHUNK}, "text": "word " * 4}
            self._send({"choices": [choice]})
        if self.fault == "end":
            time.sleep(GAP)
            self._send({"choices": [{"delta": {}, "text": "", "finish_reason": "stop"}]})
        if self.fault != "no usage":
            count = CHUNKS * TOKENS_PER_CHUNK
            self._send({"choices": [], "usage": {"completion_tokens": count}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


@pytest.fixture
def fake() -> Iterator[Any]:
    """A running fake: ``url``, the ``handler`` class, whose ``fault`` may be set."""
    handler = type("Handler", (Fake,), {"bodies": [], "fault": None, "meeting": None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handler = handler  # type: ignore[attr-defined]
    server.url = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("chat", [True, False])
def test_several_tokens_in_a_chunk_are_measured_rightly(fake: Any, chat: bool) -> None:
    """Counted by chunks this server would be four times slower than it is."""
    got = load.run_load(fake.url, rate=40, num_requests=6, max_new_tokens=20, chat=chat)
    assert got["completed"] == 6
    assert got["errors"] == []
    assert got["tokens"] == 6 * CHUNKS * TOKENS_PER_CHUNK
    assert got["chunks"] == 6 * CHUNKS
    assert got["tokens_per_chunk"] == TOKENS_PER_CHUNK
    # Four gaps bring the 19 tokens after the first; sleeping takes at least as long as asked.
    least = 1e3 * (CHUNKS - 1) * GAP / (CHUNKS * TOKENS_PER_CHUNK - 1)
    assert least <= got["ms_per_token"]["p50"] <= got["ms_per_token"]["p99"]
    assert got["ms_per_token"]["p50"] < got["ms_between_chunks"]["p50"] / 3
    assert got["ms_between_chunks"]["p99"] >= 1e3 * GAP
    # The empty chunk at the start is no first token.
    assert got["ttft_ms"]["p50"] >= 1e3 * GAP
    assert got["end_to_end_ms"]["p50"] >= 1e3 * GAP * CHUNKS
    assert got["tokens_per_second"] == pytest.approx(got["tokens"] / got["seconds"])
    body = fake.handler.bodies[0]
    assert body["model"] == "fake-model"
    assert body["stream_options"] == {"include_usage": True}
    assert ("messages" in body) == chat
    assert len({json.dumps(body) for body in fake.handler.bodies}) == 6


def test_failures_are_told_and_not_counted(fake: Any) -> None:
    fake.handler.fault = "status"
    got = load.run_load(fake.url, rate=200, num_requests=4)
    assert got["completed"] == 2
    assert got["errors"] == ["ValueError: HTTP 503: too many"] * 2
    assert got["tokens"] == 2 * CHUNKS * TOKENS_PER_CHUNK
    fake.handler.fault = "no usage"
    got = load.run_load(fake.url, rate=200, num_requests=1)
    assert got["completed"] == got["tokens"] == 0
    assert "no usage" in got["errors"][0]


@pytest.mark.parametrize("chat", [True, False])
def test_a_token_without_characters_takes_its_time_too(fake: Any, chat: bool) -> None:
    """Fault: where the last token is an end of sequence, the time until it was left out while the
    token was counted, so that time per token came out too small.
    """
    fake.handler.fault = "end"
    got = load.run_load(fake.url, rate=200, num_requests=2, chat=chat)
    least = 1e3 * CHUNKS * GAP / (CHUNKS * TOKENS_PER_CHUNK - 1)
    assert got["ms_per_token"]["p50"] >= least
    assert got["chunks"] == 2 * CHUNKS


def test_what_a_model_thinks_is_text_too(fake: Any) -> None:
    """Fault: the first token was taken to come after all thoughts, whose tokens were counted."""
    fake.handler.fault = "thinks"
    got = load.run_load(fake.url, rate=200, num_requests=2)
    assert got["completed"] == 2
    assert 1e3 * GAP <= got["ttft_ms"]["p50"] < 1e3 * GAP * (CHUNKS - 1)
    assert got["ms_per_token"]["p50"] >= 1e3 * GAP * (CHUNKS - 1) / CHUNKS


def test_answers_that_are_no_answers_end_no_run(fake: Any) -> None:
    """Fault: a usage without completion_tokens ended the whole run with a KeyError."""
    fake.handler.fault = "odd"
    got = load.run_load(fake.url, rate=200, num_requests=8)
    assert got["completed"] == 0
    assert len(got["errors"]) == 8


def test_a_run_without_an_answer_is_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: it showed latencies of 0.00 ms and ended well."""
    with pytest.raises(ConnectionError, match="no request was answered"):
        command.bench(
            "some-model", serve="http://127.0.0.1:9", num_requests=2, rate=100, out=str(tmp_path)
        )
    assert "0.00  " not in capsys.readouterr().out


def test_options_are_sent_or_refused_and_never_dropped(fake: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"serve": fake.url, "out": str(tmp_path), "num_requests": 1}
    for dropped in (
        {"draft": ["ngram"]}, {"ks": "4"}, {"num_reqs": "2"}, {"context": "100"},
        {"num_prompts": 3}, {"simulate_acceptance": ["0.8"]}, {"peer": ["vllm"]},
        {"temperature": "0,0.8"}, {"max_new_tokens": 0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"--serve takes a server as it is|max_new_tokens"):
            command.bench(**options, **dropped)
    assert fake.handler.bodies == []
    command.bench(**options, temperature="0.8", top_p=0.9, top_k=5, seed=3, rate=100, commit="abc")
    (body,) = fake.handler.bodies
    assert (body["temperature"], body["top_p"], body["top_k"], body["seed"]) == (0.8, 0.9, 5, 3)
    assert "ignore_eos" not in body
    got = json.loads((tmp_path / "load.json").read_text())
    assert got["commit"] == "abc"
    assert got["versions"]["specdec"]


def test_arrivals_are_a_poisson_process_that_repeats() -> None:
    """The mean gap of 20,000 lies within four of its standard deviations, 1/rate/sqrt(n)."""
    due = load.arrivals(5.0, 20_000, seed=3)
    assert due == load.arrivals(5.0, 20_000, seed=3) != load.arrivals(5.0, 20_000, seed=4)
    gaps = [after - before for before, after in zip([0.0, *due], due, strict=False)]
    assert min(gaps) >= 0
    assert abs(due[-1] / 20_000 - 0.2) < 4 * 0.2 / 20_000**0.5
    # Of an exponential distribution 1/e of the gaps is longer than the mean.
    share = sum(gap > 0.2 for gap in gaps) / len(gaps)
    assert abs(share - 0.3679) < 4 * (0.3679 * 0.6321 / 20_000) ** 0.5


def test_requests_do_not_wait_for_each_other(fake: Any) -> None:
    """The server answers none of eight before all of them have come."""
    fake.handler.meeting = threading.Barrier(8, timeout=20)
    got = load.run_load(fake.url, rate=1e6, num_requests=8)
    assert got["completed"] == 8
    assert not fake.handler.meeting.broken


@pytest.mark.parametrize(("rate", "count"), [(0, 1), (-1, 1), (float("inf"), 1), (1, 0)])
def test_bad_numbers_are_refused(rate: float, count: int) -> None:
    with pytest.raises(ValueError, match=r"rate|num_requests"):
        load.run_load("http://127.0.0.1:9", rate=rate, num_requests=count)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:9"):
        load.run_load("http://127.0.0.1:9")


def test_the_command_loads_our_own_server(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Speculation brings several tokens at once; the count is the server's own."""
    server = start("ngram")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["one two one two"]}\n{"turns": ["three"]}\n')
    command.bench(
        prompts=str(prompts),
        serve=f"{server.url}/v1", rate=50, num_requests=5, max_new_tokens=24, ignore_eos=True,
        out=str(tmp_path),
    )  # fmt: skip
    got = json.loads((tmp_path / "load.json").read_text())
    assert got["completed"] == 5
    assert got["tokens"] == 5 * 24
    assert got["chunks"] <= got["tokens"]
    shown = capsys.readouterr().out
    assert "5 requests of 5 at 50 a second" in shown
    assert "first token" in shown
