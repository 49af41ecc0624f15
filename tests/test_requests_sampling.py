"""P1 and P2 for processors, penalties and seeds: C07, C08, C10, C11."""

import pytest
from harness import (
    PROMPTS,
    chi_square_p_value,
    cpu_engine,
    greedy,
    histogram,
    split_by_origin,
)
from tiny import blended, constant_model, negated

ONE_RUNG = {"uniform_request_counts": [5]}
SMALL = {"layers": 1, "hidden": 16, "heads": 1, "kv_heads": 1, "head_dim": 16, "ffn": 16}
FLAT = (0.4, 0.3, 0.2, 0.1)
ALARM = 1e-6
DRAFTS = [None, "same", "negated", "blend.1", "ngram", "layer_skip:1"]


def penalised(oracle, prompt, budget, *, presence=0.0, frequency=0.0, repetition=1.0, bias=None):
    """Greedy by full recompute, each token scored with the penalties of its own prefix."""
    text: list[int] = []
    for _ in range(budget):
        logits = oracle.logits([*prompt, *text])[-1].clone()
        for token in {*prompt, *text}:
            value = logits[token]
            logits[token] = value / repetition if value > 0 else value * repetition
        for token in set(text):
            logits[token] -= presence + frequency * text.count(token)
        for token, value in (bias or {}).items():
            logits[token] += value
        text.append(int(logits.numpy().argmax()))
    return text


@pytest.mark.parametrize(
    ("fields", "probs"),
    [
        ({"min_p": 0.4}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_p": 0.6, "temperature": 0.5}, [1, 0, 0, 0]),
        ({"logit_bias": {0: -100.0}}, [0, 3 / 6, 2 / 6, 1 / 6]),
        ({"bad_words": [[1]]}, [4 / 7, 0, 2 / 7, 1 / 7]),
    ],
    ids=["min_p", "min_p-temperature", "logit_bias", "bad_words"],
)
@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_processors_on_accepted_recovered_and_bonus_tokens(tmp_path, acceptance, fields, probs):
    """C07: 4,000 tokens of fixed seeds; a correct engine fails with a chance of 1e-6."""
    target = str(constant_model(tmp_path / "target", FLAT, max_position=1024, **SMALL))
    with cpu_engine(
        target, target, 4, acceptance=acceptance, max_model_len=512, max_num_seqs=10,
        uniform_request_counts=[10], kv_block_size=16,
    ) as engine:  # fmt: skip
        params = [greedy(401, **({"temperature": 1.0, "seed": s} | fields)) for s in range(10)]
        outs = engine.generate([[0, 1]] * 10, params)
    for kind in ("accepted", "recovered", "bonus"):
        ids = [token for out in outs for token in split_by_origin(out)[kind]]
        if ids and (acceptance == "rejection" or kind == "bonus"):
            assert chi_square_p_value(histogram(ids, 4), probs) > ALARM
    ids = [token for out in outs for token in out.token_ids]
    assert chi_square_p_value(histogram(ids, 4), probs) > ALARM


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(
    "fields",
    [
        {"frequency": 2.0},
        {"presence": 1.5},
        {"repetition": 1.3},
        {"presence": -0.7, "frequency": 0.3, "repetition": 0.9},
        {"bias": {7: -100.0, 3: 2.5}},
    ],
    ids=["frequency", "presence", "repetition", "all", "bias"],
)
def test_penalties_see_committed_tokens_and_the_drafts_before_a_row(
    engines, models, oracles, draft, fields
):
    """C08: a better draft must not make them weaker, a rejected one must leave no trace."""
    engine = engines(models["target"], models.get(draft, draft), 4, **ONE_RUNG)
    names = {
        "frequency": "frequency_penalty",
        "presence": "presence_penalty",
        "repetition": "repetition_penalty",
        "bias": "logit_bias",
    }
    params = greedy(40, **{names[name]: value for name, value in fields.items()})
    prompts = [[7] * 12, PROMPTS[3]]
    for prompt, out in zip(prompts, engine.generate(prompts, params), strict=True):
        assert out.token_ids == penalised(oracles["target"], prompt, 40, **fields)


@pytest.mark.parametrize("draft", DRAFTS)
def test_bad_words_are_never_completed(engines, models, oracles, draft):
    prompt = PROMPTS[3]
    plain, _ = oracles["target"].greedy(prompt, 20)
    engine = engines(models["target"], models.get(draft, draft), 4, **ONE_RUNG)
    word = plain[4:7]
    out = engine.generate(prompt, greedy(20, bad_words=[word]))
    reference = engines(models["target"], None, **ONE_RUNG)
    assert out.token_ids == reference.generate(prompt, greedy(20, bad_words=[word])).token_ids
    assert out.token_ids[:6] == plain[:6] and out.token_ids[6] != plain[6]


@pytest.mark.parametrize("draft", ["same", "negated"])
def test_min_tokens_is_counted_in_tokens(tmp_path, draft):
    """C10: EOS is the likeliest token everywhere."""
    target = constant_model(tmp_path / "target", [0.1, 0.2, 0.3, 0.4], eos=3)
    folder = str(target if draft == "same" else negated(target, tmp_path / "draft"))
    with cpu_engine(str(target), folder, 4, **ONE_RUNG) as engine:
        lengths = [0, 1, 4, 5, 8]
        params = [greedy(20, min_tokens=length) for length in lengths]
        for length, out in zip(lengths, engine.generate([[0]] * 5, params), strict=True):
            assert (out.token_ids, out.finish_reason) == ([2] * length + [3], "stop")
        masked = engine.generate([0], greedy(20, min_tokens=3, stop_token_ids=[2]))
        assert masked.token_ids == [1] * 3 + [3]


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.8, "top_k": 20}, {"frequency_penalty": 0.5}])
def test_a_seed_gives_one_text_everywhere(engines, models, fields):
    """C11: without a drafter, with any, at any k, at any place of any batch, after other work."""
    own = greedy(30, temperature=1.0, seed=42, **fields)
    plain = engines(models["target"], None, **ONE_RUNG)
    expected = plain.generate(PROMPTS[0], own).token_ids
    other = greedy(30, temperature=1.0, seed=43, **fields)
    assert plain.generate(PROMPTS[0], other).token_ids != expected
    for draft in DRAFTS[1:]:
        for k in (1, 4):
            engine = engines(models["target"], models.get(draft, draft), k, **ONE_RUNG)
            assert engine.generate(PROMPTS[0], own).token_ids == expected
            prompts = [PROMPTS[1], PROMPTS[2], PROMPTS[3], PROMPTS[0], PROMPTS[4]]
            params = [greedy(9), greedy(30, temperature=1.0), other, own, greedy(30)]
            assert engine.generate(prompts, params)[3].token_ids == expected
            assert engine.generate(PROMPTS[0], own).token_ids == expected


def test_coupled_drafts_are_mostly_accepted(tmp_path, models):
    """The same noise on both sides: an equal draft is always right, a close one mostly."""
    close = str(blended(models["target"], tmp_path / "close", 0.05))
    for draft, least in ((models["same"], 1.0), (close, 0.4)):
        with cpu_engine(models["target"], draft, 4, acceptance="coupled", **ONE_RUNG) as engine:
            params = [greedy(40, temperature=0.7, seed=seed) for seed in range(5)]
            outs = engine.generate(PROMPTS, params)
            drafted = sum(out.stats.drafted for out in outs)
            assert sum(out.stats.accepted for out in outs) >= least * drafted


def test_choices_take_keys_of_their_own(engines, models):
    """n=3: choice 0 is the text of n=1, and every choice has its own key (seed, i)."""
    engine = engines(models["target"], models["blend.1"], 4, **ONE_RUNG)
    fields = {"temperature": 1.0, "seed": 11}
    one = engine.generate(PROMPTS[0], greedy(20, **fields))
    three = engine.generate(PROMPTS[0], greedy(20, n=3, **fields))
    assert three.token_ids == three.choices[0].token_ids == one.token_ids
    assert len({tuple(choice.token_ids) for choice in three.choices}) == 3
    again = engine.generate(PROMPTS[0], greedy(20, n=3, **fields))
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in three.choices]
