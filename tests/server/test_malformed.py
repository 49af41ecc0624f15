"""What no client should send, and what nobody else may notice of it."""

import contextlib
import json
import socket
import threading
import time

import httpx
import pytest

from specdec.server import connection as connection_module
from specdec.server.errors import MAX_MESSAGE

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
HUGE = 10**400

# (body, a word that the message must hold)
COMPLETION_FAULTS = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": ["fine", ""]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [HUGE]}, "prompt"),
    ({"prompt": "a" * 500}, "max_model_len"),
    ({"prompt": "a", "model": 5}, "model"),
    ({"prompt": "a", "model": ["tiny"]}, "model"),
    ({"prompt": "a", "max_tokens": "4"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 4.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "max_tokens": HUGE}, "max_tokens"),
    ({"prompt": "a", "min_tokens": 9, "max_tokens": 4}, "min_tokens"),
    ({"prompt": "a", "min_tokens": 2**63}, "min_tokens"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "temperature": HUGE}, "temperature"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature"),
    ({"prompt": "a", "temperature": float("inf")}, "temperature"),
    ({"prompt": "a", "top_p": 1.5}, "top_p"),
    ({"prompt": "a", "top_k": 2**63}, "top_k"),
    ({"prompt": "a", "top_k": -1}, "top_k"),
    ({"prompt": "a", "seed": 2**64}, "seed"),
    ({"prompt": "a", "n": 0}, "n must"),
    ({"prompt": "a", "n": HUGE}, "n must"),
    ({"prompt": "a", "k": 4}, "k must"),
    ({"prompt": "a", "k": HUGE}, "k must"),
    ({"prompt": "a", "stop": 5}, "stop"),
    ({"prompt": "a", "stop": {"a": 1}}, "stop"),
    ({"prompt": "a", "stop": ["x", 1]}, "stop"),
    ({"prompt": "a", "stop": ["x"] * 257}, "256"),
    ({"prompt": "a", "stop_token_ids": [300]}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": [HUGE]}, "stop_token_ids"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": "x"}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"²": 1}}, "logit_bias"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "bad_words": "a"}, "bad_words"),
    ({"prompt": "a", "bad_words": [5]}, "bad_words"),
    ({"prompt": "a", "bad_words": [[]]}, "bad_words"),
    ({"prompt": "a", "ignore_eos": "yes"}, "ignore_eos"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"usage": True}}, "usage"),
    ({"prompt": "a", "response_format": "json"}, "response_format"),
    ({"prompt": "a", "response_format": {"type": ["x"]}}, "response_format"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format"),
    ({"prompt": "a", "response_format": {"type": "regex", "regex": "(("}}, "response_format"),
    ({"prompt": "a", "temprature": 1}, "temprature"),
    ({"prompt": "a", "x": 1, "y": None}, "x, y"),
    ({"prompt": "\ud800"}, "JSON"),
]
CHAT_FAULTS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role"),
    ({"messages": [*HI, {"role": "tool", "content": "hi"}]}, "messages[1].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": []}]}, "tool_calls"),
    ({"messages": [{"role": "user", "content": "a" * 500}]}, "max_model_len"),
    ({"messages": HI, "max_tokens": 4, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"messages": HI, "logprobs": 2}, "logprobs"),
    ({"messages": HI, "tool_choice": "auto"}, "tool_choice"),
    ({"messages": HI, "functions": []}, "functions"),
    ({"messages": HI, "prompt": "hi"}, "prompt"),
]


@pytest.fixture(autouse=True)
def _others_lose_nothing(server, expected):
    """Beside each of these tests a text runs, and it ends as if it were alone."""
    texts = []
    thread = threading.Thread(target=lambda: texts.append(server.text("others", 60)))
    thread.start()
    yield
    thread.join(30)
    assert texts == [expected("others", 60).text]
    server.wait_until_idle()


def check_error(answer, status: int, word: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and word in error["message"]
    assert len(error["message"]) < MAX_MESSAGE + 10


@pytest.mark.parametrize(
    ("path", "faults"),
    [(COMPLETIONS, COMPLETION_FAULTS), (CHAT, CHAT_FAULTS)],
    ids=["text", "chat"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_wrong_fields_are_400_and_named(server, path, faults, stream) -> None:
    for body, word in faults:
        given = {"stream": True} | body if stream and "stream_options" not in body else body
        raw = json.dumps(given).encode()
        answer = server.http.post(path, content=raw)
        assert answer.status_code == 400, (body, answer.text)
        check_error(answer, 400, word)


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"null", b"5", b'"text"', b"[]", b"{'prompt': 'x'}", b"\xff\xfe", b"\x00"),
        b'{"prompt": "' + b"\\ud83d" + b'"}',
        b'{"prompt": "\xff"}',
        # Halves of surrogate pairs, which Python's decoder for JSON lets through.
        b'{"prompt": "a", "user": "\xed\xa0\x80"}',
        b'{"lora_name": "\xed\xa0\x80", "lora_path": "a"}',
        '{"lora_name": "\ud800", "lora_path": "a"}'.encode("utf-16", "surrogatepass"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda raw: repr(raw[:14]),
)
def test_a_body_that_is_no_json_object_is_400(server, raw) -> None:
    for path in (COMPLETIONS, CHAT, "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert server.http.post(path, content=raw).status_code == 400, path


def test_an_error_that_quotes_much_is_cut(server) -> None:
    check_error(server.post(COMPLETIONS, prompt="a", temperature="hot" * 9999), 400, "temperature")


def test_unsatisfiable_formats_do_not_end_the_engine(server) -> None:
    """Nothing may follow such a format: the text ends, or it is refused."""
    for schema in ({"type": "string", "minLength": 9, "maxLength": 2}, {"enum": []}, {"not": {}}):
        format_ = {"type": "json_schema", "json_schema": {"schema": schema}}
        answer = server.post(COMPLETIONS, prompt="a", max_tokens=8, response_format=format_)
        assert answer.status_code in (200, 400, 500)
        assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("start_of_head", "rest"),
    [
        (b"GET /", b"a" * 65_536),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: ", b"a" * 65_536),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n", b"X-A: a\r\n" * 8192),
    ],
    ids=["line", "header", "headers"],
)
def test_a_head_without_an_end_is_refused(server, start_of_head, rest) -> None:
    """Fault: all of it was kept, in time that grows with its square."""
    with socket.create_connection(server.address) as connection:
        connection.settimeout(20)
        with contextlib.suppress(ConnectionError):
            connection.sendall(start_of_head)
            for _ in range(200):
                connection.sendall(rest)
            pytest.fail("13 MB of headers were taken")
    fits = server.http.get("/health", headers={"X-A": "a" * 30_000})
    assert fits.status_code == 200


def test_a_head_that_does_not_come_ends_the_connection(server, monkeypatch) -> None:
    """Whoever sends a byte now and then would hold a connection for ever."""
    monkeypatch.setattr(connection_module, "HEAD_SECONDS", 0.3)
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for first in (b"", b"GET /hea", whole):
        with socket.create_connection(server.address) as connection:
            connection.settimeout(20)
            connection.sendall(first)
            if first == whole:
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            with contextlib.suppress(ConnectionError):
                for _ in range(40):
                    connection.sendall(b"G")
                    time.sleep(0.05)
                pytest.fail("the connection is still open")
    # An answer may take longer than a head.
    monkeypatch.setattr(server.engine, "step", slowed(server.engine.step, 0.03))
    assert server.text("slow", 40)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_huge_body_is_413(start, is_chunked) -> None:
    server = start(max_body=10_000)
    body = json.dumps({"prompt": "a" * 2_000_000}).encode()
    parts = (body[at : at + 65536] for at in range(0, len(body), 65536))
    answer = server.http.post(COMPLETIONS, content=parts if is_chunked else body)
    check_error(answer, 413, "10000")
    fits = json.dumps({"prompt": "a", "max_tokens": 1}).encode().ljust(10_000)
    assert server.http.post(COMPLETIONS, content=fits).status_code == 200
    assert server.http.post(COMPLETIONS, content=fits + b" ").status_code == 413


def test_too_many_prompts_are_refused_before_any_is_encoded(server, monkeypatch) -> None:
    """Fault: a million of them took a minute of everybody's time to be refused."""
    encoded, tokenizer = [], type(server.engine.tokenizer)
    encode = tokenizer.encode

    def noted(self, text, *arguments, **options):
        encoded.append(text)
        return encode(self, text, *arguments, **options)

    monkeypatch.setattr(tokenizer, "encode", noted)
    check_error(server.post(COMPLETIONS, prompt=["one of many"] * 1025), 400, "1024")
    assert "one of many" not in encoded


def test_a_full_queue_is_429(start) -> None:
    server = start(max_waiting=4)
    check_error(server.post(COMPLETIONS, prompt="a", n=5), 400, "n")
    check_error(server.post(COMPLETIONS, prompt=["a"] * 5), 400, "n")
    slow(server, 0.05)
    body = {"prompt": "a", "max_tokens": 40, "n": 3, "ignore_eos": True}
    statuses = []
    thread = threading.Thread(
        target=lambda: statuses.append(server.post(COMPLETIONS, **body).status_code)
    )
    thread.start()
    server.wait_until(lambda: server.front.num_requests)
    refused = server.post(COMPLETIONS, prompt="a", n=2)
    check_error(refused, 429, "4")
    assert refused.headers["retry-after"]
    assert server.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 200
    thread.join(30)
    assert statuses == [200]
    server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_ends_the_request(start, stream) -> None:
    server = start(timeout=0.4)
    slow(server, 0.05)
    begun = time.monotonic()
    answer = server.post(COMPLETIONS, prompt="a", max_tokens=90, ignore_eos=True, stream=stream)
    assert time.monotonic() - begun < 5
    if stream:
        last = answer.text.strip().split("\n\n")[-1].removeprefix("data: ")
        error = json.loads(last)["error"]
    else:
        assert answer.status_code == 503 and answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
    assert error["code"] == "timeout"
    server.wait_until_idle()
    assert server.metric("specdec_aborted_total", reason="timeout") == 1


def slow(server, seconds: float) -> None:
    """Make every step take at least this long."""
    server.engine.step = slowed(server.engine.step, seconds)


def slowed(step, seconds: float):
    def slower() -> None:
        time.sleep(seconds)
        step()

    return slower


def test_the_key_opens_every_route(start) -> None:
    server = start(api_key="s3cret-key", lora_root=None)
    routes = [("GET", p) for p in ("/", "/stats", "/metrics", "/v1/models", "/v1/models/x", "/no")]
    routes += [("POST", p) for p in (COMPLETIONS, CHAT, "/v1/load_lora_adapter")]
    with httpx.Client(base_url=server.url) as stranger:
        assert stranger.get("/health").status_code == 200
        wrong = [b"", b"Bearer", b"Bearer s3cret", b"Basic !!", b"Basic czNjcmV0", b"Bearer \xff"]
        wrong.append(b"Basic \xe9")
        for method, path in routes:
            for header in wrong:
                answer = stranger.request(method, path, headers={"Authorization": header})
                check_error(answer, 401, "key")
        asked = stranger.get("/").headers["www-authenticate"]
        assert asked.startswith("Basic")
        page = stranger.get("/", auth=httpx.BasicAuth("anyone", "s3cret-key"))
        assert page.status_code == 200 and "specdec" in page.text
    assert server.http.get("/v1/models").status_code == 200
    assert server.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 200


def test_pages_of_other_sites_cannot_post(server) -> None:
    headers = {"Sec-Fetch-Site": "cross-site"}
    body = {"prompt": "a", "max_tokens": 1}
    check_error(server.http.post(COMPLETIONS, json=body, headers=headers), 403, "other sites")


def test_unknown_routes_and_methods(server) -> None:
    check_error(server.http.get("/v2"), 404, "/v2")
    check_error(server.http.get(COMPLETIONS), 405, "Method")
    check_error(server.http.delete("/v1/models"), 405, "Method")
