"""``specdec serve --replicas 2`` as processes: texts, affinity, lost replicas and restarts."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from replica_clients import COMPLETIONS, ServedReplicas

from specdec.replicas.plan import ServePlan, environments, gpus_of_replicas
from specdec.server.settings import ServerSettings

LONG = {"max_tokens": 90, "ignore_eos": True}
PREFIX = (
    "What comes first is the same for all of them, and is longer than a block of the router's. "
)


@pytest.fixture(scope="module")
def served(tiny):
    paths = [f"--lora={name}={tiny.adapters / name}" for name in "ab"]
    options = ["--draft", "layer_skip:1", "--k", "3", "--lora-root", str(tiny.adapters)]
    options += ["--device", "cpu", "--max-num-seqs", "4", "--capture", "lazy"]
    replicas = ServedReplicas(tiny.model, *options, *paths, "--served-model-name", "tiny")
    yield replicas
    replicas.kill()


def test_texts_are_those_of_one_engine(served: ServedReplicas, expected) -> None:
    assert "from 2 replicas" in served.line
    for number in range(2):
        prompt = f"prompt {number}"
        for lora in (None, "a", "b"):
            wanted = expected(prompt, 12, lora=lora).text
            assert served.text(prompt, model=lora or "tiny") == wanted
            assert served.stream(prompt, model=lora or "tiny") == (wanted, "[DONE]")
    assert min(served.metric("specdec_generated_tokens_total", model="base").values()) >= 12
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="key", max_retries=0)
    messages: Any = [{"role": "user", "content": "hello"}]
    chats = [
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
        for _ in range(2)
    ]
    assert len({chat.choices[0].message.content for chat in chats}) == 1
    chunks = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chats[0].choices[0].message.content


def test_the_front_asks_for_the_key_and_says_who_is_ready(served: ServedReplicas) -> None:
    assert httpx.get(f"{served.url}/v1/models").status_code == 401
    assert httpx.post(f"{served.url}/v1/restart_replicas").status_code == 401
    health = httpx.get(f"{served.url}/health").json()
    assert health["status"] == "ok" and [r["state"] for r in health["replicas"]] == ["ready"] * 2
    models = served.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["tiny", "a", "b"]
    assert served.post(prompt="x", model="none").status_code == 404
    assert "max_tokens" in served.post(prompt="x", max_tokens=0).text


def test_adapters_and_prefixes_stay_where_they_are(served: ServedReplicas) -> None:
    for name in "ab":
        gains = served.gained(name, lambda number, name=name: served.text(f"{number}", model=name))
        assert gains[0] == 0 and gains[1] > 0
    gains = served.gained("base", lambda number: served.text(f"{PREFIX}{number}"))
    assert gains[0] == 0 and gains[1] > 0
    # Without either they are shared.
    assert served.gained("base", lambda number: served.text(f"{number}"))[0] > 0


def test_a_client_that_leaves_aborts_its_request(served: ServedReplicas) -> None:
    before = served.num_aborted
    body = {"prompt": "x", "max_tokens": 450, "ignore_eos": True, "stream": True, "n": 2}
    with served.http.stream("POST", COMPLETIONS, json=body) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        served.http.post(COMPLETIONS, json=body | {"stream": False}, timeout=0.3)
    served.wait_until(lambda: served.num_aborted == before + 2)
    served.wait_until(lambda: not any(served.metric("specdec_texts_running").values()))
    assert [replica["texts"] for replica in served.health["replicas"]] == [0, 0]


def test_a_killed_replica_loses_no_request_that_had_not_begun(served, tiny, expected) -> None:
    """What has begun to stream says that it was lost; the new process has the adapters."""
    new = {"lora_name": "new", "lora_path": "b"}
    assert served.http.post("/v1/load_lora_adapter", json=new).status_code == 200
    wanted = {(f"kill {i}", "tiny"): expected(f"kill {i}", **LONG).text for i in range(3)}

    def kill() -> None:
        served.wait_until(lambda: all(r["texts"] >= 2 for r in served.health["replicas"]))
        os.kill(served.workers[0], signal.SIGKILL)
        served.wait_until(lambda: served.health["status"] == "degraded")
        served.wait_until(lambda: served.health["status"] == "ok")

    num_lost = served.ask_during(kill, wanted, **LONG)
    assert num_lost + served.retried("lost") >= 1
    assert sum(r["restarts"] for r in served.health["replicas"]) == 1
    for number in (0, 1):
        stats = served.http.get(f"/replicas/{number}/stats").json()
        assert stats["adapters"] == ["a", "b", "new"]
    assert served.text("x", model="new") == expected("x", 12, lora="b").text


def test_a_rolling_restart_under_load_loses_no_request(served: ServedReplicas, expected) -> None:
    """Both processes are replaced while four clients ask, two of them for streams."""
    wanted = {("roll", model): expected("roll", 30, lora=lora).text
              for model, lora in (("tiny", None), ("a", "a"))}  # fmt: skip
    before, lost = set(served.workers), served.retried("lost")

    def restart() -> None:
        served.process.send_signal(signal.SIGHUP)
        served.wait_until(lambda: served.health["rolling_restart"])
        served.wait_until(lambda: not served.health["rolling_restart"])

    assert served.ask_during(restart, wanted, max_tokens=30) == 0
    assert served.health["status"] == "ok" and served.retried("lost") == lost
    after = set(served.workers)
    assert len(after) == 2 and not after & before


def test_sigterm_lets_requests_end_and_leaves_nothing(served: ServedReplicas) -> None:
    """The last test: it ends the processes."""
    workers = served.workers
    folders = [Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-2] for pid in workers]
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with served.http.stream("POST", COMPLETIONS, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    _, errors = served.process.communicate(timeout=60)
    assert served.process.returncode == 0, errors
    assert "Traceback" not in errors, errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert not any(Path(folder).parent.exists() for folder in folders)


@pytest.mark.parametrize(
    ("options", "word"),
    [(["--device", "cuda:1"], "cuda:1"), (["--device", "cpu"], r"replica [01]: it is refused")],
    ids=["one GPU", "a replica that does not start"],
)
def test_what_is_wrong_is_one_line(options, word, tmp_path, capsys, monkeypatch) -> None:
    from specdec.cli import main

    fake = (sys.executable, "-P", str(Path(__file__).with_name("fake_worker.py")))
    monkeypatch.setattr("specdec.replicas.worker_process.COMMAND", fake)
    for name, value in (("FAKE", str(tmp_path)), ("FAKE_NUMBER", "1")):
        monkeypatch.setenv(name, value)
    (tmp_path / "refuse-1").touch()
    command = ["specdec", "serve", "some/model", "--port", "0", "--replicas", "2", *options]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as caught:
        main()
    out, errors = capsys.readouterr()
    assert caught.value.code == 2 and out == ""
    assert errors.count("\n") == 1 and re.search(word, errors), errors


def test_each_replica_takes_a_gpu_of_its_own(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert gpus_of_replicas(2, "auto", {}) == ["0", "1"]
    assert gpus_of_replicas(3, "cuda", {"CUDA_VISIBLE_DEVICES": "4,GPU-ab, 6"}) == [
        *("4", "GPU-ab", "6")
    ]
    assert gpus_of_replicas(4, "cpu", {}) is None
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    assert gpus_of_replicas(2, "cuda", {}, 2) == ["0,1", "2,3"]
    with pytest.raises(ValueError, match=r"--replicas 3 of 2 GPUs each: .* 5 GPUs"):
        gpus_of_replicas(3, "cuda", {}, 2)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    with pytest.raises(ValueError, match=r"--replicas 4: .* 3 GPUs"):
        gpus_of_replicas(4, "auto", {})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert gpus_of_replicas(2, "auto", {}) is None
    with pytest.raises(ValueError, match="0 GPUs"):
        gpus_of_replicas(2, "cuda", {})
    assert environments(2, ["4", "6"], {"A": "b"}, 8) == [
        {"A": "b", "CUDA_VISIBLE_DEVICES": "4"},
        {"A": "b", "CUDA_VISIBLE_DEVICES": "6"},
    ]
    assert environments(3, None, {}, 8) == [{"OMP_NUM_THREADS": "2"}] * 3
    assert environments(1, None, {"OMP_NUM_THREADS": "5"}, 8) == [{"OMP_NUM_THREADS": "5"}]


def test_a_plan_survives_its_way_to_a_process(tmp_path: Path) -> None:
    settings = ServerSettings(model_name="m", lora_root=tmp_path, timeout=3.5)
    plan = ServePlan(
        model=None, draft="ngram", k="auto", fields={"lora": {"a": "b"}}, settings=settings
    )
    assert "\n" not in plan.to_json()
    assert ServePlan.from_json(plan.to_json()) == plan


def test_the_front_imports_no_engine_and_the_server_no_ray() -> None:
    """A front's start and memory are not those of one replica more."""
    script = """
import sys
import specdec.cli, specdec.replicas.run
print(sorted({"torch", "numpy", "ray"} & set(sys.modules)))
import specdec.server.run
print(sorted({"ray"} & set(sys.modules)))
"""
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]
