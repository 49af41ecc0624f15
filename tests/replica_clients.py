"""Several replicas as a client sees them, and as processes of ``specdec serve --replicas``."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

COMPLETIONS = "/v1/completions"
KEY = "key"


class ReplicaClient:
    """Asks for greedy texts, and reads what is counted for each replica."""

    def __init__(self, url: str) -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {KEY}"}
        self.http = httpx.Client(base_url=url, timeout=60, headers=headers)

    @property
    def health(self) -> dict[str, Any]:
        return self.http.get("/health").json()

    @property
    def ready(self) -> list[str]:
        """The replicas that are ready."""
        replicas = self.health["replicas"]
        return [str(each["replica"]) for each in replicas if each["state"] == "ready"]

    def post(self, **body: Any) -> httpx.Response:
        return self.http.post(COMPLETIONS, json={"max_tokens": 12, "temperature": 0, **body})

    def text(self, prompt: str, **body: Any) -> str:
        answer = self.post(prompt=prompt, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def stream(self, prompt: str, **body: Any) -> tuple[str, Any]:
        """A text as far as it came, and the stream's last event."""
        text, last = "", None
        body = {"max_tokens": 12, "temperature": 0, "prompt": prompt, "stream": True, **body}
        with self.http.stream("POST", COMPLETIONS, json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line:
                    last = line.removeprefix("data: ")
                    if '"choices"' in last:
                        text += json.loads(last)["choices"][0]["text"]
        return text, last

    def metric(self, name: str, **labels: str) -> dict[str, float]:
        """The sums of a metric's samples with these labels, by replica."""
        values = dict.fromkeys(self.ready, 0.0)
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    values[sample.labels["replica"]] += sample.value
        return values

    def gained(self, model: str, ask: Callable[[int], Any]) -> list[float]:
        """The tokens of ``model`` that six calls of ``ask`` get from each replica, sorted."""
        before = self.metric("specdec_generated_tokens_total", model=model)
        for number in range(6):
            ask(number)
        after = self.metric("specdec_generated_tokens_total", model=model)
        return sorted(after[name] - before[name] for name in before)

    @property
    def num_aborted(self) -> float:
        """Requests that ended because their clients had left."""
        return sum(self.metric("specdec_aborted_total", reason="disconnect").values())

    def ask_during(
        self, action: Callable[[], Any], wanted: dict[tuple[str, str], str], **body: Any
    ) -> int:
        """Ask for texts over and over while ``action`` runs, and at least once after it.

        For each prompt and model of ``wanted`` one client asks for whole texts and one for streams.
        All must be as wanted, but for streams whose last event says that their replica was lost:
        how many.
        """
        is_over = threading.Event()

        def whole(prompt: str, model: str) -> int:
            assert self.text(prompt, model=model, **body) == wanted[prompt, model]
            return 0

        def stream(prompt: str, model: str) -> int:
            text, last = self.stream(prompt, model=model, **body)
            if last == "[DONE]":
                assert text == wanted[prompt, model]
                return 0
            assert json.loads(last)["error"]["code"] == "replica_lost"
            # Half a character may have been shown as what it is.
            assert wanted[prompt, model].startswith(text.rstrip("�"))
            return 1

        def ask(one: Callable[[str, str], int], prompt: str, model: str) -> int:
            num_lost, num_asked, is_last = 0, 0, False
            while not is_last or num_asked < 2:
                is_last = is_over.is_set()
                num_lost += one(prompt, model)
                num_asked += 1
                # Two cores start the new processes meanwhile.
                time.sleep(0.02)
            return num_lost

        with ThreadPoolExecutor(2 * len(wanted)) as pool:
            clients = [pool.submit(ask, one, *key) for key in wanted for one in (whole, stream)]
            try:
                action()
            finally:
                is_over.set()
            return sum(client.result() for client in clients)

    def retried(self, reason: str) -> float:
        """Requests for which another replica was asked."""
        text = self.http.get("/metrics").text
        families = text_string_to_metric_families(text)
        samples = [sample for family in families for sample in family.samples]
        name = "specdec_front_retried_total"
        return sum(s.value for s in samples if s.name == name and s.labels["reason"] == reason)

    def wait_until(self, condition: Callable[[], Any], seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.health
            time.sleep(0.05)


def children(pid: int) -> list[int]:
    """The processes that ``pid`` has started and that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if after_name[1] == str(pid) and after_name[0] != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


class ServedReplicas(ReplicaClient):
    """``specdec serve MODEL --replicas 2``, which has said that it is ready."""

    def __init__(self, model: str, *arguments: str) -> None:
        command = [sys.executable, "-P", "-m", "specdec", "serve", model, "--replicas", "2"]
        self.process = subprocess.Popen(
            [*command, "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A key in the environment stands in no list of processes.
            env={**os.environ, "SPECDEC_API_KEY": KEY},
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        if not self.line:
            raise AssertionError(self.process.communicate()[1])
        super().__init__(next(word for word in self.line.split() if word.startswith("http://")))

    @property
    def workers(self) -> list[int]:
        """The replicas' processes."""
        return children(self.process.pid)

    def kill(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
