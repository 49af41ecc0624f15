"""``--verify-lossless``: the same texts with drafters and without, whatever runs beside them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.doctor.forced import CLOSE_CALL, forced_pass
from specdec.doctor.inside import chunks_of, step_of, without_prefix_cache
from specdec.doctor.matrix import SMALL_STEP, Cell, cells
from specdec.doctor.report import FAULT, OK, WARNING, Check
from specdec.engine import Engine
from specdec.kernels.sampler import SamplingRows, log_probs
from specdec.kernels.sampling import COUPLED, gumbel_noise
from specdec.params import SamplingParams
from specdec.request import Request

# Share of the time that the solo texts may take.
SOLO_SHARE = 0.3

MakeEngine = Callable[[Any, Sequence[int]], AbstractContextManager[Engine]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first token of a text that is not the solo run's."""

    cell: str
    prompt: int
    position: int  # in the output
    expected: int | None  # token of the solo run; None: it had ended
    got: int | None
    gap: float | None  # what decides the reference's token there: the best above the second
    seeded: bool
    is_close: bool  # the gap is one that rounding explains

    def __str__(self) -> str:
        what = "noisy log-probabilities" if self.seeded else "logits"
        gap = "" if self.gap is None else f"; the two best {what} there are {self.gap:.3g} apart"
        return (
            f"{self.cell}: prompt {self.prompt} differs first at token {self.position}, "
            f"{self.got} instead of {self.expected}{gap}"
        )


@dataclass(kw_only=True, slots=True)
class Lossless:
    """What was compared, and what differed."""

    compared: int = 0  # tokens
    prompts: int = 0
    cells_run: int = 0
    cells_total: int = 0
    seconds: float = 0.0
    exact: bool = False  # bits are promised, so that nothing counts as rounding
    dtype: str = ""
    differences: list[Difference] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify_lossless(
    make_engine: MakeEngine,
    draft: Any,
    prompts: Sequence[list[int]],
    *,
    ks: Sequence[int],
    max_new_tokens: int,
    seconds: float,
    adapters: Sequence[str | None],
    seeded: bool = True,
) -> Lossless:
    """Compare texts for about ``seconds``, the loading of engines left out.

    Args:
        make_engine: (draft, ks) -> an engine that drafts up to ``max(ks)``, with graphs of all.
        prompts: as many as time allows are run, in this order.
        adapters: of each prompt.
    """
    result = Lossless()
    clock = _Clock()
    drafts = [("given", draft)] if draft is not None else []
    if draft != "ngram":
        drafts.append(("ngram", "ngram"))
    with make_engine(None, [0]) as engine, clock.running():
        result.exact = step_of(engine).model.attention_backend.batch_invariant
        result.dtype = str(step_of(engine).model.dtype).removeprefix("torch.")
        solo: dict[tuple[int, bool], list[int]] = {}
        for number, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
            if number >= 2 and clock.spent > SOLO_SHARE * seconds:
                break
            for way in (False, True)[: 1 + seeded]:
                params = _params(number, way, 0, max_new_tokens)
                (text,) = engine.generate([prompt], params, lora=[adapter])  # type: ignore[misc]
                solo[number, way] = text.token_ids
            result.prompts += 1
    for place, (name, each) in enumerate(drafts):
        small_step = max(SMALL_STEP, 1 + max(ks))
        todo = cells(name, ks, seeded=seeded, small_step=small_step)
        result.cells_total += len(todo)
        # What one drafter leaves over is the next one's.
        until = clock.spent + (seconds - clock.spent) / (len(drafts) - place)
        with make_engine(each, ks) as engine:
            for number, cell in enumerate(todo):
                # One cell of each drafter is run in any case.
                if number and clock.spent >= until:
                    break
                with clock.running():
                    _run_cell(result, engine, cell, prompts, solo, max_new_tokens, adapters)
    result.seconds = clock.spent
    return result


class _Clock:
    """Adds up the seconds of what is timed."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    @property
    def spent(self) -> float:
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._before + running

    @contextmanager
    def running(self) -> Iterator[None]:
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._before, self._since = self.spent, None


def _params(number: int, seeded: bool, k: int | None, max_new_tokens: int) -> SamplingParams:
    if not seeded:
        return SamplingParams(max_new_tokens=max_new_tokens, k=k)
    return SamplingParams(
        max_new_tokens=max_new_tokens, k=k, temperature=0.8, top_p=0.95, top_k=50, seed=number
    )


def _run_cell(
    result: Lossless,
    engine: Engine,
    cell: Cell,
    prompts: Sequence[list[int]],
    solo: dict[tuple[int, bool], list[int]],
    max_new_tokens: int,
    adapters: Sequence[str | None],
) -> None:
    waiting = list(range(result.prompts))
    requests: dict[int, Request] = {}
    step = 0
    with chunks_of(engine, cell.step_tokens):
        while waiting or any(r.finish_reason is None for r in requests.values()):
            arrives = len(waiting) if cell.arrival == "together" else int(step % 3 == 0)
            for number in waiting[:arrives]:
                params = _params(number, cell.seeded, cell.k, max_new_tokens)
                group = engine.add_request(prompts[number], params, adapters[number])
                requests[number] = group[0]
            waiting = waiting[arrives:]
            engine.step()
            step += 1
    result.cells_run += 1
    for number, request in requests.items():
        expected, got = solo[number, cell.seeded], request.output_ids
        at = _first_difference(expected, got)
        result.compared += len(expected) if at is None else at + 1
        if at is not None:
            found = _difference(engine, cell, number, at, expected, request, adapters[number])
            result.differences.append(found)


def _first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    if list(expected) == list(got):
        return None
    pairs = enumerate(zip(expected, got, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(expected), len(got)))


def _difference(
    engine: Engine,
    cell: Cell,
    number: int,
    at: int,
    expected: list[int],
    request: Request,
    adapter: str | None,
) -> Difference:
    model = step_of(engine).model
    text = request.prompt_ids + expected[:at]
    gap = None
    if len(text) < engine.max_model_len:
        gap = (
            adapter_gap(engine, text, adapter) if adapter else target_gap(engine, text, request, at)
        )
    # Of an adapter only the logits are known, and a temperature adds noise to them.
    explains = gap is not None and not (adapter and cell.seeded)
    is_close = explains and gap is not None and gap < CLOSE_CALL[model.dtype]
    return Difference(
        cell=str(cell),
        prompt=number,
        position=at,
        expected=expected[at] if at < len(expected) else None,
        got=request.output_ids[at] if at < len(request.output_ids) else None,
        gap=gap,
        seeded=cell.seeded,
        is_close=is_close and not model.attention_backend.batch_invariant,
    )


@torch.inference_mode()
def target_gap(engine: Engine, text: list[int], request: Request, output_index: int) -> float:
    """The target forced over ``text``: what decides the next token, the best above the second.

    Logits for a greedy request; for a seeded one, log-probabilities with the request's own noise.
    """
    step, params = step_of(engine), request.params
    hidden, _ = forced_pass(step.model, text)
    scores = step.model.compute_logits(hidden[-1:])[:, : step.vocab_size]
    if params.temperature > 0:

        def row(value: float, dtype: torch.dtype) -> Tensor:
            return torch.tensor([value], dtype=dtype, device=scores.device)

        seed = request.seed - 2**64 if request.seed >= 2**63 else request.seed
        rows = SamplingRows(
            temperature=row(params.temperature, torch.float32),
            top_k=row(params.top_k or 0, torch.int64),
            top_p=row(params.top_p, torch.float32),
            min_p=row(params.min_p, torch.float32),
            seed=row(seed, torch.int64),
            coupled=row(True, torch.bool),
            output_index=row(output_index, torch.int64),
        )
        noise = gumbel_noise(rows.seed, rows.indices(1), step.vocab_size, COUPLED)
        scores = (log_probs(scores[:, None], rows) + noise)[:, 0]
    best = scores.topk(2).values[0].tolist()
    return float(best[0] - best[1])


def adapter_gap(engine: Engine, text: list[int], adapter: str) -> float:
    """The same of an adapter's logits, from a request that reads ``text``."""
    with without_prefix_cache(engine):
        params = SamplingParams(max_new_tokens=1, k=0, logprobs=2)
        (generation,) = engine.generate([text], params, lora=[adapter])  # type: ignore[misc]
    assert generation.logprobs is not None
    best = sorted(generation.logprobs[0].top.values(), reverse=True)
    return best[0] - best[1]


def lossless_check(result: Lossless) -> Check:
    """One line on what was compared, or on the first difference."""
    name = "lossless"
    compared = (
        f"{result.compared:,} tokens compared with solo runs without a drafter, in "
        f"{result.cells_run} of {result.cells_total} cells over {result.prompts} prompts and "
        f"{result.seconds:.0f} s, {result.dtype}"
    )
    wide = [each for each in result.differences if not each.is_close]
    if wide:
        return Check(
            name=name,
            status=FAULT,
            found=f"{len(wide)} texts differ; first {wide[0]} ({compared})",
            todo="report this with the model, the prompt and the engine's fields",
        )
    if result.differences:
        return Check(
            name=name,
            status=WARNING,
            found=f"{len(result.differences)} texts differ at near ties, as kernels that are not "
            f"batch-invariant may; first {result.differences[0]} ({compared})",
            todo="take a batch-invariant attention backend (triton on a GPU) for equal bits",
        )
    rest = result.cells_total - result.cells_run
    more = f"; {rest} cells did not fit in the time, --seconds allows more" if rest else ""
    return Check(name=name, status=OK, found=f"{compared}: all equal{more}")
