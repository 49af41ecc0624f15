"""k="auto" and steps_per_replay="auto" on a real GPU: costs, one text, no capture in traffic."""

import itertools

import pytest
from adapters import write_adapter
from harness import PROMPTS, assert_no_leak, greedy
from tiny import blended, make_tiny

import specdec
from specdec import rounds
from specdec.rounds import AUTO_ROUNDS, OUTLASTS

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 4, 6)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Head size 64 and a group of three: the shape of the bundled model, and real tiles."""
    root = tmp_path_factory.mktemp("adaptive")
    shape = {"hidden": 192, "heads": 3, "kv_heads": 1, "head_dim": 64, "ffn": 320, "vocab": 300}
    target = make_tiny(root / "target", seed=3, std=0.15, max_position=4096, **shape)
    return {
        "target": str(target),
        "draft": str(blended(target, root / "draft", 0.1)),
        "adapter": str(write_adapter(root / "adapter", target, std=0.3)),
    }


def gpu_engine(pair, draft, k="auto", **options):
    defaults = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_num_seqs": 6,
        "max_model_len": 4096,
        "num_kv_blocks": 1800,
        "debug": True,
    }
    return specdec.Engine(pair["target"], pair.get(draft, draft), k, **(defaults | options))


def keys_of(engine, variant=None):
    return {
        (row.role, row.mode, row.descriptor, row.variant, row.rounds)
        for row in engine.graph_table()
        if variant in (None, row.variant)
    }


@pytest.mark.parametrize("draft", ["draft", "ngram", "layer_skip:1"])
def test_every_graph_is_timed_at_two_contexts(pair, draft):
    with gpu_engine(pair, draft, k_max=4, lora={"style": pair["adapter"]}) as engine:
        costs = engine._adaptation.choice.costs
        for size, k, has_lora in itertools.product(SIZES, (0, 1, 2, 4), (False, True)):
            assert costs.is_timed(size, has_lora=has_lora)
            timing = costs.timing(size, k, has_lora)
            # 1800 blocks of 16 hold 6 rows of 4096 tokens with their steps.
            assert (timing.short_context, timing.long_context) == (128, min(4095 - k, 4096))
            assert 5e-6 < timing.short_seconds < 20e-3
            assert timing.long_seconds > 0.7 * timing.short_seconds
        # Whole steps hold the drafts too: wider ones take longer. (Timers tell 1 from 4.)
        if draft != "ngram":
            for has_lora in (False, True):
                narrow, wide = (costs.timing(6, k, has_lora).short_seconds for k in (0, 4))
                assert wide > narrow
        if draft == "draft":
            assert costs.catch_up_seconds(6, 20) > costs.catch_up_seconds(6, 1) > 0
        rows = {(row.num_reqs, row.has_lora) for row in engine.crossover()}
        assert rows == set(itertools.product(SIZES, (False, True)))
        state = engine._runner.state
        assert not state.seq_len.any() and not state.block_table.any()
        # The last column takes what rows of padding write.
        assert not state.tokens[:, :-1].any()
        assert state.column("adapter").eq(-1).all()


@pytest.mark.parametrize("draft", ["draft", "ngram", "layer_skip:1"])
def test_text_is_that_of_no_drafter_and_nothing_is_captured_in_traffic(pair, draft):
    """Bases and adapters, greedy and with a seed, alone and together; all on FULL graphs."""
    lora = {"style": pair["adapter"]}
    names = [None, "style", None, "style", "style"]
    wanted = [greedy(150), greedy(90, temperature=0.8, seed=5)]

    def texts(engine, params):
        outs = engine.generate(PROMPTS, params, names) + [
            engine.generate(prompt, params, lora=name)
            for prompt, name in zip(PROMPTS, names, strict=True)
        ]
        assert_no_leak(engine)
        return [out.token_ids for out in outs]

    with gpu_engine(pair, None, 0, lora=lora, steps_per_replay=1) as plain:
        expected = [texts(plain, params) for params in wanted]
    with gpu_engine(pair, draft, lora=lora) as engine:
        before = keys_of(engine)
        for params, text in zip(wanted, expected, strict=True):
            assert texts(engine, params) == text
        # Sampled graphs of one round are captured on first use, as documented; no others.
        assert {(key[3], key[4]) for key in keys_of(engine) - before} <= {("sampled", 1)}
        assert keys_of(engine, "greedy") == {key for key in before if key[3] == "greedy"}
        records = engine.recent_steps(10_000)
        assert all(r.mode == "FULL" or "prefill" in r.reason for r in records)
        assert any(record.k for record in records)
        engine.check_integrity()


def test_each_forced_k_and_its_catch_up_give_the_same_text(pair, monkeypatch):
    with gpu_engine(pair, None, 0) as plain:
        expected = [out.token_ids for out in plain.generate(PROMPTS, greedy(120))]
    with gpu_engine(pair, "draft") as engine:
        for pattern in ((0, 4), (4, 0, 0, 0), (1, 4, 2, 0), (4, *[0] * 40)):
            ks = itertools.cycle(pattern)
            monkeypatch.setattr(engine._adaptation.choice, "choose", lambda _, ks=ks: next(ks))
            outs = engine.generate(PROMPTS, greedy(120))
            assert [out.token_ids for out in outs] == expected


@pytest.mark.parametrize("k", [3, "auto"])
def test_auto_rounds_are_captured_at_start(pair, monkeypatch, k):
    """Steps of this model are short: where the host's work outlasts them, graphs are there."""
    monkeypatch.setattr(rounds, "HOST_SECONDS_PER_REQUEST", 1e-3)
    with gpu_engine(pair, "ngram", k, lora={"style": pair["adapter"]}) as engine:
        before = keys_of(engine)
        several = {key for key in before if key[4] > 1}
        sizes = {key[2].num_reqs for key in several}
        assert sizes and sizes <= set(SIZES)
        assert {key[4] for key in several} == {AUTO_ROUNDS}
        assert {key[3] for key in several} == {"greedy", "sampled"}
        assert {key[2].has_lora for key in several} == {False, True}
        engine._rounds._several = True
        monkeypatch.setattr(engine._rounds, "observe", lambda *_: None)
        with gpu_engine(pair, None, 0, steps_per_replay=1) as plain:
            for params in (greedy(120), greedy(100, temperature=0.8, seed=3)):
                got, expected = (each.generate(PROMPTS, params) for each in (engine, plain))
                assert [out.token_ids for out in got] == [out.token_ids for out in expected]
        assert AUTO_ROUNDS in {record.rounds for record in engine.recent_steps(10_000)}
        assert {(key[3], key[4]) for key in keys_of(engine) - before} <= {("sampled", 1)}


def test_a_replay_that_outlasts_the_host_has_none(pair, monkeypatch):
    monkeypatch.setattr(rounds, "HOST_SECONDS", 1e-9)
    monkeypatch.setattr(rounds, "HOST_SECONDS_PER_REQUEST", 0.0)
    with gpu_engine(pair, "ngram", 3) as engine:
        assert {row.rounds for row in engine.graph_table()} == {1}
        engine._rounds._several = True
        engine.generate(PROMPTS, greedy(60))
        assert {row.rounds for row in engine.graph_table()} == {1}
        reasons = {record.rounds_reason for record in engine.recent_steps(1000)}
        assert OUTLASTS in reasons
