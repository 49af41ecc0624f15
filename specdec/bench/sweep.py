"""Drafters, k, requests side by side, contexts: what is accepted, and what a step and a token cost.

All k of a drafter run on one engine, whose graphs for the different query lengths stand side by
side; k=0 is plain decoding on the same engine and the baseline of every ratio. Near the end of a
text, where fewer than k tokens are left, the engine takes the graph of a smaller k.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.api import chat_prompts
from specdec.bench.environment import describe
from specdec.bench.floor import copy_bandwidth, step_bytes, weight_bytes
from specdec.bench.parts import PartTimer
from specdec.bench.peers import NGRAM, Task, exported, run_peer
from specdec.bench.points import Runs, point
from specdec.bench.prompts import Prompt, load_prompts, of_length, prompts_digest, spread
from specdec.bench.settings import AUTO, Settings, Width
from specdec.config import DTYPES
from specdec.engine import Engine
from specdec.params import SamplingParams
from specdec.timed import run_timed

SCHEMA_VERSION = 2
WARMUP_PROMPT_TOKENS = 8
SYNTHETIC = "of a given length"
Progress = Callable[[str], None]


def run_sweep(
    settings: Settings, *, commit: str | None = None, progress: Progress = lambda line: None
) -> dict[str, Any]:
    """Measure every point and return the report, ready to be written as JSON."""
    prompts = spread(load_prompts(settings.prompts), settings.num_prompts)
    report: dict[str, Any] = {"benchmark": "acceptance_vs_latency"}
    engines: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    peers: list[dict[str, Any]] = []
    bandwidth = 0.0
    for draft in settings.drafts:
        for rates in (None, *settings.simulate):
            progress(f"loading {settings.model or 'the bundled model'}, drafter {draft}")
            group = _Group(settings, prompts, draft, rates)
            with group.engine as engine:
                if not engines:
                    bandwidth = copy_bandwidth(engine.device)
                    report |= _head(engine, settings, prompts, commit)
                group.bandwidth = bandwidth
                points += group.points(progress)
                engines.append(group.facts())
            # The engine has given its memory back.
            if rates is None:
                peers += group.run_peers(points, progress)
    return report | {
        "bandwidth_bytes_per_second": bandwidth,
        "engines": engines,
        "points": points,
        "peers": peers,
    }


def _head(
    engine: Engine, settings: Settings, prompts: list[Prompt], commit: str | None
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        **describe(engine.device, commit),
        "model": _model_facts(engine, settings),
        "settings": settings.to_json() | {"ks": settings.widths, "num_prompts": len(prompts)},
        "prompts_digest": prompts_digest(prompts),
    }


class _Group:
    """One engine: a drafter, with real or simulated acceptance, and all its points."""

    def __init__(
        self,
        settings: Settings,
        prompts: list[Prompt],
        draft: str | None,
        rates: tuple[float, ...] | None,
    ) -> None:
        started = time.perf_counter()
        self.settings = settings
        self.prompts = prompts
        self.draft = draft
        self.rates = rates
        self.bandwidth = 0.0
        self.warmup_seconds = 0.0
        # Tokens of all prompts together, of which those of a given length are made.
        self.text_tokens = 0
        # Prompts and greedy texts without drafts, for peers.
        self.reference: tuple[list[list[int]], list[list[int]]] | None = None
        numbers = [k for k in settings.widths if isinstance(k, int)]
        adapts = AUTO in settings.widths and draft is not None
        self.engine = Engine(
            settings.model,
            draft,
            AUTO if adapts else settings.max_k,
            k_max=max(settings.max_k, 1),
            extra_k=[k for k in numbers if 0 < k < settings.max_k],
            max_num_seqs=max(settings.num_reqs),
            max_model_len=settings.max_model_len,
            steps_per_replay=settings.steps_per_replay,
            dtype=settings.dtype,
            device=settings.device,
            cudagraph_mode=settings.cudagraph_mode,
            # Every k runs the same prompts: all but the first would find them read already.
            enable_prefix_caching=False,
            # And would look their answers up among the outputs of the k before.
            suffix_history=0,
            simulated_acceptance=rates,
        )
        self.build_seconds = time.perf_counter() - started
        self.graphs = self.engine.graph_table()

    def facts(self) -> dict[str, Any]:
        """What belongs to the engine as a whole: start-up apart from all points."""
        engine = self.engine
        step = engine._runner.step
        return {
            "draft": self.draft,
            "simulated": self.rates,
            "startup": {
                "build_seconds": self.build_seconds,
                "capture_seconds": engine.capture_seconds,
                "num_graphs": len(self.graphs),
                "graph_bytes": sum(row.num_bytes for row in self.graphs),
                "warmup_seconds": self.warmup_seconds,
            },
            "weight_bytes": weight_bytes(step.model),
            "prompt_text_tokens": self.text_tokens,
            "kv_blocks": engine.stats().total_kv_blocks,
            "crossover": [asdict(row) for row in engine.crossover()],
        }

    def points(self, progress: Progress) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        # Before any is measured: a length may be refused.
        contexts = {context: self._token_ids(context) for context in self.settings.contexts}
        for context, ids in contexts.items():
            # Simulated acceptance takes no seeds; sampling would not change what it costs much.
            for temperature in self.settings.temperatures if self.rates is None else (0.0,):
                for num_reqs in self.settings.num_reqs:
                    case = _Case(context, temperature, num_reqs)
                    if self.settings.warm_up:
                        self._warm_up(ids, case)
                    made += self._measure(ids, case, progress)
        return made

    def _token_ids(self, context: int | None) -> list[list[int]]:
        if context is None:
            return [_token_ids(self.engine, prompt.text, self.settings) for prompt in self.prompts]
        most = self.engine.max_model_len - 1
        if context > most:
            raise ValueError(f"contexts: {context} is too long, at most {most} tokens fit here")
        texts = [_encode(self.engine, prompt.text) for prompt in self.prompts]
        self.text_tokens = sum(len(text) for text in texts)
        return of_length(texts, context)

    def _params(self, case: "_Case", number: int, k: Width, max_new_tokens: int) -> SamplingParams:
        settings, seeded = self.settings, case.temperature > 0
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=case.temperature,
            top_k=settings.top_k if seeded else 0,
            top_p=settings.top_p if seeded else 1.0,
            seed=settings.seed + number if seeded else None,
            ignore_eos=settings.ignore_eos or self.rates is not None,
            k=k,
        )

    def _warm_up(self, ids: list[list[int]], case: "_Case") -> None:
        """Use every graph once: some are captured on first use, which belongs here."""
        started = time.perf_counter()
        for wave in _waves(len(ids), case.num_reqs):
            params = [self._params(case, number, 0, 1) for number in wave.values()]
            run_timed(self.engine, [ids[number] for number in wave.values()], params)
        counts = {case.num_reqs}
        if case.temperature > 0:
            table = self.engine.graph_table()
            counts |= {min(row.descriptor.num_reqs or 1, case.num_reqs) for row in table}
        widths = [k for k in self.engine._runner._ks if k <= self.engine.k]
        for k in widths:
            for count in sorted(counts):
                params = [self._params(case, number, k, k + 2) for number in range(count)]
                run_timed(self.engine, [ids[0][:WARMUP_PROMPT_TOKENS]] * count, params)
        self.warmup_seconds += time.perf_counter() - started

    def _measure(
        self, ids: list[list[int]], case: "_Case", progress: Progress
    ) -> list[dict[str, Any]]:
        """One point per k. They take turns wave by wave, so that a slow spell hits all of them."""
        engine, widths = self.engine, self.settings.widths
        runs = {k: Runs() for k in widths}
        on_gpu = engine.device.type == "cuda"
        for wave in _waves(len(ids), case.num_reqs):
            # Simulated acceptance is drawn by row too; otherwise the same prompt has the same text.
            are_distinct = [
                self.rates is not None or position == number for position, number in wave.items()
            ]
            for k in widths:
                params = [
                    self._params(case, number, k, self.settings.max_new_tokens)
                    for number in wave.values()
                ]
                launches = _num_launches(engine)
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats(engine.device)
                started = time.perf_counter()
                texts = run_timed(engine, [ids[number] for number in wave.values()], params)
                run = runs[k]
                run.seconds += time.perf_counter() - started
                run.texts += texts
                run.categories += [
                    # One of a given length goes on with texts of other kinds.
                    self.prompts[number].category if case.context is None else SYNTHETIC
                    for number in wave.values()
                ]
                run.are_distinct += are_distinct
                run.records += engine.recent_steps(_num_launches(engine) - launches)
                if on_gpu:
                    peak = torch.cuda.max_memory_allocated(engine.device)
                    run.peak_gpu_memory_bytes = max(run.peak_gpu_memory_bytes or 0, peak)
            progress(f"{self._label(case)}: {len(runs[0].texts)} texts of each k done")
        if self.reference is None and case.temperature == 0:
            self.reference = ids, [text.token_ids for text in runs[0].texts[: len(ids)]]
        return [self._point(case, k, runs) for k in widths]

    def _point(self, case: "_Case", k: Width, runs: dict[Width, Runs]) -> dict[str, Any]:
        made = point(runs[k])
        plain = [text.token_ids for text in runs[0].texts]
        speed, base = (
            sum(text.decode_tokens for text in each.texts)
            / max(sum(text.decode_seconds for text in each.texts), 1e-9)
            for each in (runs[k], runs[0])
        )
        equal = sum(
            text.token_ids == wanted for text, wanted in zip(runs[k].texts, plain, strict=True)
        )
        floor = self._floor(made["mean_num_reqs"], made["mean_k"], made["mean_context"])
        return {
            "draft": self.draft,
            "simulated": self.rates,
            "context": case.context,
            "temperature": case.temperature,
            "num_reqs": case.num_reqs,
            "k": k,
            **made,
            "speedup": speed / base if base else 0.0,
            "texts_equal_to_k0": equal if self.rates is None else None,
            "floor_ms_per_step": floor,
            "share_of_floor": floor["step"] / made["ms_per_step"] if made["ms_per_step"] else 0.0,
            "parts_ms": self._parts(case, k, made["mean_context"]),
        }

    def run_peers(self, points: list[dict[str, Any]], progress: Progress) -> list[dict[str, Any]]:
        """The same prompts and k on the other engines that were asked for."""
        settings = self.settings
        rows: list[dict[str, Any]] = []
        if not settings.peers or self.reference is None:
            return rows
        prompts, texts = self.reference
        dtype = _dtype(self.engine)
        with tempfile.TemporaryDirectory() as folder:
            drafting: Path | str | None = self.draft
            if drafting not in (None, NGRAM):
                drafting = exported(self.draft, Path(folder) / "draft", DTYPES[dtype])
            task = Task(
                target=exported(settings.model, Path(folder) / "target", DTYPES[dtype]),
                draft=drafting,
                dtype=DTYPES[dtype],
                device=self.engine.device,
                max_new_tokens=settings.max_new_tokens,
                ignore_eos=settings.ignore_eos,
                max_model_len=max(len(ids) for ids in prompts) + settings.max_new_tokens + 16,
            )
            ks = [k for k in settings.widths if isinstance(k, int)]
            for name in settings.peers:
                rows += run_peer(name, task, prompts, texts, ks, progress)
        alone = {
            point["k"]: point["tokens_per_second_per_user"]
            for point in points
            if (point["draft"], point["simulated"]) == (self.draft, None)
            and (point["num_reqs"], point["temperature"]) == (1, 0)
            and point["context"] == settings.contexts[0]
        }
        for row in rows:
            if alone.get(row["k"]):
                row["versus_specdec"] = row["decode_tokens_per_second"] / alone[row["k"]]
        return rows

    def _floor(self, num_reqs: float, k: float, context: float) -> dict[str, float]:
        step = self.engine._runner.step
        read = step_bytes(step.model, step.drafter, num_reqs, k, context)
        floor = {name: 1e3 * count / self.bandwidth for name, count in read.items()}
        return floor | {"step": sum(floor.values())}

    def _parts(self, case: "_Case", k: Width, context: float) -> dict[str, float | None] | None:
        """Of greedy steps with a fixed k; None for the others."""
        if not self.settings.parts or not isinstance(k, int) or case.temperature > 0:
            return None
        timer = PartTimer(self.engine, 15 if self.engine.device.type == "cuda" else 2)
        most = timer.most_context(case.num_reqs, k)
        return timer.parts(case.num_reqs, k, min(max(int(context), 2), most)) if most > 1 else None

    def _label(self, case: "_Case") -> str:
        words = [f"{self.draft or 'no drafter'}, {case.num_reqs} side by side"]
        words += [f"context {case.context}"] * (case.context is not None)
        words += [f"temperature {case.temperature:g}"] * (case.temperature > 0)
        words += [f"simulated {self.rates}"] * (self.rates is not None)
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class _Case:
    context: int | None
    temperature: float
    num_reqs: int


def _token_ids(engine: Engine, text: str, settings: Settings) -> list[int]:
    if settings.chat_template:
        ids = chat_prompts(engine, text)
        if not isinstance(ids, str):
            return ids
    return _encode(engine, text)


def _encode(engine: Engine, text: str) -> list[int]:
    if engine.tokenizer is None:
        # A made model without a tokenizer: any ids will do, as long as they are the same each run.
        vocab_size = engine.model_config.vocab_size
        return [(7 * byte + 3) % vocab_size for byte in text.encode()]
    return engine.tokenizer.encode(text)


def _waves(num_prompts: int, num_reqs: int) -> Iterator[dict[int, int]]:
    """What runs side by side, {position: number of the prompt}.

    The last wave is filled up from the front: there positions go past the prompts.
    """
    for start in range(0, num_prompts, num_reqs):
        yield {position: position % num_prompts for position in range(start, start + num_reqs)}


def _num_launches(engine: Engine) -> int:
    return sum(engine.stats().steps_by_mode.values())


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
