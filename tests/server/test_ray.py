"""The deployment on Ray Serve, with two replicas on a Ray of this machine."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from replica_clients import COMPLETIONS, KEY, ReplicaClient

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason='needs Ray: pip install "ray[serve]"'
    ),
]
APP = "specdec-test"
PREFIX = (
    "What comes first is the same for all of them, and is longer than a block of the router's. "
)


class OnRay(ReplicaClient):
    """The application as a client sees it, and as whoever deployed it does."""

    def __init__(self, url: str, address: str, options: dict[str, Any]) -> None:
        super().__init__(url)
        self.options = options
        self._address = address

    def run(self, *arguments: str) -> None:
        """``serve run``."""
        command = [sys.executable, "-P", "-m", "ray.serve.scripts", "run", "--non-blocking"]
        command += ["--address", self._address, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr

    def deploy(self, folder: Path, lora: dict[str, str], **changed: Any) -> None:
        """``serve run`` with a configuration file, whose user_config gives the adapters."""
        application = {
            "name": APP,
            "import_path": "specdec.ray_serve:app",
            "args": self.options | changed,
            "deployments": [{"name": "engine", "user_config": {"lora": lora}}],
        }
        path = folder / "config.yaml"
        # JSON is YAML.
        path.write_text(json.dumps({"applications": [application]}))
        self.run(str(path))

    @staticmethod
    def pids() -> set[int]:
        """Of the engines' processes."""
        title = f"ray::ServeReplica:{APP}:engine".encode()
        found = set()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if path.read_bytes().startswith(title):
                    found.add(int(path.parent.name))
            except OSError:
                continue
        return found


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.fixture(scope="module")
def on_ray(tiny):
    import ray
    from ray import serve

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    context = ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        paths = {name: str(tiny.adapters / name) for name in "ab"}
        options = {
            "model": tiny.model,
            "served_model_name": "tiny",
            "draft": "layer_skip:1",
            "k": 3,
            "replicas": 2,
            "device": "cpu",
            "api_key": KEY,
            "timeout": 60,
            "lora": ",".join(f"{name}={path}" for name, path in paths.items()),
            "engine": '{"capture": "lazy", "max_num_seqs": 4, "max_loras": 4}',
        }
        address = context.address_info["address"]
        running = OnRay(f"http://127.0.0.1:{port}", address, options)
        arguments = [f"{key}={value}" for key, value in options.items()]
        running.run("--name", APP, "specdec.ray_serve:app", *arguments)
        running.wait_until(lambda: len(running.ready) == 2)
        yield running
        running.http.close()
        serve.shutdown()
    finally:
        ray.shutdown()


def test_texts_are_those_of_one_engine(on_ray: OnRay, expected) -> None:
    for prompt in ("one", "two"):
        for lora in (None, "a", "b"):
            wanted = expected(prompt, 12, lora=lora).text
            assert on_ray.text(prompt, model=lora or "tiny") == wanted
            assert on_ray.stream(prompt, model=lora or "tiny") == (wanted, "[DONE]")
    assert min(on_ray.metric("specdec_generated_tokens_total", model="base").values()) >= 12


def test_the_front_has_the_server_s_routes(on_ray: OnRay) -> None:
    assert httpx.get(f"{on_ray.url}/v1/models").status_code == 401
    models = on_ray.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["tiny", "a", "b"]
    assert on_ray.http.get("/v1/models/a").json()["parent"] == "tiny"
    assert on_ray.http.get("/v1/models/c").status_code == 404
    assert on_ray.http.get("/nothing").status_code == 404
    assert on_ray.post(prompt="x", model="none").json()["error"]["code"] == "model_not_found"
    assert "max_tokens" in on_ray.post(prompt="x", max_tokens=0).json()["error"]["message"]
    answer = on_ray.http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "y"})
    assert answer.status_code == 404 and "user_config" in answer.text
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    answer = on_ray.http.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 200 and answer.json()["object"] == "chat.completion"


def test_adapters_and_prefixes_stay_where_they_are(on_ray: OnRay) -> None:
    for name in "ab":
        gains = on_ray.gained(name, lambda number, name=name: on_ray.text(f"{number}", model=name))
        assert gains[0] == 0 and gains[1] > 0
    gains = on_ray.gained("base", lambda number: on_ray.text(f"{PREFIX}{number}"))
    assert gains[0] == 0 and gains[1] > 0
    assert on_ray.gained("base", lambda number: on_ray.text(f"{number}"))[0] > 0


def test_a_client_that_leaves_aborts_its_request(on_ray: OnRay) -> None:
    before = on_ray.num_aborted
    body = {"prompt": "x", "max_tokens": 450, "ignore_eos": True, "n": 2}
    with on_ray.http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        on_ray.http.post(COMPLETIONS, json=body, timeout=0.5)
    on_ray.wait_until(lambda: on_ray.num_aborted == before + 2)
    on_ray.wait_until(lambda: not any(on_ray.metric("specdec_texts_running").values()))


def test_a_killed_replica_loses_no_request_that_had_not_begun(on_ray: OnRay, expected) -> None:
    """Ray starts another one in its place."""
    body = {"max_tokens": 90, "ignore_eos": True}
    wanted = {(f"kill {i}", "tiny"): expected(f"kill {i}", **body).text for i in range(3)}
    victim = min(on_ray.pids())

    def kill() -> None:
        on_ray.wait_until(lambda: min(on_ray.metric("specdec_texts_running").values()) >= 1)
        os.kill(victim, signal.SIGKILL)
        on_ray.wait_until(lambda: len(on_ray.pids()) == 2 and victim not in on_ray.pids())
        on_ray.wait_until(lambda: len(on_ray.ready) == 2)

    num_lost = on_ray.ask_during(kill, wanted, **body)
    assert num_lost + on_ray.retried("lost") >= 1


def test_another_version_and_other_adapters_lose_no_request(
    on_ray: OnRay, tiny, expected, tmp_path: Path
) -> None:
    """The engine's own fields replace the processes; adapters are changed in those that run."""
    wanted = {("go", model): expected("go", 12, lora=lora).text
              for model, lora in (("tiny", None), ("a", "a"))}  # fmt: skip
    before = on_ray.pids()
    paths = {name: str(tiny.adapters / name) for name in "ab"}

    def change() -> None:
        on_ray.deploy(tmp_path, paths, k=2)
        on_ray.wait_until(lambda: len(on_ray.pids()) == 2 and not on_ray.pids() & before)
        on_ray.wait_until(lambda: len(on_ray.ready) == 2)
        after = on_ray.pids()
        on_ray.deploy(tmp_path, {"a": paths["a"], "new": paths["b"]}, k=2)
        on_ray.wait_until(lambda: on_ray.post(prompt="x", model="b").status_code == 404)
        assert on_ray.text("x", model="new") == expected("x", 12, lora="b").text
        assert on_ray.pids() == after

    assert on_ray.ask_during(change, wanted) == 0
    models = on_ray.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["tiny", "a", "new"]
