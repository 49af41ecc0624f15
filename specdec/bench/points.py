"""From what ran to the numbers of one point: counts, percentiles and their intervals."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specdec.outputs import StepRecord
from specdec.timed import TimedText

# Of the intervals: 95%.
Z = 1.959964
NGRAM = 4


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """The 95% score interval of a share (Wilson, 1927); (0, 1) without a trial.

    It takes trials for independent. Drafts of one text are not quite, so true intervals are wider.
    """
    if not trials:
        return 0.0, 1.0
    share, z2 = successes / trials, Z * Z
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return low, high


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99, each the smallest value that at least that share does not exceed."""
    if not values:
        return {"p50": 0.0, "p95": 0.0, "p99": 0.0}
    ordered = sorted(values)
    return {
        f"p{share}": ordered[max(math.ceil(share / 100 * len(ordered)) - 1, 0)]
        for share in (50, 95, 99)
    }


@dataclass(kw_only=True, slots=True)
class Acceptance:
    """Drafted and accepted tokens of some texts."""

    texts: int = 0
    # The others are those of a prompt that ran before, which tell nothing new of acceptance.
    distinct_texts: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    committed_by_steps: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    ngrams: int = 0  # runs of four tokens
    distinct_ngrams: int = 0  # that occur for the first time in their text

    def add(self, text: TimedText, is_distinct: bool = True) -> None:
        stats = text.stats
        self.texts += 1
        self.distinct_texts += is_distinct
        self.tokens += len(text.token_ids)
        self.steps += stats.steps
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.committed_by_steps += stats.committed_by_steps
        _count_positions(self.drafted_by_position, stats.drafted_per_step)
        _count_positions(self.accepted_by_position, stats.accepted_per_step)
        runs = [
            tuple(text.token_ids[i : i + NGRAM]) for i in range(len(text.token_ids) - NGRAM + 1)
        ]
        self.ngrams += len(runs)
        self.distinct_ngrams += len(set(runs))

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_tokens_per_step(self) -> float:
        return self.committed_by_steps / self.steps if self.steps else 0.0

    def to_json(self) -> dict[str, Any]:
        missing = [0] * (len(self.drafted_by_position) - len(self.accepted_by_position))
        accepted = self.accepted_by_position + missing
        pairs = list(zip(accepted, self.drafted_by_position, strict=True))
        share = self.distinct_texts / self.texts if self.texts else 1.0
        return asdict(self) | {
            "accepted_by_position": accepted,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_position": [a / d for a, d in pairs],
            "acceptance_intervals": [list(wilson(share * a, share * d)) for a, d in pairs],
            "mean_tokens_per_step": self.mean_tokens_per_step,
            "repeated_share": 1 - self.distinct_ngrams / self.ngrams if self.ngrams else 0.0,
        }


def _count_positions(totals: list[int], per_step: Sequence[int]) -> None:
    for count in per_step:
        totals.extend([0] * (count - len(totals)))
        for position in range(count):
            totals[position] += 1


@dataclass(slots=True)
class Runs:
    """Everything that ran for one point."""

    texts: list[TimedText] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    are_distinct: list[bool] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    seconds: float = 0.0
    peak_gpu_memory_bytes: int | None = None


def point(runs: Runs) -> dict[str, Any]:
    """What one point says of acceptance, latency, throughput and graphs."""
    total = Acceptance()
    by_category: dict[str, Acceptance] = defaultdict(Acceptance)
    marks = zip(runs.texts, runs.categories, runs.are_distinct, strict=True)
    for text, category, is_distinct in marks:
        total.add(text, is_distinct)
        by_category[category].add(text, is_distinct)
    # The first token is the prefill's; what follows it is the steps'.
    tokens = sum(text.decode_tokens for text in runs.texts)
    seconds = sum(text.decode_seconds for text in runs.texts)
    by_text = [1e3 * t.decode_seconds / max(t.decode_tokens, 1) for t in runs.texts]
    per_token = [ms for ms, t in zip(by_text, runs.texts, strict=True) if t.decode_tokens]
    decodes = [record for record in runs.records if record.descriptor.uniform]
    rows = sum(record.num_reqs for record in decodes)
    return {
        **total.to_json(),
        "mean_k": sum(r.k * r.num_reqs for r in decodes) / rows if rows else 0.0,
        # As one row's step sees it, which is also how ms_per_step is made.
        "mean_num_reqs": sum(r.num_reqs**2 for r in decodes) / rows if rows else 0.0,
        "mean_context": _mean(
            [t.prompt_tokens + len(t.token_ids) / 2 for t in runs.texts],
            [t.stats.steps for t in runs.texts],
        ),
        "ms_per_step": 1e3 * seconds / total.steps if total.steps else 0.0,
        # Amortised: each text's mean. Raw: the gaps between tokens, 0 inside a step.
        "ms_per_token": {"mean": 1e3 * seconds / tokens if tokens else 0.0}
        | percentiles(per_token),
        "ms_between_tokens": percentiles([1e3 * gap for t in runs.texts for gap in t.gaps]),
        "tokens_per_second_per_user": tokens / seconds if seconds else 0.0,
        "tokens_per_second": total.tokens / runs.seconds,
        "ttft_ms": percentiles([1e3 * text.first_token for text in runs.texts]),
        "end_to_end_ms": percentiles([1e3 * text.last_token for text in runs.texts]),
        "seconds": runs.seconds,
        "peak_gpu_memory_bytes": runs.peak_gpu_memory_bytes,
        **graph_use(runs.records),
        "by_category": {name: part.to_json() for name, part in by_category.items()},
        # 0 for a text of one token.
        "ms_per_token_by_text": [round(ms, 5) for ms in by_text],
        "errors": [text.error or "" for text in runs.texts if text.finish_reason == "error"],
        "texts_digest": digest([text.token_ids for text in runs.texts]),
    }


def graph_use(records: Sequence[StepRecord]) -> dict[str, Any]:
    """How the decode steps ran; batches with prompts in them apart."""
    decodes = [record for record in records if record.descriptor.uniform]
    prefills = [record for record in records if not record.descriptor.uniform]
    padded = sum(record.descriptor.num_reqs for record in decodes)
    live = sum(record.num_reqs for record in decodes)
    return {
        "decode_steps_by_mode": dict(Counter(record.mode for record in decodes)),
        "reasons_not_full": dict(Counter(r.reason for r in decodes if r.mode != "FULL")),
        "prefill_launches_by_mode": dict(Counter(record.mode for record in prefills)),
        "padding_waste": (padded - live) / padded if padded else 0.0,
    }


def digest(texts: Sequence[Sequence[int]]) -> str:
    """A short name for these token ids: two runs with the same one wrote the same texts."""
    return hashlib.sha256(repr([list(ids) for ids in texts]).encode()).hexdigest()[:16]


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total else 0.0
