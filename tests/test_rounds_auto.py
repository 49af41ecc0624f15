"""steps_per_replay="auto" in an engine: its graphs are there before the first request, or never.

Off a GPU it would take one round; here it is let decide.
"""

import pytest
from adapters import write_adapter
from harness import PROMPTS, cpu_engine, greedy

from specdec import build, rounds
from specdec.rounds import AUTO_ROUNDS, OUTLASTS, RoundsChoice

VARIANTS = ("greedy", "sampled")


@pytest.mark.parametrize("k", [2, "auto"])
def test_auto_decides_at_start_and_captures_nothing_in_traffic(models, monkeypatch, tmp_path, k):
    """As on a GPU: sizes whose replay the host's work may outlast have graphs, others none."""
    monkeypatch.setattr(build, "make_rounds_choice", lambda *_: RoundsChoice("auto"))
    options = {"max_num_seqs": 6, "k_max": 2, "lora": {
        "style": write_adapter(tmp_path / "adapter", models["target"], std=0.3)
    }}  # fmt: skip
    monkeypatch.setattr(RoundsChoice, "may_pay", lambda self, size, seconds: size >= 4)
    with (
        cpu_engine(models["target"], "ngram", k, **options) as engine,
        cpu_engine(models["target"], None, steps_per_replay=1, **options) as plain,
    ):
        before = keys_of(engine)
        several = {key for key in before if key[-1] > 1}
        assert {(key[1].num_reqs, key[2], key[3]) for key in several} == {
            (size, variant, AUTO_ROUNDS) for size in (4, 6) for variant in VARIANTS
        }
        assert {key[1].has_lora for key in several} == {False, True}
        engine._rounds._several = True
        monkeypatch.setattr(engine._rounds, "observe", lambda *_: None)
        adapters = [None, "style", None, None, "style"]
        for count in (5, 1):
            prompts, names = PROMPTS[:count], adapters[:count]
            for params in (greedy(30), greedy(30, temperature=0.8, seed=4)):
                got = engine.generate(prompts, params, names)
                expected = plain.generate(prompts, params, names)
                assert [out.token_ids for out in got] == [out.token_ids for out in expected]
        assert AUTO_ROUNDS in {record.rounds for record in engine.recent_steps(1000)}
        assert OUTLASTS in {record.rounds_reason for record in engine.recent_steps(1000)}
        # One round of a sampled batch is captured on first use, as ever.
        added = keys_of(engine) - before
        assert {(key[2], key[3]) for key in added} == {("sampled", 1)}


def test_auto_captures_no_rounds_where_none_pay(models, monkeypatch):
    monkeypatch.setattr(build, "make_rounds_choice", lambda *_: RoundsChoice("auto"))
    monkeypatch.setattr(rounds, "HOST_SECONDS", 0.0)
    monkeypatch.setattr(rounds, "HOST_SECONDS_PER_REQUEST", 1e-9)
    with cpu_engine(models["target"], "ngram", 2) as engine:
        assert {row.rounds for row in engine.graph_table()} == {1}
        engine.generate(PROMPTS, greedy(12))
        assert OUTLASTS in {record.rounds_reason for record in engine.recent_steps(1000)}
        assert {row.rounds for row in engine.graph_table()} == {1}


def keys_of(engine):
    return {
        (row.role, row.descriptor, row.variant, row.rounds)
        for row in engine.graph_table()
        if row.descriptor.uniform
    }
