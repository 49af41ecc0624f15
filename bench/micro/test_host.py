"""What the host does in a step: dispatch, scheduling, detokenising, adaptive k."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny import make_tiny

from specdec.adaptation import Adaptation
from specdec.detokenize import Detokenizer
from specdec.drafters.step_costs import CostKey, StepCosts, Timing
from specdec.params import SamplingParams
from specdec.request import Request
from specdec.scheduler import Scheduler, StepPlan
from specdec.tokenizer import load_tokenizer
from specdec.verifier.dispatcher import CudagraphDispatcher
from specdec.verifier.kv_cache import BlockPool
from specdec.verifier.modes import BatchDescriptor, CUDAGraphMode

NUM_REQS, K, PROMPT, NEW = 64, 4, 200, 60


def test_dispatch(benchmark: Any) -> None:
    """A hundred decisions over the tables of an engine of 256 requests, k in {0, 1, 2, 4, 8}."""
    dispatcher = CudagraphDispatcher(max_num_seqs=256)
    dispatcher.initialize_cudagraph_keys(
        CUDAGraphMode.FULL_AND_PIECEWISE,
        uniform_query_lens=(1, 2, 3, 5, 9),
        max_num_batched_tokens=2048,
    )
    batches = [BatchDescriptor(n * q, n, True) for n in range(1, 256, 13) for q in (1, 2, 5, 9)]
    batches += [BatchDescriptor(100 * n, n) for n in range(1, 21)]
    batches = batches[:100]

    def dispatch_all() -> list[Any]:
        return [dispatcher.dispatch(batch) for batch in batches]

    modes = [mode for mode, _ in benchmark(dispatch_all)]
    assert CUDAGraphMode.NONE not in modes
    benchmark.extra_info["decisions"] = len(batches)


def request_of(number: int) -> Request:
    return Request(
        id=f"req-{number}",
        index=0,
        prompt_ids=[7 + number] * PROMPT,
        params=SamplingParams(max_new_tokens=NEW),
        k=K,
        adapts=False,
        end=PROMPT + NEW,
        seed=0,
        coupled=False,
        stop_ids=frozenset(),
        bad_words=[],
        arrival=number,
    )


def live(scheduler: Scheduler) -> int:
    """Schedule 64 requests from arrival to their end, 1 + k tokens a step."""
    for number in range(NUM_REQS):
        scheduler.add(request_of(number))
    steps = 0
    while scheduler.has_work:
        plan = scheduler.schedule(may_preempt=True)
        assert plan is not None
        steps += 1
        ended = []
        for request in plan.decodes:
            room = request.end - request.num_committed
            request.output_ids += [1] * min(1 + K, room)
            scheduler.publish(request)
            if request.num_committed == request.end:
                ended.append(request)
        for chunk in plan.prefills:
            if chunk.samples:
                chunk.request.output_ids.append(1)
        for request in ended:
            scheduler.finish(request)
    return steps


def test_scheduler(benchmark: Any) -> None:
    def fresh() -> tuple[tuple[Scheduler], dict]:
        scheduler = Scheduler(
            max_num_seqs=NUM_REQS,
            max_num_batched_tokens=2048,
            block_size=16,
            pool=BlockPool(NUM_REQS * 20),
            allowed_k=(0, K),
            draft_lag=0,
            prefix_caching=True,
        )
        return (scheduler,), {}

    steps = benchmark.pedantic(live, setup=fresh, rounds=20)
    benchmark.extra_info["steps"] = steps
    assert steps > NEW // (1 + K)


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_detokeniser(benchmark: Any, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A text of 2,000 tokens, five at a time."""
    folder = make_tiny(tmp_path_factory.mktemp("micro") / kind, vocab=256, tokenizer=kind)
    tokenizer = load_tokenizer(folder)
    ids = [32 + i % 90 for i in range(2000)]

    def detokenise() -> str:
        detokenizer = Detokenizer(tokenizer)
        for start in range(0, len(ids), 5):
            detokenizer.push(ids[start : start + 5])
        detokenizer.flush()
        return detokenizer.text

    assert benchmark(detokenise)
    benchmark.extra_info["tokens"] = len(ids)


def test_adaptive_k(benchmark: Any) -> None:
    """What k="auto" adds to a step of 64 rows, half of them with adapters."""
    timings = {
        CostKey(n, k, has_lora): Timing(128, 1e-3 * (1 + 0.1 * k + 0.01 * n), 4096, 3e-3 + 1e-4 * k)
        for n in (1, 8, 64)
        for k in (0, 1, 2, 4)
        for has_lora in (False, True)
    }
    runner = SimpleNamespace(write_k=lambda rows, ks: None)
    adaptation = Adaptation(StepCosts(timings), cast(Any, runner), reads_late=True)
    requests = [request_of(number) for number in range(NUM_REQS)]
    for number, request in enumerate(requests):
        request.adapts = True
        request.num_computed = request.prefill_goal = len(request.prompt_ids)
        request.output_ids = [1]
        if number % 2:
            request.adapter = cast(Any, SimpleNamespace(name=f"style-{number % 8}"))
    plan = StepPlan(decodes=requests)

    def step() -> int:
        adaptation.before_step(requests, 1)
        for row, request in enumerate(requests):
            adaptation.after_row(request, request.k, row % (request.k + 1))
        plan.k = max(request.k for request in requests)
        adaptation.after_step(plan, 2e-3, 1e-3, 1)
        return plan.k

    assert benchmark(step) in (0, 1, 2, 4)
