"""``specdec serve`` as a process: its ready line, its end, and its refusals."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from specdec.server.listen import bind

ENGINE = ["--draft", "none", "--max-model-len", "512", "--max-num-seqs", "2", "--device", "cpu"]
LONG = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "specdec", "serve", *arguments]


class Process:
    """A server that has said that it is ready."""

    def __init__(self, *arguments: str) -> None:
        # A key in the environment stands in no list of processes.
        self.process = subprocess.Popen(
            command(*arguments, *ENGINE, "--port", "0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "SPECDEC_API_KEY": "key"},
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        if not self.line:
            raise AssertionError(self.process.communicate()[1])
        self.url = next(word for word in self.line.split() if word.startswith("http://"))
        self.http = httpx.Client(
            base_url=self.url, timeout=60, headers={"Authorization": "Bearer key"}
        )

    def end(self, sig: int) -> tuple[int, str]:
        self.process.send_signal(sig)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def test_sigterm_lets_requests_end_and_takes_no_more(tiny) -> None:
    paths = [f"--lora={name}={tiny.adapters / name}" for name in "ab"]
    with Process(tiny.model, *paths, "--served-model-name", "small") as server:
        assert "small" in server.line and server.url.startswith("http://127.0.0.1:")
        models = server.http.get("/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["small", "a", "b"]
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        with server.http.stream("POST", "/v1/completions", json=LONG | {"model": "a"}) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health")
        _, errors = server.process.communicate(timeout=30)
        assert server.process.returncode == 0 and errors == "", errors


def test_what_does_not_end_in_time_is_aborted_and_told(tiny) -> None:
    with Process(tiny.model, "--drain-timeout", "0.1") as server:
        body = LONG | {"n": 8}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        _, errors = server.process.communicate(timeout=30)
        assert server.process.returncode == 0 and errors == "", errors


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--lora", "nameless"], "--lora must be NAME=PATH"),
        (["--lora", "a=x", "--lora", "a=y"], "twice"),
        (["--lora", "a=/no/such/folder"], "/no/such/folder"),
        (["--lora-root", "/no/such/folder"], "lora_root"),
        (["--api-key", ""], "api_key"),
        (["--api-key", "two words"], "api_key"),
        (["--max-waiting", "0"], "max_waiting"),
        (["--timeout", "0"], "timeout"),
        (["--k", "many"], "--k must be a number or auto"),
        (["--steps-per-replay", "many"], "--steps-per-replay must be a number or auto"),
        (["--host", "256.0.0.1"], "256.0.0.1"),
        (["--engine-options", "[]"], "--engine-options"),
        (["--engine-options", '{"dtype": "float32"}'], "dtype"),
        (["--engine-options", '{"no_such_field": 1}'], "no_such_field"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_options_are_one_line(tiny, arguments, word, capsys, monkeypatch) -> None:
    """In this process, so that a dozen starts do not take a minute."""
    from specdec.cli import main

    monkeypatch.setattr(sys, "argv", ["specdec", "serve", tiny.model, *ENGINE, *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    out, errors = capsys.readouterr()
    assert caught.value.code == 2 and out == ""
    assert errors.count("\n") == 1 and word in errors, errors


def test_a_port_in_use_is_told_before_the_model_is_loaded(tiny, capsys, monkeypatch) -> None:
    from specdec.cli import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["specdec", "serve", "/no/such/model", "--port", port]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as caught:
            main()
    assert caught.value.code == 2 and port in capsys.readouterr().err


def test_small_answers_are_sent_at_once() -> None:
    """asyncio switches Nagle's algorithm off on accepted sockets of this protocol alone."""

    async def no_delay() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            option = (socket.IPPROTO_TCP, socket.TCP_NODELAY)
            found.set_result(writer.get_extra_info("socket").getsockopt(*option))
            writer.close()

        bound = bind("127.0.0.1", 0)
        async with await asyncio.start_server(serve, sock=bound):
            _, writer = await asyncio.open_connection(*bound.getsockname())
            result = await found
            writer.close()
        return result

    assert asyncio.run(no_delay()) != 0
