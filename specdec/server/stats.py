"""What the engine has counted and holds, taken between two steps for /stats and /metrics."""

import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from specdec.outputs import EngineStats, StepRecord
from specdec.server.front import ServingEngine
from specdec.verifier.graph import GraphRow
from specdec.verifier.modes import BatchDescriptor

# Roles whose replays are steps, so that a step's padding is theirs.
_STEP_ROLES = ("step", "target")
RECENT_STEPS = 1000
RATE_SECONDS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class TextInEngine:
    """A text that runs, or waits for room."""

    id: str
    model: str
    is_running: bool
    prompt_tokens: int
    output_tokens: int
    seconds: float
    drafted: int
    accepted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """All of it at one moment.

    ``padding``: by mode and descriptor, the mean share over recent steps. ``texts``: first those
    that run, then those that wait, each in the order of their arrival.
    """

    stats: EngineStats
    graphs: list[GraphRow]
    padding: dict[tuple[str, BatchDescriptor], float]
    texts: list[TextInEngine]
    adapters: list[str]
    unloading: list[str]

    @property
    def num_running(self) -> int:
        return sum(text.is_running for text in self.texts)


def take_snapshot(front: ServingEngine) -> Snapshot:
    """To be called in the engine's thread."""
    engine, now = front.engine, time.perf_counter()
    texts = [
        TextInEngine(
            id=f"{text.id}.{text.index}",
            model=text.adapter_name,
            is_running=text.row >= 0,
            prompt_tokens=len(text.prompt_ids),
            output_tokens=len(text.output_ids),
            seconds=now - text.arrival_time,
            drafted=text.stats.drafted,
            accepted=text.stats.accepted,
        )
        for text in sorted(front.running(), key=lambda text: (text.row < 0, text.arrival))
        if text.finish_reason is None
    ]
    return Snapshot(
        stats=engine.stats(),
        graphs=engine.graph_table(),
        padding=mean_padding(engine.recent_steps(RECENT_STEPS)),
        texts=texts,
        adapters=engine.loras,
        unloading=engine.unloading_loras,
    )


def mean_padding(records: Iterable[StepRecord]) -> dict[tuple[str, BatchDescriptor], float]:
    """The share of each graph that was padding: of its requests, or of its tokens if mixed."""
    shares: dict[tuple[str, BatchDescriptor], list[float]] = defaultdict(list)
    for record in records:
        shape = record.descriptor
        live, padded = record.num_tokens, shape.num_tokens
        if shape.uniform:
            live, padded = record.num_reqs, shape.num_reqs
        elif record.mode == "PIECEWISE":
            # Such a graph is for any number of requests.
            shape = shape._replace(num_reqs=0)
        if padded:
            shares[record.mode, shape].append(1 - live / padded)
    return {key: sum(each) / len(each) for key, each in shares.items()}


class TokenRate:
    """Tokens per second over the last seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, num_tokens: int) -> None:
        now = time.monotonic()
        if self._counts and now - self._counts[-1][0] < 0.1:
            self._counts[-1] = (self._counts[-1][0], self._counts[-1][1] + num_tokens)
        else:
            self._counts.append((now, num_tokens))
        self._forget(now)

    @property
    def per_second(self) -> float:
        now = time.monotonic()
        self._forget(now)
        seconds = min(RATE_SECONDS, now - self._began)
        return sum(count for _, count in self._counts) / seconds if seconds > 0 else 0.0

    def _forget(self, now: float) -> None:
        while self._counts and now - self._counts[0][0] > RATE_SECONDS:
            self._counts.popleft()


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """The engine's part of /stats."""
    stats = snapshot.stats
    drafted, accepted = stats.drafted_by_position, stats.accepted_by_position
    rows = stats.live_rows + stats.padded_rows
    return {
        "num_running": snapshot.num_running,
        "num_waiting": len(snapshot.texts) - snapshot.num_running,
        "texts": [asdict(text) for text in snapshot.texts],
        "kv_blocks": {"free": stats.free_kv_blocks, "total": stats.total_kv_blocks},
        "steps_by_mode": stats.steps_by_mode,
        "padded_row_share": stats.padded_rows / rows if rows else 0.0,
        "preemptions": stats.preemptions,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "by_position": [
            {"drafted": d, "accepted": a} for d, a in zip(drafted, accepted, strict=True)
        ],
        "by_adapter": {name: asdict(counts) for name, counts in stats.by_adapter.items()},
        "row_steps_by_adapter": stats.row_steps_by_adapter,
        "adapters": snapshot.adapters,
        "unloading": snapshot.unloading,
        "adapter_loads": stats.adapter_loads,
        "graphs": [_graph(row, snapshot) for row in snapshot.graphs],
    }


def _graph(row: GraphRow, snapshot: Snapshot) -> dict[str, Any]:
    shape = row.descriptor
    counts_steps = row.role in _STEP_ROLES
    return {
        "role": row.role,
        "mode": row.mode,
        "variant": row.variant,
        "num_reqs": shape.num_reqs,
        "num_tokens": shape.num_tokens,
        "uniform": shape.uniform,
        "has_lora": shape.has_lora,
        "replays": row.replays,
        "padding": snapshot.padding.get((row.mode, shape)) if counts_steps else None,
        "num_bytes": row.num_bytes,
        "capture_seconds": row.capture_seconds,
    }
