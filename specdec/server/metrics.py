"""Prometheus metrics: what the server sees of each request, and what the engine has counted."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from specdec.config import BASE
from specdec.server.front import Job, Piece
from specdec.server.stats import Snapshot, TokenRate

_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_PER_TOKEN = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_WHOLE = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 600)


class Metrics:
    """All numbers of one server. The label ``model`` is an adapter's name, or "base"."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rate = TokenRate()
        self._engine = _EngineCollector()
        self.registry.register(self._engine)
        self.requests = self._counter("requests", "HTTP requests answered", "route", "status")
        self.aborted = self._counter("aborted", "Requests that ended before their texts", "reason")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts", "model")
        self.generated = self._counter("generated_tokens", "Tokens of answers", "model")
        self.finished = self._counter("texts", "Texts that have ended", "model", "finish_reason")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to a text's first token", _FIRST_TOKEN
        )
        self.per_token = self._histogram(
            "time_per_output_token_seconds", "Of a text, between its tokens, the mean", _PER_TOKEN
        )
        self.whole = self._histogram("text_seconds", "From arrival to the end of a text", _WHOLE)

    def render(self, snapshot: Snapshot) -> bytes:
        self._engine.snapshot = snapshot
        text: bytes = generate_latest(self.registry)
        return text

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"specdec_{name}", help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"specdec_{name}", help_text, ("model",), registry=self.registry, buckets=buckets
        )


class JobTimer:
    """Notes the tokens of one request as they come."""

    def __init__(self, metrics: Metrics, job: Job, lora: str | None, arrived: float) -> None:
        """``arrived``: on the clock of ``time.perf_counter``."""
        self._metrics = metrics
        self._model = lora if lora is not None else BASE
        self._arrived = arrived
        self._first: dict[int, float] = {}
        self._counts = [0] * len(job.texts)
        metrics.prompt_tokens.labels(self._model).inc(job.prompt_tokens)

    def note(self, piece: Piece) -> None:
        metrics, model, now = self._metrics, self._model, time.perf_counter()
        count = len(piece.token_ids)
        if count:
            if piece.number not in self._first:
                self._first[piece.number] = now
                metrics.first_token.labels(model).observe(now - self._arrived)
            self._counts[piece.number] += count
            metrics.generated.labels(model).inc(count)
            metrics.rate.add(count)
        if piece.finish_reason is not None:
            total = self._counts[piece.number]
            metrics.finished.labels(model, piece.finish_reason).inc()
            metrics.whole.labels(model).observe(now - self._arrived)
            if total > 1:
                seconds = now - self._first[piece.number]
                metrics.per_token.labels(model).observe(seconds / (total - 1))


class _EngineCollector:
    """The engine's own counts, as of the last snapshot."""

    snapshot: Snapshot | None = None

    def collect(self) -> Iterator[Metric]:
        if self.snapshot is None:
            return
        snapshot, stats = self.snapshot, self.snapshot.stats
        yield _counter("steps", "Engine launches by graph mode", "mode", stats.steps_by_mode)
        replays: dict[str, int] = {}
        for row in snapshot.graphs:
            replays[row.mode] = replays.get(row.mode, 0) + row.replays
        yield _counter("graph_replays", "Graph replays by mode", "mode", replays)
        yield _plain_counter("padded_rows", "Rows of decode graphs without a request", stats)
        yield _plain_counter("live_rows", "Rows of decode graphs with a request", stats)
        yield _plain_counter("prefill_chunks", "Pieces of prompts that were computed", stats)
        yield _plain_counter("preemptions", "Requests that gave up their room", stats)
        yield _plain_counter("adapter_loads", "Copies of an adapter into a slot", stats)
        row_steps = CounterMetricFamily(
            "specdec_row_steps",
            "Decode steps of requests, by adapter and graph mode",
            labels=["model", "mode"],
        )
        for adapter, by_mode in stats.row_steps_by_adapter.items():
            for mode, steps in by_mode.items():
                row_steps.add_metric([adapter, mode], steps)
        yield row_steps
        for name in ("drafted", "accepted"):
            by_position = dict(enumerate(getattr(stats, f"{name}_by_position"), start=1))
            by_adapter = {m: getattr(counts, name) for m, counts in stats.by_adapter.items()}
            what = f"Draft tokens {name}"
            yield _counter(f"{name}_tokens", f"{what}, by adapter", "model", by_adapter)
            yield _counter(
                f"{name}_tokens_by_position", f"{what}, by position", "position", by_position
            )
        yield _gauge("kv_blocks_free", "KV blocks that requests can take", stats.free_kv_blocks)
        yield _gauge("kv_blocks", "KV blocks of the pool", stats.total_kv_blocks)
        yield _gauge("texts_running", "Texts that hold a row", snapshot.num_running)
        waiting = len(snapshot.texts) - snapshot.num_running
        yield _gauge("texts_waiting", "Texts that wait for a row", waiting)
        yield _gauge("adapters", "Adapters that requests may ask for", len(snapshot.adapters))


def _counter(name: str, help_text: str, label: str, values: dict) -> CounterMetricFamily:
    family = CounterMetricFamily(f"specdec_{name}", help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family


def _plain_counter(name: str, help_text: str, stats: object) -> CounterMetricFamily:
    return CounterMetricFamily(f"specdec_{name}", help_text, value=getattr(stats, name))


def _gauge(name: str, help_text: str, value: int) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"specdec_{name}", help_text, value=value)
