"""Suffix lookup: its proposals against a slow oracle, and what requests may share through it."""

import random

import numpy as np
import pytest
import torch
from adapters import write_adapter
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, cpu_engine, greedy
from suffix_oracle import RULES, Cases, suffix_draft

from specdec.drafters.history import TextHistory
from specdec.kernels.suffix import SuffixRule, propose_suffix

ONE_RUNG = {"uniform_request_counts": [5]}


# -- the lookup -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_proposals_are_the_oracle_s(rule, seed):
    cases = Cases(seed, rule)
    ids = propose_suffix(*cases.arguments(6))
    assert ids.tolist() == cases.expected(6)
    assert (ids >= 0).any() and (ids < 0).any()


def test_votes_beat_the_latest_occurrence_and_bound_the_length():
    """After "7": twice "1 2", then "1 3", then "5"; of four occurrences two go on with "1 2"."""
    text = [7, 1, 2, 0, 7, 1, 2, 0, 7, 1, 3, 0, 7, 5, 9, 7]
    tokens, length = torch.tensor([text], dtype=torch.int32), torch.tensor([len(text)])
    empty = Cases(0, SuffixRule()).arrays._replace(bounds=torch.zeros(1, 2, dtype=torch.int32))
    for share, wanted in [(0, [1, 2, 0, 7]), (50, [1, 2, 0, 7]), (60, [1, -1, -1, -1])]:
        rule = SuffixRule(min_share=share)
        got = propose_suffix(tokens, length, torch.tensor([0]), empty, 4, rule)
        assert got.tolist() == [wanted]


@pytest.mark.parametrize("capacity", [2, 3, 40, 200])
def test_history_is_bounded_sorted_and_keeps_the_newest(capacity):
    """After every text: whole texts, the newest ones, each group's places sorted by context."""
    chosen = random.Random(capacity)
    texts, added = TextHistory(capacity, 4), []
    pool = texts.pool
    for _ in range(60):
        group, ids = chosen.choice("abc"), chosen.choices(range(3), k=chosen.randint(0, 30))
        before = texts.kept()
        if texts.add(ids, group):
            added.append((group, ids[-(capacity - 1) :]))
        else:
            assert len(ids) < 2 or capacity < 3
            assert texts.kept() == before
        kept = texts.kept()
        assert kept == added[len(added) - len(kept) :]
        assert texts.num_tokens == sum(len(ids) for _, ids in kept) <= capacity
        assert texts.pool is pool and len(pool) == capacity + 2
        order, bounds = texts.flatten()
        assert set(bounds) == {group for group, _ in kept}
        for name, (low, high) in bounds.items():
            keys = [context(pool, place) for place in order[low:high]]
            assert keys == sorted(keys)
            wanted = [ids[:at][-4:][::-1] for g, ids in kept if g == name
                      for at in range(1, len(ids))]  # fmt: skip
            assert keys == sorted(wanted)
    # Most of it is used: a ring loses less than the longest text at its end, and one at its head.
    assert capacity < 100 or texts.num_tokens > capacity - 2 * 31 - len(kept)


def context(pool: np.ndarray, place: int) -> list[int]:
    key: list[int] = []
    while len(key) < 4 and pool[place - 1 - len(key)] >= 0:
        key.append(int(pool[place - 1 - len(key)]))
    return key


# -- in the engine --------------------------------------------------------------------------------


def expected_counts(prompt, text, history, k):
    """What each step drafts and accepts on the way to ``text``."""
    drafted, accepted, committed = [], [], 1
    while committed < len(text):
        count = min(k, len(text) - committed - 1)
        draft = suffix_draft([*prompt, *text[:committed]], history, k)[:count]
        ahead = zip(draft, text[committed:], strict=False)
        hits = (*(guess == token for guess, token in ahead), False).index(False)
        drafted.append(len(draft))
        accepted.append(hits)
        committed += hits + 1
    return drafted, accepted


def assert_counts(out, prompt, history, k):
    counts = expected_counts(prompt, out.token_ids, history, k)
    assert (out.stats.drafted_per_step, out.stats.accepted_per_step) == counts


@pytest.fixture(params=["graphs", "eager"])
def mode(request):
    return ONE_RUNG if request.param == "graphs" else {"cudagraph_mode": "NONE"}


def held(engine):
    return [ids for _, ids in engine.drafter.texts.kept()]


@pytest.mark.parametrize("k", [1, 4, 7])
def test_texts_and_counts_are_the_oracle_s(engines, models, oracles, mode, k):
    """P1: a batch, then one by one, drafting from what the batch and each other have written."""
    engine = engines(models["target"], "suffix", k, **mode)
    for prompts in (PROMPTS, *([prompt] for prompt in [*PROMPTS, PROMPTS[0]])):
        history = held(engine)
        outs = engine.generate(prompts, greedy(24))
        for prompt, out in zip(prompts, outs, strict=True):
            assert out.token_ids == oracles["target"].greedy(prompt, 24)[0]
            if len(prompts) == 1:
                assert_counts(out, prompt, history, k)
    # The last prompt's text is known by heart.
    assert out.stats.accepted >= 18 * k // (k + 1)
    if mode is ONE_RUNG:
        assert_decodes_replayed(engine)
    assert_no_leak(engine)


def test_without_a_history_a_row_has_its_own_text_alone(engines, models, mode):
    """Counts of a batch: those of each row alone, in every round."""
    engine = engines(models["target"], "suffix", 4, suffix_history=0, **mode)
    own = {"max_new_tokens": 60}
    for _ in range(2):
        for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(**own)), strict=True):
            assert_counts(out, prompt, [], 4)
    assert held(engine) == []


def test_each_row_takes_its_own_k(engines, models, oracles, mode):
    engine = engines(models["target"], "suffix", 4, suffix_history=0, **mode)
    params = [greedy(40, k=k) for k in (0, 1, 2, 3, 4)]
    for prompt, own, out in zip(PROMPTS, params, engine.generate(PROMPTS, params), strict=True):
        assert out.token_ids == oracles["target"].greedy(prompt, 40)[0]
        assert_counts(out, prompt, [], own.k)


def test_what_others_wrote_changes_counts_and_no_text(engines, models, mode):
    """P3, greedy and with a seed: before and after ten other texts."""
    engine = engines(models["target"], "suffix", 4, max_model_len=90, **mode)
    sampled = greedy(40, temperature=0.7, seed=5)
    before = [engine.generate(PROMPTS[3], params) for params in (greedy(40), sampled)]
    for seed in range(5):
        others = [greedy(30), greedy(40, temperature=0.7, seed=seed + 2)]
        engine.generate([PROMPTS[seed], PROMPTS[3]], others)
    after = [engine.generate(PROMPTS[3], params) for params in (greedy(40), sampled)]
    for one, other in zip(before, after, strict=True):
        assert one.token_ids == other.token_ids
        assert other.stats.accepted > one.stats.accepted


def test_a_seed_under_rejection_sees_its_own_text_alone(models):
    """Where its steps begin decides such a text, so neither may depend on other requests."""
    with cpu_engine(models["target"], "suffix", 4, acceptance="rejection", **ONE_RUNG) as engine:
        # Few tokens, so that the text repeats itself and lookups find something.
        few = {token: 30.0 for token in (3, 4, 5)}
        params = greedy(40, temperature=1.0, seed=5, logit_bias=few)
        before = engine.generate(PROMPTS[0], params)
        engine.generate([PROMPTS[0]] * 3, [greedy(40, logit_bias=few), params, params])
        free = engine.generate(PROMPTS[0], greedy(40, logit_bias=few))
        after = engine.generate(PROMPTS[0], params)
    assert after.token_ids == before.token_ids
    assert after.stats.drafted_per_step == before.stats.drafted_per_step
    assert after.stats.accepted_per_step == before.stats.accepted_per_step
    assert before.stats.drafted > 0 and free.stats.accepted > 20


def test_adapters_keep_their_histories_apart(models, tmp_path):
    """A row reads what its own adapter and version wrote: neither the base's nor another's."""
    paths = {
        name: str(write_adapter(tmp_path / name, models["target"], seed=seed))
        for name, seed in (("a", 1), ("b", 2))
    }
    with cpu_engine(models["target"], "suffix", 4, lora=paths, **ONE_RUNG) as engine:

        def run(name):
            known = {g: [ids for group, ids in engine.drafter.texts.kept() if group == g]
                     for g, _ in engine.drafter.texts.kept()}  # fmt: skip
            (group,) = {"base"} if name is None else {f"{name}#{version[name]}"}
            out = engine.generate(PROMPTS[3], greedy(24), lora=name)
            assert_counts(out, PROMPTS[3], known.get(group, []), 4)
            return out

        version = {"a": 1, "b": 2}
        first = {name: run(name) for name in (None, "a", "b")}
        for name, out in first.items():
            again = run(name)
            assert again.token_ids == out.token_ids
            assert again.stats.accepted > out.stats.accepted
        engine.add_lora("a", paths["b"])
        version["a"] = 3
        assert run("a").stats.accepted_per_step == first["b"].stats.accepted_per_step


def test_memory_is_bounded_and_stays_where_it_is(models):
    """P9: arrays keep address and size, graphs are not captured anew, the newest texts stay."""
    with cpu_engine(models["target"], "suffix", 4, suffix_history=100, **ONE_RUNG) as engine:
        arrays = engine.drafter.arrays
        addresses = [each.data_ptr() for each in arrays]
        engine.generate(PROMPTS, greedy(24))
        graphs = [row for row in engine.graph_table() if row.descriptor.uniform]
        for round_ in range(6):
            engine.generate(PROMPTS, greedy(10 + 7 * round_))
            assert engine.drafter.texts.num_tokens <= 100
        assert [each.data_ptr() for each in engine.drafter.arrays] == addresses
        assert sum(each.numel() for each in arrays) == 102 + 100 + 2 * 6
        uniform = [row for row in engine.graph_table() if row.descriptor.uniform]
        assert len(uniform) == len(graphs)
        last = engine.generate(PROMPTS[1], greedy(30))
        assert held(engine)[-1] == last.token_ids


def test_aborted_and_preempted_requests(models, oracles):
    """A pool that preempts; every fourth request is aborted. Only what was committed is learnt."""
    with cpu_engine(
        models["target"], "suffix", 4, max_num_seqs=4, max_model_len=40, num_kv_blocks=14,
        uniform_request_counts=[2, 4],
    ) as engine:  # fmt: skip
        chosen = random.Random(0)
        for round_ in range(8):
            prompts = [PROMPTS[chosen.randrange(4)] for _ in range(4)]
            streams = [engine.stream(prompt, greedy(22)) for prompt in prompts]
            events = [[next(stream)] for stream in streams]
            engine.abort(events[round_ % 4][0].request_id)
            for stream, of_stream in zip(streams, events, strict=True):
                of_stream.extend(stream)
            texts = [[t for event in each for t in event.token_ids] for each in events]
            for number, (prompt, ids) in enumerate(zip(prompts, texts, strict=True)):
                whole = oracles["target"].greedy(prompt, 22)[0]
                assert ids == (whole[: len(ids)] if number == round_ % 4 else whole)
            assert all(ids in held(engine) for ids in texts if len(ids) > 1)
            engine.check_integrity()
        assert engine.stats().preemptions > 0
        assert_no_leak(engine)


@pytest.mark.parametrize(
    ("value", "error"), [(-1, ValueError), (2**24 + 1, ValueError), (1.5, TypeError)]
)
def test_a_bad_size_is_refused_by_name(value, error):
    with pytest.raises(error, match="suffix_history"):
        cpu_engine("nowhere", "suffix", suffix_history=value)
