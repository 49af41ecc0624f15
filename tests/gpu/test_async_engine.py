"""The asyncio front on a real GPU: its own thread steps the engine."""

import asyncio

import pytest
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, greedy

import specdec
from specdec.async_engine import AsyncEngine

pytestmark = pytest.mark.gpu


def make_engine(models, draft):
    return specdec.Engine(
        models["target"], draft, 4, device="cuda", max_num_seqs=8, max_model_len=256
    )


@pytest.mark.parametrize("draft", ["ngram", "blend.1"])
def test_the_front_gives_the_engine_s_texts(models, draft):
    """Many callers, one that leaves in mid-stream, and the texts of a plain engine."""
    draft = models.get(draft, draft)
    with make_engine(models, draft) as engine:
        expected = [out.token_ids for out in engine.generate(PROMPTS, greedy(32))]

    async def main():
        async with AsyncEngine(make_engine(models, draft)) as front:

            async def stream(prompt, events):
                ids = []
                async for event in front.stream(prompt, greedy(32)):
                    ids += event.token_ids
                    events -= 1
                    if not events:
                        break
                return ids

            numbers = [i % len(PROMPTS) for i in range(24)]
            limits = [2 if i % 5 == 4 else -1 for i in range(24)]
            pairs = zip(numbers, limits, strict=True)
            texts = await asyncio.gather(*(stream(PROMPTS[i], limit) for i, limit in pairs))
            while front.num_requests:
                await asyncio.sleep(0.01)
            await front.call(lambda: assert_no_leak(front.engine))
            await front.call(lambda: assert_decodes_replayed(front.engine))
            return numbers, limits, texts

    for number, limit, ids in zip(*asyncio.run(main()), strict=True):
        assert ids == expected[number][: len(ids)]
        assert limit > 0 or len(ids) == 32
