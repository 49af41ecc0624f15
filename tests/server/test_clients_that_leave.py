"""Clients that leave, read slowly, or are many: others lose no text, and blocks come back."""

import asyncio
import json
import socket
import struct
import threading

import httpx
import pytest

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "long", "max_tokens": 90, "ignore_eos": True, "temperature": 0}


def connect(server, body: dict, *, buffer: int | None = None) -> socket.socket:
    """A connection on which a request has been sent and nothing read."""
    made = socket.socket()
    if buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.connect(server.address)
    made.settimeout(30)
    raw = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    made.sendall(head.encode() + raw)
    return made


def kill(connection: socket.socket) -> None:
    """Close with a reset, as the kernel does for a process that was killed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.fixture
def slow_server(server, monkeypatch):
    """Steps take long enough for a client to leave before the text ends."""
    step = server.engine.step

    def slower() -> None:
        threading.Event().wait(0.02)
        step()

    server.wait_until_idle()
    monkeypatch.setattr(server.engine, "step", slower)
    return server


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", [kill, socket.socket.close], ids=["killed", "closed"])
def test_a_client_that_leaves_aborts_its_request_alone(slow_server, expected, stream, leave):
    server = slow_server
    texts: list[str] = []
    other = threading.Thread(target=lambda: texts.append(server.text("other", 40)))
    other.start()
    generated = server.metric("specdec_generated_tokens_total")
    connection = connect(server, LONG | {"stream": stream, "n": 2})
    if stream:
        assert b"data: {" in connection.recv(4096) + connection.recv(4096)
    server.wait_until(lambda: any(len(text.output_ids) > 3 for text in server.front.running()))
    aborted = server.metric("specdec_aborted_total", reason="disconnect")
    leave(connection)
    server.wait_until(lambda: len(server.front.running()) <= 1)
    other.join(30)
    assert texts == [expected("other", 40).text]
    server.wait_until_idle()
    assert server.metric("specdec_aborted_total", reason="disconnect") == aborted + 1
    assert server.metric("specdec_generated_tokens_total") - generated < 3 * 90


def test_a_client_that_leaves_while_it_waits(slow_server) -> None:
    """More texts than rows: those of the second request have not begun when their client goes."""
    server = slow_server
    first = connect(server, LONG | {"n": 5})
    server.wait_until(lambda: sum(t.row >= 0 for t in server.front.running()) == 5)
    second = connect(server, LONG | {"n": 3})
    server.wait_until(lambda: len(server.front.running()) == 8)
    kill(second)
    server.wait_until(lambda: len(server.front.running()) == 5)
    kill(first)
    server.wait_until_idle()


def test_a_body_that_never_comes_holds_nothing(server) -> None:
    half = socket.create_connection(server.address)
    half.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode())
    assert server.text("ok", 4)
    kill(half)
    server.wait_until_idle()


def test_a_slow_reader_holds_up_nobody(server, expected) -> None:
    """It reads nothing while others' texts come; then it gets all of its own."""
    body = LONG | {"stream": True, "n": 8, "logprobs": 5}
    slow = connect(server, body, buffer=2048)
    wanted = expected("quick", 40).text
    assert [server.text("quick", 40) for _ in range(3)] == [wanted] * 3
    server.wait_until(lambda: not server.front.num_requests)
    raw = b""
    while b"[DONE]" not in raw:
        part = slow.recv(65536)
        assert part, raw[-200:]
        raw += part
    slow.close()
    server.wait_until_idle()


def test_200_streams_at_once(server, expected) -> None:
    """Each gets its own text, on its own adapter, though 66 of them are killed on the way."""
    prompts = [f"stream {number % 5}" for number in range(200)]
    models = ["tiny", "a", "b"]

    async def one(client: httpx.AsyncClient, number: int) -> str | None:
        body = {"prompt": prompts[number], "model": models[number % 3], "temperature": 0}
        body |= {"max_tokens": 10, "stream": True}
        text = ""
        async with client.stream("POST", COMPLETIONS, json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    if number % 3 == 2:
                        return None
        return text

    async def all_of_them() -> list[str | None]:
        limits = httpx.Limits(max_connections=250)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client:
            return await asyncio.gather(*(one(client, number) for number in range(200)))

    for number, text in enumerate(asyncio.run(all_of_them())):
        if number % 3 != 2:
            lora = models[number % 3] if number % 3 else None
            assert text == expected(prompts[number], 10, lora=lora).text
    server.wait_until_idle()
