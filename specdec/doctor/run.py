"""One examination: read the files, plan, and where asked build the engine and measure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdec.adapters import read_adapters
from specdec.bench.prompts import load_prompts, spread
from specdec.config import EngineConfig, check_k
from specdec.doctor.acceptance import Acceptance, examine
from specdec.doctor.causes import causes_of, pass_cost
from specdec.doctor.checks import model_checks
from specdec.doctor.facts import plan_checks, plan_facts
from specdec.doctor.loaded import loaded_checks, loaded_facts
from specdec.doctor.lossless import lossless_check, verify_lossless
from specdec.doctor.matrix import KS
from specdec.doctor.pairing import pair_checks
from specdec.doctor.plan import Plan, make_plan
from specdec.doctor.report import FAULT, OK, UNSEEN, Check, Report
from specdec.doctor.subject import Subject, read_subject
from specdec.doctor.verdict import verdict_checks
from specdec.engine import Engine
from specdec.sources import Source, read_source
from specdec.tokenizer import Tokenizer
from specdec.verifier.models.llama import CausalLM

# A temperature needs acceptance that keeps a seed's text.
COUPLES = ("auto", "coupled")
# Tokens that a prompt must leave room for.
MIN_OUTPUT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is asked of the doctor.

    Attributes:
        model, draft, k: as ``Engine``'s.
        engine: fields of ``EngineConfig``.
        load: build the engine and report what it became.
        acceptance: generate, and compare what is accepted with what should be.
        lossless: compare texts with drafters and without, for about ``seconds``.
        prompts: a file, or None for the package's own; ``num_prompts`` of them.
        prompt_ids: token ids instead of a file.
    """

    model: str | Path | CausalLM | None = None
    draft: Any = None
    k: int | str = 4
    engine: Mapping[str, Any] = field(default_factory=dict)
    load: bool = False
    acceptance: bool = False
    lossless: bool = False
    seconds: float = 60.0
    prompts: str | Path | None = None
    num_prompts: int | None = None
    max_new_tokens: int | None = None
    chat_template: bool = True
    prompt_ids: Sequence[list[int]] | None = None

    def __post_init__(self) -> None:
        check_k(self.k)
        if self.seconds <= 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")
        for name in ("num_prompts", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.engine.get("simulated_acceptance") is not None:
            raise ValueError("simulated_acceptance: the doctor looks at real texts alone")


def run_doctor(settings: Settings, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Raises FileNotFoundError for a model or file that is not there, and ValueError or TypeError
    for settings that mean nothing; everything else that is wrong is in the report.
    """
    config = EngineConfig(**settings.engine)
    if settings.prompts is not None:
        load_prompts(settings.prompts)
    report = Report(
        model=_name(settings.model or "the bundled SmolLM2-135M-Instruct"),
        draft=_name(settings.draft),
        k=str(settings.k),
        device=str(config.torch_device),
    )
    progress("reading files")
    target = _read(report, "target files", lambda: read_source(settings.model, config))
    if target is None:
        return report
    report.add(model_checks(target, "target"))
    subject = _read(report, "draft files", lambda: read_subject(target, settings.draft, config))
    if subject is None:
        return report
    report.draft = subject.draft_name
    if subject.draft_model is not None:
        report.add(model_checks(subject.draft_model, "draft"))
    plan = _read(report, "engine", lambda: make_plan(subject, config, settings.k))
    if plan is not None:
        report.plan = list(plan_facts(subject, plan, config))
        report.add(plan_checks(plan, config, target.config.max_position_embeddings))
    report.add(pair_checks(subject, plan))
    report.add(_adapter_checks(config, target))
    if plan is not None:
        _measure(report, settings, subject, plan, progress)
    return report


def _measure(
    report: Report,
    settings: Settings,
    subject: Subject,
    plan: Plan,
    progress: Callable[[str], None],
) -> None:
    """What takes an engine."""
    wants_acceptance = settings.acceptance and subject.draft is not None and plan.max_k > 0
    if settings.acceptance and not wants_acceptance:
        found = "without a drafter there is nothing to accept"
        report.add([Check(name="acceptance", status=UNSEEN, found=found)])
    if not (settings.load or wants_acceptance or settings.lossless):
        return
    if report.exit_code:
        found = "not measured: an engine with the faults above would be refused or wrong"
        report.add([Check(name="measurements", status=UNSEEN, found=found)])
        return
    if settings.load or wants_acceptance:
        progress("loading")
        with _engine(settings, subject.draft, plan.max_k) as engine:
            report.plan += loaded_facts(engine)
            report.add(loaded_checks(engine, plan))
            if wants_acceptance:
                progress("generating, then forcing the texts through both models")
                _acceptance(report, settings, subject, plan, engine)
    if settings.lossless:
        progress(f"comparing texts for about {settings.seconds:g} s")
        _lossless(report, settings, subject, plan)


def _acceptance(
    report: Report, settings: Settings, subject: Subject, plan: Plan, engine: Engine
) -> None:
    prompts, adapters = prompts_of(settings, subject, plan)
    num_tokens = settings.max_new_tokens or (24 if plan.device.type == "cpu" else 128)
    result = examine(engine, prompts, num_tokens, adapters)

    def without_graphs() -> Acceptance | None:
        sizes = [-(-(len(ids) + num_tokens + 1) // engine.block_size) for ids in prompts]
        fields = {"cudagraph_mode": "NONE", "num_kv_blocks": sum(sizes)}
        try:
            with _engine(settings, subject.draft, plan.max_k, **fields) as eager:
                return examine(eager, prompts, num_tokens, adapters)
        except torch.OutOfMemoryError:
            return None

    causes = list(causes_of(result, engine, subject, without_graphs))
    report.add(verdict_checks(result, causes, pass_cost(engine), engine.tokenizer))
    report.acceptance = {
        "k": result.k,
        "prompts": len(result.texts),
        "how": result.guesser.how,
        "blind_to": result.guesser.blind_to,
        "predicted": _figures(result.predicted),
        "measured": _figures(result.measured),
        "differing_steps": len(result.mismatches),
        "differing_by_near_ties": len(result.mismatches) - len(result.unexplained),
        "causes": [cause.name for cause in causes],
    }


def _figures(tally: Any) -> dict[str, Any]:
    return {
        "mean_tokens_per_step": tally.mean,
        "steps": tally.steps,
        "drafted": tally.drafted,
        "accepted": tally.accepted,
        "acceptance_by_position": tally.by_position,
    }


def _lossless(report: Report, settings: Settings, subject: Subject, plan: Plan) -> None:
    ks = tuple(sorted({*KS, plan.max_k}))
    prompts, adapters = prompts_of(settings, subject, plan, on_cpu=3)

    def make_engine(draft: Any, widths: Sequence[int]) -> AbstractContextManager[Engine]:
        # Sizes that were asked for need not hold the widest batch of each of these k.
        fields: dict[str, Any] = {"cudagraph_capture_sizes": None}
        if plan.device.type == "cpu" and settings.engine.get("max_num_seqs") is None:
            # Rows of padding and the recording of graphs cost much here: as few as will do.
            rows = min(plan.max_num_seqs, len(prompts))
            fields |= {"capture": "lazy", "max_num_seqs": rows, "uniform_request_counts": [rows]}
        extra = [k for k in widths if 0 < k < max(widths)]
        return _engine(settings, draft, max(widths), extra_k=extra, **fields)

    result = verify_lossless(
        make_engine,
        subject.draft,
        prompts,
        ks=ks,
        max_new_tokens=settings.max_new_tokens or (24 if plan.device.type == "cpu" else 128),
        seconds=settings.seconds,
        adapters=adapters,
        seeded=settings.engine.get("acceptance", "auto") in COUPLES,
    )
    report.add([lossless_check(result)])
    report.lossless = result.as_dict()


def _engine(settings: Settings, draft: Any, k: int, **fields: Any) -> Engine:
    """The engine that was asked for, with a k of its own instead of "auto", which takes another
    from step to step, and without what a suffix drafter learns, which depends on what ran before.
    """
    options = {**settings.engine, "suffix_history": 0, **fields}
    return Engine(settings.model, draft, k, **options)  # type: ignore[arg-type]


def prompts_of(
    settings: Settings, subject: Subject, plan: Plan, *, on_cpu: int = 6
) -> tuple[list[list[int]], list[str | None]]:
    """Token ids that fit the context, and each prompt's adapter, base rows among them.

    ``on_cpu``: how many there, where the settings leave it open.
    """
    if settings.prompt_ids is not None:
        prompts = [list(ids) for ids in settings.prompt_ids]
    else:
        tokenizer = subject.target.tokenizer
        if tokenizer is None:
            raise ValueError("prompts: the model has no tokenizer, so texts cannot be read")
        count = settings.num_prompts or (on_cpu if plan.device.type == "cpu" else None)
        texts = [prompt.text for prompt in spread(load_prompts(settings.prompts), count)]
        templated = settings.chat_template and tokenizer.is_chat
        prompts = [_encode(tokenizer, text, templated) for text in texts]
    fitting = [ids for ids in prompts if len(ids) + MIN_OUTPUT <= plan.max_model_len]
    if not fitting:
        raise ValueError(f"prompts: none leaves room in a context of {plan.max_model_len} tokens")
    names: list[str | None] = [None, *(settings.engine.get("lora") or {})]
    return fitting, [names[i % len(names)] for i in range(len(fitting))]


def _encode(tokenizer: Tokenizer, text: str, templated: bool) -> list[int]:
    if not templated:
        return tokenizer.encode(text)
    text = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return tokenizer.encode(text, add_special_tokens=False)


def _adapter_checks(config: EngineConfig, target: Source) -> Iterator[Check]:
    for name, path in (config.lora or {}).items():
        try:
            weights = read_adapters({name: path}, target.config, config.max_lora_rank)[name]
        except (ValueError, OSError) as error:
            yield Check(
                name=f"adapter {name}",
                status=FAULT,
                found=" ".join(str(error).split()),
                todo="correct the path, or train the adapter for this model",
            )
        else:
            found = f"rank {weights.rank}, {len(weights.sites)} products"
            yield Check(name=f"adapter {name}", status=OK, found=found)


def _read(report: Report, name: str, read: Callable[[], Any]) -> Any:
    """What ``read`` gives, or None with a fault in the report where files say it cannot work."""
    try:
        return read()
    except FileNotFoundError:
        raise
    except (ValueError, NotImplementedError, OSError) as error:
        found = " ".join(str(error).split())
        todo = "take a model or an option that is supported"
        report.add([Check(name=name, status=FAULT, found=found, todo=todo)])
        return None


def _name(given: Any) -> str:
    return str(given) if given is None or isinstance(given, str | Path) else type(given).__name__
