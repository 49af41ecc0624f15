"""P7 over HTTP: a text that fails, a format that cannot be written, and a fault of our own."""

import concurrent.futures
import http.client
import json
import threading
import time

import pytest
from adapters import changed

import specdec
from specdec import lora as lora_module
from specdec.server import app as app_module

COMPLETIONS = "/v1/completions"


class Picky(specdec.Drafter):
    """Fails wherever some text holds a "!"."""

    name = "picky"

    def propose(self, state, k):
        for text, length in zip(state.tokens.tolist(), state.seq_lens.tolist(), strict=True):
            if ord("!") in text[:length]:
                raise RuntimeError("I cannot draft that")
        return state.last_token[:, None].expand(-1, k)


@pytest.fixture(scope="module")
def picky(start):
    return start(Picky(), engine={"cudagraph_mode": "NONE"})


def test_a_text_whose_steps_fail_gets_the_reason_and_nobody_else_does(picky, expected):
    """Fault: the engine's loop went on for ever with it, and with everybody beside it."""
    body = {"prompt": "a!b", "max_tokens": 20, "temperature": 0}
    wanted = expected("abc", 20).text
    answer = picky.post(COMPLETIONS, **body)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].endswith("RuntimeError: I cannot draft that")
    with picky.http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as stream:
        assert picky.text("abc", 20) == wanted
        *_, last = [line for line in stream.iter_lines() if line]
    assert "I cannot draft that" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert picky.http.get("/health").status_code == 200
    picky.wait_until_idle()


@pytest.mark.parametrize(
    ("response_format", "named"),
    [
        ({"type": "grammar", "grammar": 'root ::= root "a"'}, "no text can begin"),
        ({"type": "regex", "regex": "(?=a)b"}, "look-around"),
        ({"type": "regex", "regex": "((a{1,300}b){1,300}c){1,300}"}, "27090300"),
        ({"type": "json_schema", "json_schema": {"schema": False}}, "false"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "object", "zzz": 1}}},
            "'zzz'",
        ),
        ({"type": "grammar", "grammar": 'root ::= "ab" x\nx ::= x'}, "in this format"),
    ],
    ids=str,
)
def test_a_format_that_cannot_be_written_is_a_400(server, response_format, named):
    """Fault: 500 and "the model's numbers were not finite". The last one begins, and then ends."""
    pytest.importorskip("xgrammar")
    answer = server.post(COMPLETIONS, prompt="a", response_format=response_format)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "response_format")
    assert named in error["message"]
    assert "cpp" not in error["message"]


def test_a_malformed_adapter_is_a_400(server, tiny):
    for settings, part in (
        ({"target_modules": "(.*"}, "target_modules"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
    ):
        changed(tiny.adapters / "a", tiny.adapters / f"bad-{part}", **settings)
        body = {"lora_name": "bad", "lora_path": f"bad-{part}"}
        answer = server.post("/v1/load_lora_adapter", **body)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and part in message and "adapter_config.json" in message


def test_an_adapter_is_read_beside_the_steps_of_others(server, expected, monkeypatch):
    """Fault kind: a large adapter's files were read in the engine's thread.

    Here they are not read before another text has ended: in that thread neither would ever be.
    """
    read_adapter, text_ended = lora_module.read_adapter, threading.Event()

    def slow(*arguments, **options):
        assert text_ended.wait(30)
        return read_adapter(*arguments, **options)

    monkeypatch.setattr(lora_module, "read_adapter", slow)
    body = {"lora_name": "late", "lora_path": "a"}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        loading = pool.submit(server.post, "/v1/load_lora_adapter", **body)
        time.sleep(0.2)
        assert server.text("abc", 20) == expected("abc", 20).text
        text_ended.set()
        assert loading.result(30).status_code == 200
    assert server.text("abc", 20, model="late") == expected("abc", 20, lora="a").text
    server.post("/v1/unload_lora_adapter", lora_name="late")


def test_a_fault_of_our_own_leaves_the_connection_whole(picky, monkeypatch):
    """Fault: the server closed the connection after its 500, under the client's next request.

    One connection for both requests: a client that finds it closed raises RemoteDisconnected.
    """

    def broken(front):
        raise KeyError("planted")

    monkeypatch.setattr(app_module, "take_snapshot", broken)
    connection = http.client.HTTPConnection(*picky.address[:2], timeout=30)
    for _ in range(2):
        for path, status in (("/stats", 500), ("/health", 200)):
            connection.request("GET", path)
            answer = connection.getresponse()
            body = json.loads(answer.read())
            assert answer.status == status
            assert status == 200 or body["error"]["message"] == "internal server error"
    connection.close()
