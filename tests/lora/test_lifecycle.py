"""P7 and C48: adapters come and go while requests run; KV is shared within one version only."""

import pytest
from adapters import merged, write_adapter
from harness import PROMPTS, assert_no_leak, cpu_engine, greedy
from oracle import expect
from paged import load

import specdec

LENGTH = 20


@pytest.fixture
def engine(models, lora):
    with cpu_engine(
        models["target"], models["blend.1"], 3, lora={"a": lora.paths["a"]}, max_loras=2,
        max_num_seqs=8, uniform_request_counts=[8], capture="lazy",
    ) as engine:  # fmt: skip
        yield engine
        assert_no_leak(engine)
        engine.check_integrity()


def texts_of(streams, texts):
    """Read streams to their ends."""
    for stream, text in zip(streams, texts, strict=True):
        text += [token for event in stream for token in event.token_ids]
    return texts


def test_unload_while_requests_run(engine, models, lora):
    """C48: three requests on A, one of four choices, unload A at token five, load C at once."""
    own = lora.oracles["a"]
    running = [engine.stream(prompt, greedy(LENGTH), lora="a") for prompt in PROMPTS[:2]]
    base = engine.stream(PROMPTS[3], greedy(LENGTH))
    four = engine.add_request(PROMPTS[4], greedy(LENGTH, n=4, temperature=1.0, seed=3), lora="a")
    texts = [[], [], []]
    while len(texts[0]) < 5:
        for stream, text in zip([*running, base], texts, strict=True):
            text += next(stream).token_ids
    engine.remove_lora("a", wait=False)
    engine.add_lora("c", lora.paths["c"])
    assert (engine.loras, engine.unloading_loras) == (["c"], ["a"])
    engine.check_integrity()
    for _ in range(2):
        with pytest.raises(ValueError, match="'a'"):
            engine.generate(PROMPTS[0], greedy(4), lora="a")
        with pytest.raises(ValueError, match="'a'"):
            engine.remove_lora("a")
    out = engine.generate(PROMPTS[0], greedy(LENGTH), lora="c")
    expect(out, lora.expected("c", "blend.1", PROMPTS[0], 3, LENGTH))
    texts_of([*running, base], texts)
    assert texts[:2] == [own.greedy(prompt, LENGTH)[0] for prompt in PROMPTS[:2]]
    assert texts[2] == lora.oracles[None].greedy(PROMPTS[3], LENGTH)[0]
    while any(request.finish_reason is None for request in four):
        engine.step()
    assert [len(request.output_ids) for request in four] == [LENGTH] * 4
    assert (engine.loras, engine.unloading_loras) == (["c"], [])


def test_unload_waits_for_the_last_and_ends(engine, lora):
    """n > 1 too: each choice holds the adapter once, and lets go of it once."""
    streams = [
        engine.stream(PROMPTS[0], greedy(LENGTH), lora="a"),
        engine.stream(PROMPTS[1], greedy(LENGTH, n=3, temperature=1.0, seed=1), lora="a"),
    ]
    texts = [list(next(stream).token_ids) for stream in streams]
    waiting = engine.stream(PROMPTS[3], greedy(6), lora="a")
    engine.remove_lora("a")
    engine.check_integrity()
    texts_of([*streams, waiting], [*texts, []])
    assert texts[0] == lora.oracles["a"].greedy(PROMPTS[0], LENGTH)[0]
    # Its slot and its host copy are free again.
    table = engine._lora._table
    assert table._owners == [None, None]
    engine.add_lora("a", lora.paths["a"])
    expect(
        engine.generate(PROMPTS[0], greedy(LENGTH), lora="a"),
        lora.expected("a", "blend.1", PROMPTS[0], 3, LENGTH),
    )


def test_an_aborted_request_lets_go(engine):
    events = engine.stream(PROMPTS[0], greedy(60), lora="a")
    engine.abort(next(events).request_id)
    list(events)
    left = engine.stream(PROMPTS[0], greedy(60), lora="a")
    next(left)
    left.close()
    engine.remove_lora("a")
    assert engine.loras == []


def test_a_new_version_under_the_same_name(engine, models, lora):
    """What runs stays on the old weights; KV of the old version serves no text of the new one."""
    prompt = PROMPTS[4] * 2
    old = engine.generate(prompt, greedy(LENGTH), lora="a")
    assert old.token_ids == lora.oracles["a"].greedy(prompt, LENGTH)[0]
    running = engine.stream(prompt, greedy(LENGTH), lora="a")
    text = list(next(running).token_ids)
    cached = engine._scheduler.num_cached_tokens
    assert cached > 0
    engine.add_lora("a", lora.paths["b"])
    new = engine.generate(prompt, greedy(LENGTH), lora="a")
    assert engine._scheduler.num_cached_tokens == cached
    assert new.token_ids == lora.oracles["b"].greedy(prompt, LENGTH)[0]
    assert texts_of([running], [text])[0] == old.token_ids
    again = engine.generate(prompt, greedy(LENGTH), lora="a")
    assert engine._scheduler.num_cached_tokens > cached
    assert again.token_ids == new.token_ids
    assert engine.loras == ["a"]


def test_the_prefix_cache_never_mixes_adapters(engine, lora):
    """One prompt on the base and on three adapters, each twice: only the second time is cached."""
    prompt = PROMPTS[4] * 2
    for name in ("b", "c"):
        engine.add_lora(name, lora.paths[name])
    for name in (None, "a", "b", "c"):
        before = engine._scheduler.num_cached_tokens
        for hit in (False, True):
            out = engine.generate(prompt, greedy(LENGTH), lora=name)
            expect(out, lora.expected(name, "blend.1", prompt, 3, LENGTH))
            assert (engine._scheduler.num_cached_tokens > before) == hit


def test_a_request_that_is_preempted_comes_back_on_its_adapter(models, lora):
    """A pool too small for three: rows lose their slots and find others, or the same."""
    with cpu_engine(
        models["target"], models["blend.1"], 3, lora=lora.paths, max_loras=2, num_kv_blocks=14,
        uniform_request_counts=[5],
    ) as engine:  # fmt: skip
        names = ["a", "b", None, "c", "a"]
        outs = engine.generate([PROMPTS[3]] * 5, greedy(24), lora=names)
        for name, out in zip(names, outs, strict=True):
            expect(out, lora.expected(name, "blend.1", PROMPTS[3], 3, 24), counts=False)
        assert engine.stats().preemptions > 0
        assert_no_leak(engine)
        engine.check_integrity()


def test_several_choices_on_an_adapter(engine, lora):
    """Greedy choices are all the adapter's text; choice 0 of a seed is the text of n=1."""
    out = engine.generate(PROMPTS[1], greedy(9, n=3), lora="a")
    expected = lora.oracles["a"].greedy(PROMPTS[1], 9)[0]
    assert [choice.token_ids for choice in out.choices] == [expected] * 3
    seeded = [greedy(9, n=n, temperature=1.0, seed=5) for n in (1, 3)]
    one, three = (engine.generate(PROMPTS[1], params, lora="a") for params in seeded)
    assert three.choices[0].token_ids == one.token_ids
    assert len({tuple(choice.token_ids) for choice in three.choices}) == 3


def test_acceptance_is_counted_per_adapter(engine, lora):
    engine.add_lora("b", lora.paths["b"])
    names = ["a", None, "b", "a"]
    outs = engine.generate(PROMPTS[:4], greedy(LENGTH), lora=names)
    counts = engine.stats().by_adapter
    assert set(counts) == {"a", "base", "b"}
    for name, key in (("a", "a"), (None, "base"), ("b", "b")):
        own = [out.stats for out, used in zip(outs, names, strict=True) if used == name]
        assert counts[key].drafted == sum(stats.drafted for stats in own) > 0
        assert counts[key].accepted == sum(stats.accepted for stats in own)
        by_mode = engine.stats().row_steps_by_adapter[key]
        assert sum(by_mode.values()) == sum(stats.steps for stats in own)
        assert by_mode["FULL"] > 0
    assert engine.stats().drafted == sum(each.drafted for each in counts.values())


def test_a_draft_adapter_of_its_own(models, lora):
    """The target's weights as the draft: with the same adapter every draft is accepted."""
    with cpu_engine(
        models["target"], models["same"], 3, lora=lora.paths, draft_lora={"a": lora.paths["a"]},
        max_loras=2, uniform_request_counts=[5],
    ) as engine:  # fmt: skip
        names = ["a", "b", None, "c", "a"]
        outs = engine.generate(PROMPTS, greedy(LENGTH), lora=names)
        for name, prompt, out in zip(names, PROMPTS, outs, strict=True):
            assert out.token_ids == lora.oracles[name].greedy(prompt, LENGTH)[0]
            if name in ("a", None):
                assert out.stats.acceptance_rate == 1.0
            else:
                expect(out, lora.expected(name, "same", prompt, 3, LENGTH))
        # Steps without drafts leave the draft behind; catching up reads the adapter too.
        idle = [greedy(LENGTH, k=0), greedy(LENGTH, k=3)]
        for name, out in zip(
            "ab", engine.generate(PROMPTS[:2], idle, lora=["a", "b"]), strict=True
        ):
            assert out.token_ids == lora.oracles[name].greedy(PROMPTS["ab".index(name)], LENGTH)[0]
        engine.add_lora("c", lora.paths["c"], lora.paths["c"])
        assert engine.generate(PROMPTS[1], greedy(9), lora="c").stats.acceptance_rate == 1.0
        roles = {row.role for row in engine.graph_table() if row.descriptor.has_lora}
        assert roles == {"step", "draft_catchup", "draft_decode", "target"}
    with pytest.raises(ValueError, match="draft_lora"):
        cpu_engine(models["target"], "ngram", 3, lora=lora.paths, draft_lora={"a": lora.paths["a"]})


def test_generate_takes_a_path(models, lora, tmp_path):
    fields = {"model": models["target"], "draft": "ngram", "k": 2, "device": "cpu"}
    fields |= {"max_model_len": 96, "max_num_seqs": 2, "max_new_tokens": 12, "kv_block_size": 4}
    for name in ("a", None, "c", "a"):
        path = lora.paths.get(name)
        out = specdec.generate(PROMPTS[0], lora=path, **fields)
        assert out.token_ids == lora.oracles[name].greedy(PROMPTS[0], 12)[0]
    changing = write_adapter(tmp_path / "changing", models["target"], seed=1)
    for seed in (1, 2):
        write_adapter(changing, models["target"], seed=seed)
        out = specdec.generate(PROMPTS[0], lora=changing, **fields)
        expected = merged(models["target"], changing).greedy(PROMPTS[0], 12)[0]
        assert out.token_ids == expected
    with pytest.raises(FileNotFoundError, match="nowhere"):
        specdec.generate(PROMPTS[0], lora="nowhere", **fields)


def test_a_closed_engine_loads_nothing(models, lora):
    engine = cpu_engine(models["target"], None, 0, max_loras=1, cudagraph_mode="NONE")
    engine.close()
    with pytest.raises((ValueError, RuntimeError), match="closed"):
        engine.add_lora("a", lora.paths["a"])


def test_two_engines_on_one_model(models, lora):
    """A model in memory reads one engine's slots at a time; after its end another may take over."""
    model = load(models["target"])
    options = {"max_loras": 1, "cudagraph_mode": "NONE"}
    first = cpu_engine(model, None, 0, lora={"a": lora.paths["a"]}, **options)
    with pytest.raises(ValueError, match="another engine"):
        cpu_engine(model, None, 0, **options)
    expected = lora.oracles["a"].greedy(PROMPTS[0], 6)[0]
    assert first.generate(PROMPTS[0], greedy(6), lora="a").token_ids == expected
    first.close()
    # Refused late, with the slots made already: nothing is left on the model.
    with pytest.raises(ValueError, match="uniform_request_counts"):
        cpu_engine(model, None, 0, lora=lora.paths, uniform_request_counts=[1])
    with cpu_engine(model, None, 0, lora={"a": lora.paths["b"]}, **options) as second:
        expected = lora.oracles["b"].greedy(PROMPTS[0], 6)[0]
        assert second.generate(PROMPTS[0], greedy(6), lora="a").token_ids == expected
