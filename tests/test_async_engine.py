"""The asyncio front: many callers, cancellation, bad requests, and an engine that fails."""

import asyncio

import pytest
from harness import PROMPTS, assert_no_leak, cpu_engine, greedy

from specdec.async_engine import AsyncEngine, EngineDeadError, EngineOverloadedError


def with_front(models, scenario, *, max_waiting=1024, draft="blend.1", **options):
    async def main():
        engine = cpu_engine(models["target"], models[draft], 4, **options)
        async with AsyncEngine(engine, max_waiting=max_waiting) as front:
            return await scenario(front)

    return asyncio.run(main())


def test_concurrent_callers_get_their_own_texts(models, oracles):
    async def scenario(front):
        async def stream(prompt):
            events = [event async for event in front.stream(prompt, greedy(20))]
            return [token for event in events for token in event.token_ids], events[-1]

        streams = [stream(PROMPTS[i % 5]) for i in range(20)]
        wholes = [front.generate(PROMPTS[i % 5], greedy(20)) for i in range(20)]
        results = await asyncio.gather(*streams, *wholes)
        assert_no_leak(front.engine)
        return results

    results = with_front(models, scenario)
    for i, (ids, last) in enumerate(results[:20]):
        assert ids == oracles["target"].greedy(PROMPTS[i % 5], 20)[0]
        assert last.finish_reason == "length"
    for i, out in enumerate(results[20:]):
        assert out.token_ids == oracles["target"].greedy(PROMPTS[i % 5], 20)[0]
        assert sum(out.stats.drafted_per_step) > 0


def test_a_caller_that_leaves_aborts_its_request_and_nobody_else_s(models, oracles):
    async def scenario(front):
        async def leaves():
            async for _ in front.stream(PROMPTS[0], greedy(80)):
                break

        waiting = asyncio.create_task(front.generate(PROMPTS[1], greedy(80)))
        stays = asyncio.create_task(front.generate(PROMPTS[3], greedy(40)))
        await leaves()
        waiting.cancel()
        out = await stays
        while front.num_requests:
            await asyncio.sleep(0.01)
        await front.call(front.engine.check_integrity)
        assert_no_leak(front.engine)
        return out

    out = with_front(models, scenario)
    assert out.token_ids == oracles["target"].greedy(PROMPTS[3], 40)[0]


def test_a_bad_request_is_refused_to_its_caller_alone(models, oracles):
    async def scenario(front):
        good = asyncio.create_task(front.generate(PROMPTS[0], greedy(30)))
        for prompt in ([], [1, 2, 500], "text without a tokenizer"):
            with pytest.raises(ValueError, match="prompt"):
                await front.generate(prompt, greedy(4))
        with pytest.raises(ValueError, match="typo"):
            await front.generate([1, 2], greedy(4), lora="typo")
        return await good

    out = with_front(models, scenario)
    assert out.token_ids == oracles["target"].greedy(PROMPTS[0], 30)[0]


def test_no_more_than_max_waiting_requests_are_held(models):
    async def scenario(front):
        tasks = [asyncio.create_task(front.generate(PROMPTS[0], greedy(20))) for _ in range(9)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = with_front(models, scenario, max_waiting=4)
    refused = [result for result in results if isinstance(result, EngineOverloadedError)]
    assert len(refused) >= 1 and len(results) - len(refused) >= 4


def test_an_engine_that_fails_tells_every_caller(models, monkeypatch):
    async def scenario(front):
        task = asyncio.create_task(front.generate(PROMPTS[0], greedy(80)))
        stream = front.stream(PROMPTS[1], greedy(80))
        await anext(stream)

        def broken():
            raise RuntimeError("planted")

        monkeypatch.setattr(front.engine, "step", broken)
        with pytest.raises(EngineDeadError):
            await task
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass
        with pytest.raises((EngineDeadError, RuntimeError)):
            await front.generate(PROMPTS[0], greedy(4))

    with_front(models, scenario)
