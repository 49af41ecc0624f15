"""Several rounds in one replay on a real GPU: the bits and counts of one round, and FULL only."""

import pytest
from harness import PROMPTS, assert_no_leak, greedy
from tiny import blended, make_tiny

import specdec
from specdec.rounds import AUTO_ROUNDS

pytestmark = pytest.mark.gpu

DRAFTS = ("same", "blend", "ngram", "layer_skip:1", None)
ROUNDS = (2, 4, 8)
LENGTHS = (70, 3, 41, 12, 64)


@pytest.fixture(scope="module")
def wide_models(tmp_path_factory):
    """Head size 64 and a group of three: the shape of the bundled model, and real tiles."""
    root = tmp_path_factory.mktemp("wide")
    shape = {"hidden": 192, "heads": 3, "kv_heads": 1, "head_dim": 64, "ffn": 320, "vocab": 300}
    target = make_tiny(root / "target", seed=3, std=0.15, **shape)
    return {
        "target": str(target),
        "same": str(target),
        "blend": str(blended(target, root / "blend", 0.1)),
    }


def gpu_engine(models, draft, rounds, k=3, **options):
    defaults = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_num_seqs": 6,
        "max_model_len": 256,
        "num_kv_blocks": 512,
        "steps_per_replay": rounds,
        "debug": True,
    }
    return specdec.Engine(models["target"], models.get(draft, draft), k, **(defaults | options))


def counts(out):
    return (
        out.token_ids,
        out.finish_reason,
        out.stats.drafted_per_step,
        out.stats.accepted_per_step,
    )


def run(engine):
    """Greedy, sampled and stopped texts, together and alone; and the decode records of it all."""
    stops = list(range(0, 300, 11))
    plain = [greedy(length) for length in LENGTHS]
    sampled = [greedy(length, temperature=0.8, seed=length) for length in LENGTHS]
    stopped = [greedy(length, stop_token_ids=stops) for length in LENGTHS]
    outs = [out for params in (plain, sampled, stopped) for out in engine.generate(PROMPTS, params)]
    outs += [engine.generate(prompt, greedy(40)) for prompt in PROMPTS]
    assert_no_leak(engine)
    engine.check_integrity()
    records = engine.recent_steps(10_000)
    assert all(r.mode == "FULL" or "prefill" in r.reason for r in records)
    return [counts(out) for out in outs], records


@pytest.mark.parametrize("draft", DRAFTS)
def test_bits_and_counts_are_those_of_one_round(wide_models, draft):
    with gpu_engine(wide_models, draft, 1) as engine:
        expected, _ = run(engine)
    for rounds in ROUNDS:
        with gpu_engine(wide_models, draft, rounds) as engine:
            got, records = run(engine)
            assert got == expected
            assert {record.rounds for record in records} == {1, rounds}
            table = [row for row in engine.graph_table() if row.rounds == rounds]
            assert {row.variant for row in table if row.replays} == {"greedy", "sampled"}
            assert all(row.mode == "FULL" and row.role == "step" for row in table)
            replays = sum(row.replays for row in table)
            assert replays == sum(record.rounds == rounds for record in records)


def test_a_short_pool_and_reading_at_once(wide_models):
    """Preemption, one round near the end of the pool, and steps that are read at once."""
    expected = None
    for options in (
        {"steps_per_replay": 1, "num_kv_blocks": 64},
        {"num_kv_blocks": 14},
        {"num_kv_blocks": 14, "async_scheduling": False},
    ):
        with gpu_engine(wide_models, "blend", 4, **options) as engine:
            got = [counts(out) for out in engine.generate(PROMPTS, greedy(70))]
            assert_no_leak(engine)
            expected = expected or got
            assert got == expected


def test_every_graph_of_several_rounds_equals_an_eager_run(wide_models):
    """verify_graphs: the first replay of each key against the same rounds without a graph."""
    with gpu_engine(wide_models, "blend", 3, verify_graphs=True) as engine:
        for count in range(1, 6):
            engine.generate(PROMPTS[:count], greedy(40))
        table = [row for row in engine.graph_table() if row.rounds == 3 and row.replays]
        assert {row.descriptor.num_reqs for row in table} == {1, 2, 4, 6}
        assert [row.max_error for row in table] == [0.0] * len(table)


def test_auto_changes_no_bit(wide_models):
    """Whether or not the host is the limit here, "auto" takes 1 or ``AUTO_ROUNDS``, same text."""
    with gpu_engine(wide_models, "ngram", 1) as engine:
        expected = [counts(out) for out in engine.generate(PROMPTS, greedy(200))]
    with gpu_engine(wide_models, "ngram", "auto") as engine:
        for _ in range(3):
            assert [counts(out) for out in engine.generate(PROMPTS, greedy(200))] == expected
        rounds = {record.rounds for record in engine.recent_steps(10_000)}
        assert rounds <= {1, AUTO_ROUNDS}
        for event in engine.stream(PROMPTS[0], greedy(200)):
            assert len(event.token_ids) <= 4
        assert engine.recent_steps(1)[0].rounds == 1
