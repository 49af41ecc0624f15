"""Engines, prompts and statistics that the tests of the contract share."""

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

PROMPTS = [
    [5, 17, 99, 3],
    [7] * 12,
    [64],
    [23, 88, 110, 4, 61, 9, 120, 33, 2],
    [101, 14, 77, 35, 90, 52, 18, 6, 115, 40, 71, 29, 83, 11, 96, 58, 127, 44, 20, 67, 31],
]


def cpu_engine(model: str, draft: Any = None, k: int = 4, **options: Any) -> Any:
    """A small engine on the CPU, whatever the machine has."""
    import specdec

    defaults = {"device": "cpu", "max_num_seqs": 5, "max_model_len": 96, "kv_block_size": 4}
    return specdec.Engine(model, draft, k, **(defaults | options))


def greedy(max_new_tokens: int = 24, **fields: Any) -> Any:
    import specdec

    return specdec.SamplingParams(max_new_tokens=max_new_tokens, **fields)


class EngineCache:
    """Engines by their arguments, so that tests share what is slow to build."""

    def __init__(self) -> None:
        self._engines: dict[Any, Any] = {}

    def __enter__(self) -> "EngineCache":
        return self

    def __call__(self, model: str, draft: Any = None, k: int = 4, **options: Any) -> Any:
        key = repr((model, draft, k, sorted(options.items())))
        if key not in self._engines:
            self._engines[key] = cpu_engine(model, draft, k, **options)
        return self._engines[key]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for engine in self._engines.values():
            engine.close()


def caches_of(engine: Any) -> list[Any]:
    """The engine's KV caches: those that hold as many blocks as it says it has."""
    import gc

    from specdec.verifier.kv_cache import KVCache

    reachable: set[int] = set()
    pending, found = [engine], []
    while pending:
        item = pending.pop()
        if id(item) in reachable or isinstance(item, (type, torch.Tensor)):
            continue
        reachable.add(id(item))
        if isinstance(item, KVCache):
            found.append(item)
        elif isinstance(item, (list, tuple, dict, set)) or type(item).__module__.startswith(
            "specdec"
        ):
            pending.extend(gc.get_referents(item))
    assert found, "the engine holds no KV cache"
    return found


def full_steps(engine: Any) -> int:
    return engine.stats().steps_by_mode.get("FULL", 0)


def assert_decodes_replayed(engine: Any) -> None:
    """Every step but a prefill took a FULL graph."""
    for record in engine.recent_steps(10_000):
        assert record.mode == "FULL" or "prefill" in record.reason.lower(), record


def assert_no_leak(engine: Any) -> None:
    stats = engine.stats()
    assert stats.free_kv_blocks == stats.total_kv_blocks


def chi_square_p_value(counts: Sequence[int], probs: Sequence[float]) -> float:
    """The chance of counts at least as far from ``probs``; impossible tokens must not occur."""
    total = sum(counts)
    assert total > 0
    assert all(count == 0 for count, prob in zip(counts, probs, strict=True) if prob == 0)
    pairs = [(c, total * p) for c, p in zip(counts, probs, strict=True) if p > 0]
    if len(pairs) == 1:
        return 1.0
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    half_freedom = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
    half_statistic = torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, half_statistic))


def histogram(ids: Iterable[int], size: int) -> list[int]:
    counts = [0] * size
    for token in ids:
        counts[token] += 1
    return counts


def split_by_origin(generation: Any) -> dict[str, list[int]]:
    """The tokens of a text by how they were committed: accepted, recovered or bonus."""
    found: dict[str, list[int]] = {"accepted": [], "recovered": [], "bonus": []}
    at, stats = 1, generation.stats
    for drafted, accepted in zip(stats.drafted_per_step, stats.accepted_per_step, strict=True):
        found["accepted"] += generation.token_ids[at : at + accepted]
        last = "bonus" if accepted == drafted else "recovered"
        found[last].append(generation.token_ids[at + accepted])
        at += accepted + 1
    assert at == len(generation.token_ids)
    return found
