"""P2: sampled output follows the target's processed distribution; seeds repeat.

Models with fixed logits make every token of every text a draw from a known distribution, so a
few long texts give up to 20,000 draws. All seeds are fixed, so a run is repeatable: the chance
stated at ``ALARM`` is that of choosing seeds on which a correct engine fails.
"""

import pytest
from harness import (
    PROMPTS,
    assert_decodes_replayed,
    chi_square_p_value,
    cpu_engine,
    greedy,
    histogram,
    split_by_origin,
)
from tiny import constant_model, make_tiny

# A correct engine fails one chi-square comparison with this chance, this module with 5e-5.
ALARM = 1e-6
NUM_REQS, LENGTH, SHORT = 40, 501, 126
SMALL = {"layers": 1, "hidden": 16, "heads": 1, "kv_heads": 1, "head_dim": 16, "ffn": 16}
TARGET = (0.30, 0.35, 0.25, 0.10)
DRAFT = (0.40, 0.30, 0.20, 0.10)


def normalised(weights):
    return [weight / sum(weights) for weight in weights]


@pytest.fixture(scope="module")
def constant(tmp_path_factory):
    """Folders of models with the given next-token probabilities."""
    made = {}

    def make(probs, layers=1):
        if (probs, layers) not in made:
            folder = tmp_path_factory.mktemp("constant")
            options = SMALL | {"layers": layers, "max_position": 1024}
            made[probs, layers] = str(constant_model(folder, probs, **options))
        return made[probs, layers]

    return make


@pytest.fixture(scope="module")
def draw(engines):
    """40 texts of ``length`` tokens: 20,000 draws behind the prefill's, or 5,000 with SHORT."""

    def run(target, draft, k, length=LENGTH, **fields):
        options = {"acceptance": "rejection", "uniform_request_counts": [NUM_REQS]}
        engine = engines(
            target,
            draft,
            k,
            max_num_seqs=NUM_REQS,
            max_model_len=LENGTH + 3,
            kv_block_size=16,
            **options,
        )
        params = [
            greedy(length, **({"temperature": 1.0, "seed": seed} | fields))
            for seed in range(NUM_REQS)
        ]
        outs = engine.generate([[0, 1]] * NUM_REQS, params)
        assert_decodes_replayed(engine)
        assert sum(len(out.token_ids) - 1 for out in outs) == NUM_REQS * (length - 1)
        return outs

    return run


def all_ids(outs):
    return [token for out in outs for token in out.token_ids]


def by_origin(outs):
    parts = [split_by_origin(out) for out in outs]
    return {kind: [token for part in parts for token in part[kind]] for kind in parts[0]}


def first_of_steps(outs):
    """The token at the first drafted place of every step that drafted."""
    found = []
    for out in outs:
        at = 1
        steps = zip(out.stats.drafted_per_step, out.stats.accepted_per_step, strict=True)
        for drafted, accepted in steps:
            if drafted:
                found.append(out.token_ids[at])
            at += accepted + 1
    return found


def assert_follows(ids, probs):
    p_value = chi_square_p_value(histogram(ids, len(probs)), probs)
    assert p_value > ALARM, (histogram(ids, len(probs)), probs, p_value)


def test_chi_square_sees_the_faulty_rule_and_passes_the_right_one():
    """The measure itself: 20,000 draws tell the two rules of C05 apart by far."""
    right = [9230, 10770, 0, 0]
    assert chi_square_p_value(right, (6 / 13, 7 / 13, 0, 0)) > 0.9
    assert chi_square_p_value(right, (4 / 7, 3 / 7, 0, 0)) < 1e-100
    # Tables give 3.84 and 5.99 as the 5% points at one and two degrees of freedom.
    assert chi_square_p_value([500 - 31, 500 + 31], (0.5, 0.5)) == pytest.approx(0.05, abs=1e-3)


def test_ratio_uses_the_distribution_the_draft_was_drawn_from(constant, draw):
    """C05: top_k=2 acts on target and draft alike; the faulty rule gives (.5714, .4286, 0, 0)."""
    outs = draw(constant(TARGET), constant(DRAFT), 3, top_k=2)
    probs = [*normalised(TARGET[:2]), 0, 0]
    first = histogram(first_of_steps(outs), 4)
    for count, prob in zip(first, probs, strict=True):
        assert count / sum(first) == pytest.approx(prob, abs=0.015)
    assert_follows(all_ids(outs), probs)
    # The draft's processed distribution is (4/7, 3/7): only token 1 is drafted too seldom.
    origin = by_origin(outs)
    assert_follows(origin["accepted"], [*normalised((6 / 13, 3 / 7)), 0, 0])
    assert_follows(origin["recovered"], [0, 1, 0, 0])
    assert_follows(origin["bonus"], probs)


@pytest.mark.parametrize("k", [1, 4])
def test_accepted_recovered_and_bonus_tokens(constant, draw, k):
    """Each kind over 20,000 draws together: what is accepted, what replaces it, what follows."""
    outs = draw(constant(TARGET), constant(DRAFT), k)
    origin = by_origin(outs)
    both = [min(pair) for pair in zip(TARGET, DRAFT, strict=True)]
    missing = [max(p - q, 0) for p, q in zip(TARGET, DRAFT, strict=True)]
    assert_follows(all_ids(outs), TARGET)
    assert_follows(origin["accepted"], normalised(both))
    assert_follows(origin["recovered"], normalised([round(m, 9) for m in missing]))
    assert_follows(origin["bonus"], TARGET)
    # A draft is accepted with the overlap of the two distributions, at every place.
    tried = len(origin["accepted"]) + len(origin["recovered"])
    counts = [len(origin["accepted"]), tried - len(origin["accepted"])]
    assert chi_square_p_value(counts, (sum(both), 1 - sum(both))) > ALARM


def test_draft_equal_to_the_target_is_always_accepted(constant, draw):
    outs = draw(constant(TARGET), constant(TARGET), 4, SHORT)
    assert by_origin(outs)["recovered"] == []
    assert_follows(all_ids(outs), TARGET)


def test_draft_that_never_proposes_what_the_target_wants(constant, draw):
    """Disjoint supports: all is recovered, from the target's whole distribution."""
    target, draft = (0.5, 0.3, 0.2, 0.0, 0.0), (0.0, 0.0, 0.0, 0.6, 0.4)
    outs = draw(constant(target), constant(draft), 2, SHORT)
    assert by_origin(outs)["accepted"] == []
    assert_follows(all_ids(outs), target)


def test_recovered_tokens_do_not_depend_on_the_noise_of_the_draft(constant, draw):
    """Drawn with the draft's own noise, the even residual here would come out at 36% to 64%."""
    outs = draw(constant((0.2, 0.6, 0.2)), constant((0.6, 0.4, 0.0)), 2, SHORT)
    assert_follows(by_origin(outs)["recovered"], (0, 0.5, 0.5))
    assert_follows(by_origin(outs)["accepted"], (1 / 3, 2 / 3, 0))


@pytest.mark.parametrize("draft", ["ngram", "layer_skip:1"])
def test_other_drafters(constant, draw, draft):
    """A lookup has no probabilities and counts as certain of its token."""
    outs = draw(constant(TARGET, layers=2), draft, 3, SHORT)
    assert sum(out.stats.drafted for out in outs) > 1000
    assert_follows(all_ids(outs), TARGET)
    if draft == "ngram":
        assert_follows(first_of_steps(outs), TARGET)


def test_without_a_drafter(constant, draw):
    outs = draw(constant(TARGET), None, 0, SHORT)
    assert_follows(all_ids(outs), TARGET)
    # Neighbouring tokens are independent: pairs follow the product.
    pairs = [4 * a + b for out in outs for a, b in zip(*[iter(out.token_ids)] * 2, strict=False)]
    assert_follows(pairs, [a * b for a in TARGET for b in TARGET])


def test_neighbouring_tokens_are_independent(constant, draw):
    """One uniform number used for two decisions of a step would couple them."""
    outs = draw(constant(TARGET), constant(DRAFT), 4)
    pairs = [4 * a + b for out in outs for a, b in zip(*[iter(out.token_ids)] * 2, strict=False)]
    assert_follows(pairs, [a * b for a in TARGET for b in TARGET])


FLAT = (0.4, 0.3, 0.2, 0.1)


@pytest.mark.parametrize(
    ("fields", "probs"),
    [
        ({"temperature": 0.5, "top_p": 0.6}, [*normalised((0.16, 0.09)), 0, 0]),
        ({"temperature": 2.0}, normalised([p**0.5 for p in FLAT])),
        ({"top_p": 0.75}, [*normalised(FLAT[:3]), 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.7}, [*normalised(FLAT[:2]), 0, 0]),
        ({"top_k": 100, "top_p": 1.0}, list(FLAT)),
    ],
    ids=["temperature-top_p", "temperature", "top_p", "top_k-1", "top_k-top_p", "off"],
)
def test_processors_act_on_every_verify_row(constant, draw, fields, probs):
    """C07: a processor that acts on the bonus token only shows in accepted and recovered ones."""
    outs = draw(constant(FLAT), constant((0.2, 0.4, 0.3, 0.1)), 4, SHORT, **fields)
    assert_follows(all_ids(outs), probs)
    assert_follows(by_origin(outs)["bonus"], probs)


def test_rows_of_one_batch_take_their_own_parameters(constant, engines):
    """Greedy, hot and truncated rows side by side, 500 draws each."""
    engine = engines(
        constant(FLAT),
        constant((0.2, 0.4, 0.3, 0.1)),
        3,
        max_num_seqs=NUM_REQS,
        max_model_len=LENGTH + 3,
        kv_block_size=16,
        acceptance="rejection",
        uniform_request_counts=[NUM_REQS],
    )
    kinds = [
        ({}, [1, 0, 0, 0]),
        ({"temperature": 1.0}, FLAT),
        ({"temperature": 1.0, "top_k": 2}, [*normalised(FLAT[:2]), 0, 0]),
        ({"temperature": 0.5}, normalised([p * p for p in FLAT])),
    ]
    params = [greedy(SHORT, seed=i, **kinds[i % 4][0]) for i in range(16)]
    outs = engine.generate([[0, 1]] * 16, params)
    for kind, (_, probs) in enumerate(kinds):
        assert_follows(all_ids(outs[kind::4]), probs)


def test_unseeded_texts_differ_and_follow_the_target(constant, engines):
    """Four unseeded texts of 100 tokens are equal with a chance below 1e-200."""
    engine = engines(
        constant(TARGET), constant(DRAFT), 3, max_num_seqs=4, uniform_request_counts=[4],
        max_model_len=128,
    )  # fmt: skip
    outs = engine.generate([[0, 1]] * 4, greedy(100, temperature=1.0))
    again = engine.generate([[0, 1]] * 4, greedy(100, temperature=1.0))
    texts = {tuple(out.token_ids) for out in [*outs, *again]}
    assert len(texts) == 8
    assert_follows(all_ids([*outs, *again]), TARGET)


@pytest.mark.parametrize("acceptance", ["rejection", "auto"])
def test_seed_repeats(engines, models, acceptance):
    """The same request alone gives the same text; another seed another one."""
    engine = engines(
        models["target"], models["blend.1"], 3, acceptance=acceptance, uniform_request_counts=[1],
        max_num_seqs=1,
    )  # fmt: skip
    first, again, other, huge = (
        engine.generate(PROMPTS[0], greedy(30, temperature=1.0, seed=seed)).token_ids
        for seed in (42, 42, 43, 2**64 - 1)
    )
    assert first == again
    assert first != other
    assert huge not in (first, other)


def test_seeds_are_read_in_full(engines, constant):
    """Seeds that agree in their low 32 bits, or in their high ones, are still different."""
    engine = engines(
        constant(TARGET), constant(DRAFT), 3, max_num_seqs=4, uniform_request_counts=[4],
        max_model_len=128,
    )  # fmt: skip
    params = [greedy(60, temperature=1.0, seed=seed) for seed in (1, 1 + 2**32, 1 + 2**63, 2**63)]
    outs = engine.generate([[0, 1]] * 4, params)
    assert len({tuple(out.token_ids) for out in outs}) == 4


def test_replays_draw_fresh_numbers(engines, constant):
    """C32: numbers frozen at capture would repeat each step's draws; a re-seed starts anew."""
    engine = engines(
        constant((0.25,) * 4), constant(DRAFT), 3, max_num_seqs=1, uniform_request_counts=[1],
        max_model_len=512,
    )  # fmt: skip
    params = greedy(480, temperature=1.0, seed=7)
    ids = engine.generate([0, 1], params).token_ids
    assert engine.generate([0, 1], params).token_ids == ids
    assert_decodes_replayed(engine)
    assert_follows(ids, (0.25,) * 4)
    # By chance a period below 200 shows in 280 or more tokens with a chance below 4**-250.
    assert not any(ids[period:] == ids[:-period] for period in range(1, 200))


def test_temperature_zero_is_greedy_whatever_the_seed(engines, models, oracles):
    engine = engines(models["target"], models["blend.1"], 3, uniform_request_counts=[5])
    params = [greedy(16, seed=seed, temperature=0.0, top_k=5, top_p=0.5) for seed in range(5)]
    for out in engine.generate([PROMPTS[3]] * 5, params):
        assert out.token_ids == oracles["target"].greedy(PROMPTS[3], 16)[0]


def test_tied_logits_go_to_the_lowest_id(engines, constant):
    """Greedy on a flat distribution, in the prefill's row, the verify rows and the draft's."""
    engine = engines(constant((0.1, 0.3, 0.3, 0.3)), constant((0.1, 0.3, 0.3, 0.3)), 3)
    out = engine.generate([0, 3], greedy(12))
    assert out.token_ids == [1] * 12
    assert out.stats.accepted == out.stats.drafted > 0


@pytest.mark.parametrize("temperature", [1e-4, 1e4])
def test_extreme_temperatures_stay_finite(tmp_path, temperature):
    target = make_tiny(tmp_path / "target", seed=3)
    with cpu_engine(str(target), str(target), 3, uniform_request_counts=[5]) as engine:
        params = [greedy(12, temperature=temperature, seed=seed) for seed in range(5)]
        outs = engine.generate(PROMPTS, params)
        plain = engine.generate(PROMPTS, greedy(12))
    assert all(0 <= token < 128 for out in outs for token in out.token_ids)
    cold = temperature < 1
    assert ([out.token_ids for out in outs] == [out.token_ids for out in plain]) == cold
