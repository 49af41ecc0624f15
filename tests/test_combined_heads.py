"""Lookup before an EAGLE-3 head: the head's chain goes on from drafts that are not its own."""

import pytest
import torch
from eagle_heads import make_head, whispering
from eagle_oracle import EagleOracle
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, cpu_engine, greedy
from oracle import CLOSE_CALL, Expected, Oracle, expect
from suffix_oracle import suffix_draft

from specdec.drafters.combined import SUFFIX_BEFORE_A_MODEL

ONE_RUNG = {"uniform_request_counts": [5]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("combined_heads")
    target = str(whispering(root / "target", vocab=12, habit=0.2, loud=0.05))
    return target, {
        name: str(make_head(target, root / name, parallel=name == "parallel"))
        for name in ("chain", "parallel")
    }


def propose_after(eagle, text, features, k, given):
    """The head's k drafts where the first are given, and the smallest margin of the others."""
    if eagle.config.get("specdec_parallel_drafting"):
        chosen, margin = eagle.propose(text, features, k)
        return [*given, *chosen[len(given) :]], margin
    fused = features[: len(text) - 1] @ eagle.weights["fc.weight"].T
    inputs = eagle.embedding[torch.tensor(text[1:])]
    drafts, margins = [], []
    with torch.inference_mode():
        for step in range(k):
            hidden, stream = eagle._forward(inputs, fused)
            token, margin = eagle._choose(hidden[-1])
            if step < len(given):
                token = given[step]
            else:
                margins.append(margin)
            drafts.append(token)
            inputs = torch.cat([inputs, eagle.embedding[token][None]])
            fused = torch.cat([fused, stream[-1:]])
    return drafts, min(margins, default=1.0)


def speculate(eagle, prompt, *, k, length):
    """What the engine must give, and what comes from lookup: drafted and accepted."""
    text, reason = eagle.target.greedy(prompt, length)
    whole = [*prompt, *text]
    features = eagle.features(whole)
    margins = eagle.target.choices(whole)[1][len(prompt) - 1 : -1]
    drafted, accepted, committed, looked_up = [], [], 1, [0, 0]
    while committed < length:
        count = min(k, length - committed - 1)
        before = whole[: len(prompt) + committed]
        given = suffix_draft(before, [], k, SUFFIX_BEFORE_A_MODEL)[:count]
        drafts: list[int] = []
        if count:
            drafts, margin = propose_after(eagle, before, features, count, given)
            margins[committed] = min(margins[committed], margin)
        ahead = zip(drafts, text[committed:], strict=False)
        hits = (*(guess == token for guess, token in ahead), False).index(False)
        drafted.append(count)
        accepted.append(hits)
        looked_up = [looked_up[0] + len(given), looked_up[1] + min(hits, len(given))]
        committed += hits + 1
    close = [margin < CLOSE_CALL for margin in margins]
    return Expected(
        token_ids=text,
        finish_reason=reason,
        drafted=drafted,
        accepted=accepted,
        num_certain=(*close, True).index(True),
    ), looked_up


@pytest.mark.parametrize("mode", ["graphs", "eager"])
@pytest.mark.parametrize("k", [2, 5])
@pytest.mark.parametrize("name", ["chain", "parallel"])
def test_texts_and_counts_by_source(made, name, k, mode):
    target, heads = made
    eagle = EagleOracle(Oracle(target), target, heads[name])
    options = ONE_RUNG if mode == "graphs" else {"cudagraph_mode": "NONE"}
    prompts = [[token % 12 for token in prompt] for prompt in PROMPTS]
    with cpu_engine(
        target, f"suffix+eagle:{heads[name]}", k, suffix_history=0, **options
    ) as engine:
        totals = [0, 0]
        for prompt, out in zip(prompts, engine.generate(prompts, greedy(50)), strict=True):
            expected, looked_up = speculate(eagle, prompt, k=k, length=50)
            expect(out, expected)
            totals = [a + b for a, b in zip(totals, looked_up, strict=True)]
        stats = engine.stats()
        counts = {source: [c.drafted, c.accepted] for source, c in stats.by_source.items()}
        assert counts["suffix"] == totals
        assert counts["eagle"] == [stats.drafted - totals[0], stats.accepted - totals[1]]
        assert min(counts["suffix"]) > 10 and counts["eagle"][1] > 15
        if mode == "graphs":
            assert_decodes_replayed(engine)
        assert_no_leak(engine)
