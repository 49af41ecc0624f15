"""One engine, one drafter, every k: what is accepted, and what a step and a token cost.

All k run on one engine, whose graphs for the different query lengths stand side by side; k=0 is
plain decoding on the same engine and the baseline of every ratio. Near the end of a text, where
fewer than k tokens are left, the engine takes the graph of a smaller k.
"""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from specdec.api import chat_prompts
from specdec.bench.environment import describe
from specdec.bench.prompts import Prompt, load_prompts, spread
from specdec.engine import Engine
from specdec.outputs import StepRecord
from specdec.params import SamplingParams
from specdec.timed import TimedText, run_timed

SCHEMA_VERSION = 1
WARMUP_PROMPT_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure. ``num_prompts`` None takes all of them.

    ``name`` is what the report calls the model. ``draft`` is a name or path, as in ``Engine``. With
    a temperature every prompt has a seed of its own (``seed`` + its number), so that texts can be
    compared there too.
    """

    model: str | None = None
    name: str | None = None
    draft: str | None = "ngram"
    ks: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8)
    num_reqs: tuple[int, ...] = (1,)
    prompts: str | None = None
    num_prompts: int | None = None
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    chat_template: bool = True
    dtype: str = "auto"
    device: str = "auto"
    cudagraph_mode: str = "FULL_AND_PIECEWISE"
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 0:
            raise ValueError(f"ks must be numbers of at least 0, got {self.ks}")
        if not self.num_reqs or min(self.num_reqs) < 1:
            raise ValueError(f"num_reqs must be numbers of at least 1, got {self.num_reqs}")
        if self.draft is None and any(self.ks):
            raise ValueError(f"ks: without a drafter only 0 can be measured, got {self.ks}")
        if self.draft is not None and not any(self.ks):
            raise ValueError("ks: a drafter needs a k above 0 to be measured")


@dataclass(kw_only=True, slots=True)
class Acceptance:
    """Drafted and accepted tokens of some texts."""

    texts: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    committed_by_steps: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    def add(self, text: TimedText) -> None:
        stats = text.stats
        self.texts += 1
        self.tokens += len(text.token_ids)
        self.steps += stats.steps
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.committed_by_steps += stats.committed_by_steps
        _count_positions(self.drafted_by_position, stats.drafted_per_step)
        _count_positions(self.accepted_by_position, stats.accepted_per_step)

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_tokens_per_step(self) -> float:
        return self.committed_by_steps / self.steps if self.steps else 0.0

    def to_json(self) -> dict[str, Any]:
        missing = [0] * (len(self.drafted_by_position) - len(self.accepted_by_position))
        accepted = self.accepted_by_position + missing
        rates = [a / d for a, d in zip(accepted, self.drafted_by_position, strict=True)]
        return asdict(self) | {
            "accepted_by_position": accepted,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_position": rates,
            "mean_tokens_per_step": self.mean_tokens_per_step,
        }


def _count_positions(totals: list[int], per_step: Sequence[int]) -> None:
    for count in per_step:
        totals.extend([0] * (count - len(totals)))
        for position in range(count):
            totals[position] += 1


def run_sweep(
    settings: Settings,
    *,
    commit: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure every (num_reqs, k) and return the report, ready to be written as JSON."""
    prompts = spread(load_prompts(settings.prompts), settings.num_prompts)
    ks = sorted({0, *settings.ks})
    progress(f"loading {settings.model or 'the bundled model'} and capturing graphs")
    started = time.perf_counter()
    engine = Engine(
        settings.model,
        settings.draft,
        max(ks),
        extra_k=[k for k in ks if 0 < k < max(ks)],
        max_num_seqs=max(settings.num_reqs),
        max_model_len=settings.max_model_len,
        dtype=settings.dtype,
        device=settings.device,
        cudagraph_mode=settings.cudagraph_mode,
        # Every k runs the same prompts: all but the first would find them read already.
        enable_prefix_caching=False,
    )
    with engine:
        built = time.perf_counter() - started
        ids = [_token_ids(engine, prompt, settings) for prompt in prompts]
        graphs = engine.graph_table()
        points: list[dict[str, Any]] = []
        warmup = 0.0
        for num_reqs in settings.num_reqs:
            warmup += _warm_up(engine, ids, ks, num_reqs, settings)
            points += _measure(engine, prompts, ids, ks, num_reqs, settings, progress)
        device = engine.config.torch_device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return {
            "benchmark": "acceptance_vs_latency",
            "schema_version": SCHEMA_VERSION,
            **describe(device, commit),
            "model": _model_facts(engine, settings),
            "settings": asdict(settings) | {"ks": ks, "num_prompts": len(prompts)},
            "startup": {
                "build_seconds": built,
                "capture_seconds": engine.capture_seconds,
                "num_graphs": len(graphs),
                "graph_bytes": sum(row.num_bytes for row in graphs),
                "warmup_seconds": warmup,
            },
            "peak_gpu_memory_bytes": peak,
            "points": points,
        }


def _token_ids(engine: Engine, prompt: Prompt, settings: Settings) -> list[int]:
    if settings.chat_template:
        ids = chat_prompts(engine, prompt.text)
        if not isinstance(ids, str):
            return ids
    if engine.tokenizer is None:
        # A made model without a tokenizer: any ids will do, as long as they are the same each run.
        vocab_size = engine.model_config.vocab_size
        return [(7 * byte + 3) % vocab_size for byte in prompt.text.encode()]
    return engine.tokenizer.encode(prompt.text)


def _params(settings: Settings, number: int, k: int, max_new_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=settings.seed + number if settings.temperature > 0 else None,
        ignore_eos=settings.ignore_eos,
        k=k,
    )


def _warm_up(
    engine: Engine, ids: list[list[int]], ks: list[int], num_reqs: int, settings: Settings
) -> float:
    """Use every graph once: some are captured on first use, which belongs here. Seconds taken."""
    started = time.perf_counter()
    for wave in _waves(len(ids), num_reqs):
        params = [_params(settings, number, 0, 1) for number in wave]
        run_timed(engine, [ids[number] for number in wave], params)
    counts = {num_reqs}
    if settings.temperature > 0:
        counts |= {min(row.descriptor.num_reqs or 1, num_reqs) for row in engine.graph_table()}
    for k in ks:
        for count in sorted(counts):
            params = [_params(settings, number, k, k + 2) for number in range(count)]
            run_timed(engine, [ids[0][:WARMUP_PROMPT_TOKENS]] * count, params)
    return time.perf_counter() - started


@dataclass(slots=True)
class _Runs:
    """Everything that ran for one (num_reqs, k)."""

    texts: list[TimedText] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    seconds: float = 0.0


def _measure(
    engine: Engine,
    prompts: list[Prompt],
    ids: list[list[int]],
    ks: list[int],
    num_reqs: int,
    settings: Settings,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """One point per k. They take turns wave by wave, so that a slow spell hits all of them."""
    runs = {k: _Runs() for k in ks}
    for wave in _waves(len(prompts), num_reqs):
        for k in ks:
            params = [_params(settings, number, k, settings.max_new_tokens) for number in wave]
            launches = _num_launches(engine)
            started = time.perf_counter()
            texts = run_timed(engine, [ids[number] for number in wave], params)
            runs[k].seconds += time.perf_counter() - started
            runs[k].texts += texts
            runs[k].categories += [prompts[number].category for number in wave]
            runs[k].records += engine.recent_steps(_num_launches(engine) - launches)
        progress(f"{num_reqs} side by side: {len(runs[0].texts)} texts of each k done")
    points = [_point(k, num_reqs, runs[k]) for k in ks]
    plain_speed = points[0]["tokens_per_second_per_user"]
    for k, point in zip(ks, points, strict=True):
        speed = point["tokens_per_second_per_user"]
        point["speedup"] = speed / plain_speed if plain_speed else 0.0
        point["texts_equal_to_k0"] = sum(
            one.token_ids == plain.token_ids
            for one, plain in zip(runs[k].texts, runs[0].texts, strict=True)
        )
    return points


def _point(k: int, num_reqs: int, runs: _Runs) -> dict[str, Any]:
    total = Acceptance()
    by_category: dict[str, Acceptance] = defaultdict(Acceptance)
    for text, category in zip(runs.texts, runs.categories, strict=True):
        total.add(text)
        by_category[category].add(text)
    # The first token is the prefill's; what follows it is the steps'.
    tokens = sum(text.decode_tokens for text in runs.texts)
    seconds = sum(text.decode_seconds for text in runs.texts)
    per_token = [1e3 * t.decode_seconds / t.decode_tokens for t in runs.texts if t.decode_tokens]
    return {
        "k": k,
        "num_reqs": num_reqs,
        **total.to_json(),
        "ms_per_step": 1e3 * seconds / total.steps if total.steps else 0.0,
        "ms_per_token": {
            "mean": 1e3 * seconds / tokens if tokens else 0.0,
            **_percentiles(per_token),
        },
        "tokens_per_second_per_user": tokens / seconds if seconds else 0.0,
        "tokens_per_second": total.tokens / runs.seconds,
        "ttft_ms": _percentiles([1e3 * text.first_token for text in runs.texts]),
        "seconds": runs.seconds,
        **_graph_use(runs.records),
        "by_category": {name: part.to_json() for name, part in by_category.items()},
    }


def _waves(num_prompts: int, num_reqs: int) -> Iterator[list[int]]:
    """Numbers of the prompts that run side by side; the last wave is filled up from the front."""
    for start in range(0, num_prompts, num_reqs):
        yield [number % num_prompts for number in range(start, start + num_reqs)]


def _num_launches(engine: Engine) -> int:
    return sum(engine.stats().steps_by_mode.values())


def _graph_use(records: list[StepRecord]) -> dict[str, Any]:
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


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {"p50": 0.0, "p95": 0.0}
    ordered = sorted(values)
    nearest = min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))
    return {"p50": statistics.median(ordered), "p95": ordered[nearest]}


def _model_facts(engine: Engine, settings: Settings) -> dict[str, Any]:
    config = engine.model_config
    return {
        "name": settings.name or model_name(settings.model),
        "dtype": _dtype(engine),
        "architecture": config.architecture,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }


def _dtype(engine: Engine) -> str:
    """The rule of ``EngineConfig``: on "auto" float32 on the CPU, on a GPU the checkpoint's."""
    if engine.config.dtype != "auto":
        return engine.config.dtype
    if engine.config.torch_device.type == "cpu":
        return "float32"
    return str(engine.model_config.dtype).removeprefix("torch.")


def model_name(model: str | None) -> str:
    """What tables call a model: the bundled one with where its weights come from."""
    if model is None:
        return "SmolLM2-135M-Instruct (dequantised from Q4_1)"
    return model.rstrip("/").split("/")[-1]
