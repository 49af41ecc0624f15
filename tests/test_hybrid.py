"""P1 to P9 with recurrent states: what is rejected, cut, put off or left leaves no trace.

A state that is wrong by one token changes nearly every text here (the models' states matter, see
``tests/models/test_mamba.py``), and a draft's wrong state changes how many drafts are accepted, so
that counts are compared wherever an oracle knows them.
"""

import pytest
import torch
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, cpu_engine, greedy
from oracle import Oracle, expect, speculate
from tiny import blended, make_tiny, negated

from specdec import Drafter

ONE_RUNG = {"uniform_request_counts": [5], "capture": "lazy"}
MODES = {"graphs": ONE_RUNG, "eager": {"cudagraph_mode": "NONE"}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("hybrid")
    target = make_tiny(root / "target", seed=5, family="bamba", layers=3)
    return {
        "target": str(target),
        "same": str(target),
        "negated": str(negated(target, root / "negated")),
        "blend.1": str(blended(target, root / "blend.1", 0.1)),
        # Recurrent layers alone, and attention alone.
        "pure": str(make_tiny(root / "pure", seed=5, family="bamba", attn_layer_indices=[])),
        "llama": str(make_tiny(root / "llama", seed=6)),
    }


@pytest.fixture(scope="module")
def oracles(models):
    made = {name: Oracle(folder) for name, folder in models.items() if name != "same"}
    made["same"] = made["target"]
    for num_layers in (1, 2):
        made[f"layer_skip:{num_layers}"] = Oracle(models["target"], num_layers=num_layers)
    return made


@pytest.fixture(scope="module")
def check(models, oracles):
    def check(engine, draft, k, prompts=PROMPTS, counts=True, target="target", length=20, **fields):
        outs = engine.generate(prompts, greedy(length, **fields))
        own_k = fields.get("k", k)
        for prompt, out in zip(prompts, outs, strict=True):
            proposer = oracles.get(draft)
            expected = speculate(
                oracles[target], proposer, prompt, k=own_k, max_new_tokens=length, max_model_len=96
            )
            expect(out, expected, counts=counts)
        assert_no_leak(engine)
        return outs

    return check


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("draft", ["same", "negated", "blend.1"])
def test_draft_models(models, check, draft, k, mode):
    """All accepted, none, and some: both states follow, in one batch of five texts."""
    with cpu_engine(models["target"], models[draft], k, **MODES[mode]) as engine:
        outs = check(engine, draft, k)
        if mode == "graphs":
            assert_decodes_replayed(engine)
    accepted, drafted = (
        sum(getattr(out.stats, name) for out in outs) for name in ("accepted", "drafted")
    )
    assert {"same": accepted == drafted, "negated": accepted == 0}.get(
        draft, 0 < accepted < drafted
    )


@pytest.mark.parametrize(
    ("target", "draft"),
    [("target", "llama"), ("llama", "target"), ("llama", "pure"), ("pure", "blend.1")],
)
def test_a_hybrid_beside_another_kind(models, check, target, draft):
    with cpu_engine(models[target], models[draft], 3, **ONE_RUNG) as engine:
        check(engine, draft, 3, target=target)
        # Nothing of a text is taken from another one that begins alike.
        assert not engine._scheduler.prefix_caching
        check(engine, draft, 3, target=target)
        assert engine._scheduler.num_cached_tokens == 0


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("k", [1, 5])
def test_layer_skip(models, check, num_layers, k):
    """Its first layers' states are the target's own; the second stops behind attention."""
    draft = f"layer_skip:{num_layers}"
    with cpu_engine(models["target"], draft, k, **ONE_RUNG) as engine:
        check(engine, draft, k)


@pytest.mark.parametrize("draft", ["ngram", "suffix", "ngram+{same}", "suffix+layer_skip:1"])
def test_lookup_and_combinations(models, check, draft):
    with cpu_engine(models["target"], draft.format(**models), 4, **ONE_RUNG) as engine:
        check(engine, None, 4, counts=False, length=40)
        # The history of "suffix" now holds these texts.
        outs = check(engine, None, 4, counts=False, length=40)
    assert sum(out.stats.accepted for out in outs) > 0


class Planted(Drafter):
    """The text's own next tokens up to a place that moves from step to step, then others."""

    name = "planted"

    def __init__(self, oracle, k):
        self.oracle, self.places, self.calls = oracle, 1 + k, 0

    def propose(self, state, k):
        ids = torch.full((len(state.seq_lens), k), -1)
        self.calls += 1
        for row, (text, length) in enumerate(
            zip(state.tokens.tolist(), state.seq_lens.tolist(), strict=True)
        ):
            if length:
                own, _ = self.oracle.greedy(text[:length], k)
                right = (self.calls + row) % self.places
                ids[row] = torch.tensor([t if i < right else t ^ 1 for i, t in enumerate(own)])
        return ids


def test_rejection_at_every_place(models, oracles, check):
    drafter = Planted(oracles["target"], 4)
    with cpu_engine(models["target"], drafter, 4, **ONE_RUNG) as engine:
        outs = check(engine, None, 4, counts=False, length=30)
    seen = {accepted for out in outs for accepted in out.stats.accepted_per_step}
    assert seen == {0, 1, 2, 3, 4}


def test_steps_without_drafts_in_between(models, oracles, monkeypatch):
    """The draft's state stays where its KV ends, and catches up over many tokens and few."""
    from specdec.engine import Engine

    wanted = [2, 2, 0, 0, 0, 0, 1, 2, 0, 2, *[0] * 19, 2, 2, 2, 2]
    step = Engine.step

    def step_with_schedule(engine):
        for request in engine._scheduler.running:
            request.k = wanted[min(request.stats.steps, len(wanted) - 1)]
            engine._runner.write_k([request.row], [request.k])
        step(engine)

    monkeypatch.setattr(Engine, "step", step_with_schedule)
    prompt, text = PROMPTS[3], []
    with cpu_engine(models["target"], models["same"], 2, extra_k=[1], **ONE_RUNG) as engine:
        out = engine.generate(prompt, greedy(60))
        text = out.token_ids
    assert text == oracles["target"].greedy(prompt, 60)[0]
    # Whenever it drafts, all of its drafts are right.
    assert out.stats.accepted == out.stats.drafted > 0
    assert out.stats.drafted_per_step[:10] == wanted[:10]
    assert out.stats.drafted_per_step[29:33] == wanted[29:33]


@pytest.mark.parametrize("budget", [5, 64])
def test_prompts_in_chunks(models, check, budget):
    """C25 among them: prompts of 1 to k + 3 tokens, and remainders of 1 + k."""
    prompts = [PROMPTS[4][: 1 + i] for i in range(7)] + [PROMPTS[4] * 2, PROMPTS[4]]
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 3, "capture": "lazy"}
    with cpu_engine(models["target"], models["blend.1"], 4, **options) as engine:
        check(engine, "blend.1", 4, prompts)
        # Prompts run on graphs of pieces, or the record says why not; states lie between pieces.
        records = engine.recent_steps(10_000)
        assert any(record.mode == "PIECEWISE" for record in records)
        assert all("prefill" in record.reason for record in records if record.mode != "FULL")


@pytest.mark.parametrize("draft", ["blend.1", "layer_skip:1"])
def test_preempted_texts_begin_anew(models, check, draft):
    options = {"num_kv_blocks": 12, "max_num_seqs": 4, "async_scheduling": True}
    options |= {"uniform_request_counts": [2, 4], "capture": "lazy"}
    with cpu_engine(models["target"], models.get(draft, draft), 3, **options) as engine:
        check(engine, draft, 3, PROMPTS[:4], length=24)
        assert engine.stats().preemptions > 0


def test_a_slot_begins_with_nothing(models, check):
    """One row for all texts, some of them aborted in the middle."""
    with cpu_engine(
        models["target"], models["blend.1"], 4, max_num_seqs=1, capture="lazy"
    ) as engine:
        for prompt in PROMPTS:
            stream = engine.stream(PROMPTS[4], greedy(30))
            next(stream), next(stream)
            stream.close()
            check(engine, "blend.1", 4, [prompt])


@pytest.mark.parametrize("draft", ["blend.1", "layer_skip:1", "ngram"])
def test_several_rounds_a_replay(models, check, draft):
    options = {"steps_per_replay": 3, "debug": True, **ONE_RUNG}
    with cpu_engine(models["target"], models.get(draft, draft), 3, **options) as engine:
        check(engine, draft, 3, counts=draft != "ngram", length=30)
        assert 3 in {record.rounds for record in engine.recent_steps(10_000)}


@pytest.mark.parametrize("options", [{}, {"steps_per_replay": 3}], ids=["one", "rounds"])
def test_replays_equal_eager_runs(models, check, options):
    """P4: the first replay of each graph, states included, against the same pass without one."""
    with cpu_engine(
        models["target"], models["blend.1"], 3, verify_graphs=True, **ONE_RUNG, **options
    ) as engine:
        check(engine, "blend.1", 3)
        errors = [row.max_error for row in engine.graph_table() if row.max_error is not None]
    # The states of one layer and their inputs pass through the same operators.
    assert errors and max(errors) < 1e-4


def test_each_row_takes_its_own_k(models, oracles):
    with cpu_engine(models["target"], models["blend.1"], 4, **ONE_RUNG) as engine:
        params = [greedy(20 + k, k=k) for k in range(5)]
        for k, (prompt, out) in enumerate(
            zip(PROMPTS, engine.generate(PROMPTS, params), strict=True)
        ):
            expect(
                out,
                speculate(
                    oracles["target"], oracles["blend.1"], prompt, k=k, max_new_tokens=20 + k
                ),
            )


def test_seeded_texts_do_not_depend_on_drafts(models):
    params = greedy(24, temperature=0.9, seed=11, top_p=0.95)
    with cpu_engine(models["target"], None) as engine:
        plain = [engine.generate(prompt, params).token_ids for prompt in PROMPTS]
    for draft in (models["blend.1"], "layer_skip:1"):
        with cpu_engine(models["target"], draft, 3, **ONE_RUNG) as engine:
            assert [out.token_ids for out in engine.generate(PROMPTS, params)] == plain


def test_graphs_hold_uniform_batches_at_most(models, caplog):
    with cpu_engine(models["target"], "ngram", 2, cudagraph_mode="FULL", **ONE_RUNG) as engine:
        assert engine._runner._graphs.dispatcher.mode.name == "FULL_AND_PIECEWISE"
        assert "FULL_AND_PIECEWISE is served" in caplog.text
        assert "needs attention support ALWAYS, not UNIFORM_BATCH" in caplog.text
        engine.generate(PROMPTS[0], greedy(4))
        (prefill, *_) = engine.recent_steps()
        assert prefill.mode == "PIECEWISE" and "UNIFORM_BATCH" in prefill.reason
    # A hybrid that drafts limits its target's graphs too.
    with cpu_engine(models["llama"], models["target"], 2, cudagraph_mode="FULL") as engine:
        assert engine._runner._graphs.dispatcher.mode.name == "FULL_AND_PIECEWISE"


def test_what_cannot_be_combined_is_refused(models, tmp_path):
    with pytest.raises(ValueError, match="compilation_config: BambaForCausalLM is not compiled"):
        cpu_engine(models["target"], compilation_config={"mode": 3})
    with pytest.raises(ValueError, match=r"draft='mtp'.*BambaForCausalLM with mamba"):
        cpu_engine(models["target"], "mtp")
    with pytest.raises(ValueError, match="recurrent"):
        cpu_engine(models["target"], model_impl="transformers")


def test_the_floor_counts_states(models):
    from specdec.bench.floor import step_bytes

    with cpu_engine(models["target"], models["same"], 2, capture="lazy") as engine:
        step = engine._runner.step
        one, three = (step_bytes(step.model, step.drafter, n, 2, 0) for n in (1, 3))
    # Two layers of eight heads, 16 rows of 24 numbers each.
    state = 2 * 8 * 16 * 24 * 4
    assert three["verify"] - one["verify"] == 2 * 2 * state
    assert three["draft"] - one["draft"] == 2 * 2 * state


def test_the_doctor_plans_what_the_engine_is(models, monkeypatch):
    from specdec.config import EngineConfig
    from specdec.doctor.facts import plan_facts
    from specdec.doctor.forced import forced_choices
    from specdec.doctor.plan import make_plan
    from specdec.doctor.subject import read_subject
    from specdec.sources import read_source

    config = EngineConfig(device="cpu", max_num_seqs=5, max_model_len=96, kv_block_size=4)
    subject = read_subject(read_source(models["target"], config), models["blend.1"], config)
    plan = make_plan(subject, config, 3)
    facts = {fact.name: fact for fact in plan_facts(subject, plan, config)}
    assert facts["graphs"].why == "recurrent layers support UNIFORM_BATCH"
    assert "no prefix is cached" in facts["recurrent states"].why
    with cpu_engine(models["target"], models["blend.1"], 3, capture="lazy") as engine:
        step = engine._runner.step
        caches = (step.kv_cache, step.drafter.kv_cache)
        assert plan.mode is engine._runner._graphs.dispatcher.mode
        assert plan.state_bytes == sum(cache.recurrent.num_bytes for cache in caches)
        assert plan.block_bytes * (plan.num_blocks + 1) == sum(each.num_bytes for each in caches)
        # The passes that its checks make of their own begin with states of their own.
        text = [*PROMPTS[4], *engine.generate(PROMPTS[4], greedy(70)).token_ids]
        monkeypatch.setattr("specdec.doctor.forced.CHUNK", 16)
        choices = forced_choices(step.model, text, step.vocab_size)
    assert choices.tokens[len(PROMPTS[4]) - 1 : -1] == text[len(PROMPTS[4]) :]


@pytest.mark.parametrize("draft", ["same", "ngram"])
def test_timing_graphs_leaves_no_state_behind(models, oracles, draft):
    """k="auto" times its graphs over rows written by hand, before the first request."""
    with cpu_engine(models["target"], models.get(draft, draft), "auto", k_max=2) as engine:
        assert not any(tensor.any() for tensor in engine._runner.step.changing_tensors[2:])
        for prompt in PROMPTS[2:4]:
            text = engine.generate(prompt, greedy(30)).token_ids
            assert text == oracles["target"].greedy(prompt, 30)[0]
