"""Lookup before a model: texts, counts by source, and the model's KV after drafts not its own."""

import pytest
from harness import (
    PROMPTS,
    assert_decodes_replayed,
    assert_no_leak,
    chi_square_p_value,
    cpu_engine,
    greedy,
    histogram,
)
from oracle import Expected, Oracle, expect
from suffix_oracle import suffix_draft
from tiny import blended, constant_model, make_tiny

from specdec.drafters import combined
from specdec.drafters.combined import LONG_MATCH, SUFFIX_BEFORE_A_MODEL

ONE_RUNG = {"uniform_request_counts": [5]}
FEW_PROMPTS = [[1, 4, 0, 3], [2] * 12, [3], [0, 4, 1, 1, 2, 3], [1, 2, 3, 4] * 5]


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Models of six tokens, whose texts repeat themselves: lookups of five tokens match."""
    root = tmp_path_factory.mktemp("few")
    target = make_tiny(root / "target", seed=5, vocab=6)
    return {"target": str(target), "draft": str(blended(target, root / "draft", 0.6, seed=2))}


@pytest.fixture(scope="module")
def few_oracles(few):
    return {
        "target": Oracle(few["target"]),
        "draft": Oracle(few["draft"]),
        "layer_skip:1": Oracle(few["target"], num_layers=1),
    }


def ngram_draft(text, k):
    """After the latest occurrence of the longest run of 5 to 10 tokens."""
    best = (0, 0)
    for at in range(1, len(text)):
        run = 0
        while run < min(2 * LONG_MATCH, at) and text[at - 1 - run] == text[-1 - run]:
            run += 1
        best = max(best, (run, at))
    run, at = best
    return [text[at + j % (len(text) - at)] for j in range(k)] if run >= LONG_MATCH else []


def lookup_draft(name, text, history, k):
    if name == "ngram":
        return ngram_draft(text, k)
    return suffix_draft(text, history, k, SUFFIX_BEFORE_A_MODEL)


def speculate(target, draft, name, prompt, history, *, k, length):
    """What the engine must give, and what comes from the lookup: drafted and accepted."""
    text, reason = target.greedy(prompt, length)
    whole = [*prompt, *text]
    proposals, margins = draft.choices(whole)
    margins = [min(pair) for pair in zip(margins, target.choices(whole)[1], strict=True)]
    start = len(prompt)
    drafted, accepted, committed, looked_up = [], [], 1, [0, 0]
    while committed < length:
        count = min(k, length - committed - 1)
        given = lookup_draft(name, whole[: start + committed], history, k)[:count]
        of_model = proposals[start - 1 + committed :][len(given) : count]
        ahead = zip([*given, *of_model], text[committed:], strict=False)
        hits = (*(guess == token for guess, token in ahead), False).index(False)
        drafted.append(count)
        accepted.append(hits)
        looked_up = [looked_up[0] + len(given), looked_up[1] + min(hits, len(given))]
        committed += hits + 1
    assert min(margins[start - 1 :]) > 1e-4, "choose another seed: rounding may decide here"
    expected = Expected(
        token_ids=text, finish_reason=reason, drafted=drafted, accepted=accepted, num_certain=length
    )
    return expected, looked_up


@pytest.fixture(params=["graphs", "eager"])
def mode(request):
    return ONE_RUNG if request.param == "graphs" else {"cudagraph_mode": "NONE"}


@pytest.mark.parametrize("k", [2, 4, 7])
@pytest.mark.parametrize("second", ["draft", "layer_skip:1"])
@pytest.mark.parametrize("first", ["ngram", "suffix"])
def test_texts_and_counts_by_source(engines, few, few_oracles, first, second, k, mode):
    """P1, a batch: had the model read its own drafts where lookup's stood, counts would differ."""
    name = f"{first}+{few.get(second, second)}"
    engine = engines(few["target"], name, k, suffix_history=0, **mode)
    totals = [0, 0]
    target, draft = few_oracles["target"], few_oracles[second]
    for prompt, out in zip(FEW_PROMPTS, engine.generate(FEW_PROMPTS, greedy(60)), strict=True):
        expected, looked_up = speculate(target, draft, first, prompt, [], k=k, length=60)
        expect(out, expected)
        totals = [a + b for a, b in zip(totals, looked_up, strict=True)]
    stats = engine.stats()
    counts = {source: [c.drafted, c.accepted] for source, c in stats.by_source.items()}
    model = "draft_model" if second == "draft" else second
    assert counts[first] == totals
    assert counts[model] == [stats.drafted - totals[0], stats.accepted - totals[1]]
    # Each has its share, or nothing is shown here.
    assert min(totals) > 20 and min(counts[model]) > 20
    if mode is ONE_RUNG:
        assert_decodes_replayed(engine)
    assert_no_leak(engine)


def test_a_model_that_reads_its_own_drafts_is_noticed(few, few_oracles, monkeypatch):
    """The fault that the counts above are compared for, planted."""
    from specdec.drafters import draft_model

    monkeypatch.setattr(draft_model, "given_or", lambda given, token: token)
    target, draft = few_oracles["target"], few_oracles["draft"]
    wrong = 0
    with cpu_engine(few["target"], f"suffix+{few['draft']}", 4, cudagraph_mode="NONE") as engine:
        for prompt in FEW_PROMPTS:
            history = [ids for _, ids in engine.drafter.first.texts.kept()]
            out = engine.generate(prompt, greedy(60))
            expected, _ = speculate(target, draft, "suffix", prompt, history, k=4, length=60)
            assert out.token_ids == expected.token_ids
            wrong += out.stats.accepted_per_step != expected.accepted
    assert wrong > 0


def test_it_looks_into_earlier_outputs(models, oracles, engines, mode):
    """Texts that do not repeat themselves: the second time lookup drafts what it saw the first."""
    engine = engines(models["target"], f"suffix+{models['negated']}", 4, **mode)
    for round_ in range(2):
        for prompt in PROMPTS[:3]:
            out = engine.generate(prompt, greedy(24))
            assert out.token_ids == oracles["target"].greedy(prompt, 24)[0]
            if round_:
                assert out.stats.accepted >= 12
    counts = engine.stats().by_source
    assert counts["draft_model"].accepted == 0 < counts["suffix"].accepted
    assert counts["draft_model"].drafted > 0


def test_rows_with_their_own_k_and_steps_without_drafts(few, few_oracles, engines, mode):
    """A row at k=0 beside others, then drafted again: its KV lags and is caught up."""
    engine = engines(few["target"], f"suffix+{few['draft']}", 4, suffix_history=0, **mode)
    params = [greedy(40, k=k) for k in (0, 1, 2, 3, 4)]
    target, draft = few_oracles["target"], few_oracles["draft"]
    outs = engine.generate(FEW_PROMPTS, params)
    for prompt, own, out in zip(FEW_PROMPTS, params, outs, strict=True):
        expected, _ = speculate(target, draft, "suffix", prompt, [], k=own.k, length=40)
        expect(out, expected)


def test_prompts_beside_drafted_rows_and_preemption(few, few_oracles):
    """Drafts that do not ride in the step's graph are counted by source too."""
    target, draft = few_oracles["target"], few_oracles["draft"]
    with cpu_engine(
        few["target"], f"ngram+{few['draft']}", 4, max_num_seqs=3, num_kv_blocks=18,
        max_num_batched_tokens=24, max_model_len=80,
    ) as engine:  # fmt: skip
        totals = [0, 0]
        for prompt, out in zip(FEW_PROMPTS, engine.generate(FEW_PROMPTS, greedy(40)), strict=True):
            expected, looked_up = speculate(target, draft, "ngram", prompt, [], k=4, length=40)
            expect(out, expected)
            totals = [a + b for a, b in zip(totals, looked_up, strict=True)]
        counts = engine.stats().by_source["ngram"]
        assert [counts.drafted, counts.accepted] == totals
        assert any(not r.descriptor.uniform and r.k for r in engine.recent_steps(1000))
        assert engine.stats().preemptions > 0
        assert_no_leak(engine)


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_sampled_texts_follow_the_target(tmp_path, acceptance):
    """900 tokens, lookup's and the model's; a correct engine fails for one seed in a million."""
    probs, of_draft = (0.6, 0.3, 0.1), (0.2, 0.3, 0.5)
    target = constant_model(tmp_path / "target", probs)
    draft = constant_model(tmp_path / "draft", of_draft)
    with cpu_engine(
        str(target), f"suffix+{draft}", 3, acceptance=acceptance, max_model_len=310, **ONE_RUNG
    ) as engine:
        params = [greedy(300, temperature=1.0, seed=seed) for seed in range(3)]
        outs = engine.generate([[0]] * 3, params)
        sources = engine.stats().by_source
    assert all(counts.accepted > 25 for counts in sources.values())
    ids = [token for out in outs for token in out.token_ids]
    assert chi_square_p_value(histogram(ids, 3), probs) > 1e-6


def test_seeded_texts_are_those_without_a_drafter(few, engines):
    plain = engines(few["target"], None, 0)
    engine = engines(few["target"], f"suffix+{few['draft']}", 4, **ONE_RUNG)
    params = [greedy(40, temperature=0.7, seed=seed) for seed in range(5)]
    wanted = [out.token_ids for out in plain.generate(FEW_PROMPTS, params)]
    for _ in range(2):
        outs = engine.generate(FEW_PROMPTS, params)
        assert [out.token_ids for out in outs] == wanted


@pytest.mark.parametrize("name", ["suffix+", "ngram+none", "suffix+auto", "ngram+suffix"])
def test_what_cannot_come_second_is_refused(models, name):
    with pytest.raises(ValueError, match="a model must follow"):
        cpu_engine(models["target"], name)


def test_a_second_that_is_not_there_is_named(models):
    with pytest.raises(FileNotFoundError, match="no-such-model"):
        cpu_engine(models["target"], "suffix+no-such-model")
    assert combined.split_names("a/b+c") == (None, "a/b+c")
