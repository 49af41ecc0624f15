"""Simulated acceptance: the step of a drafter of a given quality, and never a text."""

import math

import pytest
from tiny import make_tiny

import specdec

VOCAB = 256
NEW_TOKENS = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("simulated") / "tiny"
    return str(make_tiny(folder, vocab=VOCAB, tokenizer="bytes", max_position=2048))


def run(model: str, rate: object, draft: str = "ngram", **params: object) -> specdec.Generation:
    with specdec.Engine(
        model, draft, 4, device="cpu", max_num_seqs=2, simulated_acceptance=rate, capture="lazy"
    ) as engine:
        fields: dict = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True} | params
        chosen = specdec.SamplingParams(**fields)
        result = engine.generate([[1, 2, 3, 250]], chosen)[0]
        engine.check_integrity()
    return result


def conditional_rates(result: specdec.Generation) -> list[tuple[int, int]]:
    """Per position: drafts whose predecessors were all accepted, and how many of them were too."""
    steps = list(zip(result.stats.drafted_per_step, result.stats.accepted_per_step, strict=True))
    return [
        (
            sum(drafted > i and accepted >= i for drafted, accepted in steps),
            sum(accepted > i for _, accepted in steps),
        )
        for i in range(4)
    ]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9}], ids=["greedy", "sampled"])
def test_rates_are_those_asked_for(model: str, params: dict) -> None:
    """Each rate lies within four standard deviations: a false alarm once in 2,000 runs of new
    draws, and the draws are fixed.
    """
    wanted = [0.9, 0.6, 0.8, 0.3]
    result = run(model, wanted, **params)
    assert len(result.token_ids) == NEW_TOKENS
    for (tried, passed), rate in zip(conditional_rates(result), wanted, strict=True):
        assert tried > 15
        assert abs(passed / tried - rate) < 4 * math.sqrt(rate * (1 - rate) / tried)


@pytest.mark.parametrize(("rate", "accepted"), [(1.0, 4), (0.0, 0)])
@pytest.mark.parametrize("draft", ["ngram", "layer_skip:1"])
def test_certain_rates(model: str, draft: str, rate: float, accepted: int) -> None:
    """A lookup that finds nothing, or a draft that is wrong, does not lower the simulated rate."""
    stats = run(model, rate, draft, max_new_tokens=60).stats
    # Where the text ends fewer drafts are left to take.
    whole = stats.steps - 4
    assert stats.drafted_per_step[:whole] == [4] * whole
    assert stats.accepted_per_step[:whole] == [accepted] * whole


def test_a_run_repeats_itself(model: str) -> None:
    one, other = (run(model, rate, max_new_tokens=100) for rate in (0.7, [0.7]))
    assert one.stats.accepted_per_step == other.stats.accepted_per_step
    assert 0 < one.stats.accepted < one.stats.drafted


def test_prompts_of_one_length_are_not_given_the_same_draws(model: str) -> None:
    """Fault: draws were keyed by row and position alone, so that of many prompts of one length, one
    after another, each was given the draws of the first: all measured the same few numbers.
    """
    with specdec.Engine(
        model, "ngram", 4, device="cpu", max_num_seqs=1, simulated_acceptance=0.5, capture="lazy"
    ) as engine:
        params = specdec.SamplingParams(max_new_tokens=60, ignore_eos=True)
        one, other, again = (
            engine.generate([ids], params)[0].stats.accepted_per_step
            for ids in ([1, 2, 3, 250], [1, 2, 4, 250], [1, 2, 3, 250])
        )
    assert one == again != other


def test_the_text_is_marked_and_empty(model: str) -> None:
    result = run(model, 0.8, max_new_tokens=20)
    assert result.simulated
    assert result.text == ""
    with specdec.Engine(model, "ngram", 4, device="cpu", capture="lazy") as engine:
        real = engine.generate([1, 2, 3], specdec.SamplingParams(max_new_tokens=8))
    assert not real.simulated  # type: ignore[union-attr]


@pytest.mark.parametrize("rate", [1.5, -0.1, [], [0.5, 2.0], "high", True])
def test_other_rates_are_refused(model: str, rate: object) -> None:
    with pytest.raises(ValueError, match="simulated_acceptance"):
        specdec.Engine(model, "ngram", 4, device="cpu", simulated_acceptance=rate)


@pytest.mark.parametrize("promise", [{"exact": True}, {"acceptance": "coupled"}])
def test_an_engine_that_promises_text_is_refused(model: str, promise: dict) -> None:
    with pytest.raises(ValueError, match=r"simulated_acceptance.*promises"):
        specdec.Engine(model, "ngram", 4, device="cpu", simulated_acceptance=0.8, **promise)


def test_it_needs_a_drafter(model: str) -> None:
    with pytest.raises(ValueError, match="simulated_acceptance needs a drafter"):
        specdec.Engine(model, None, 4, device="cpu", simulated_acceptance=0.8)


@pytest.mark.parametrize(
    "promise",
    [
        {"seed": 3, "temperature": 1.0},
        {"stop": "x"},
        {"stop_token_ids": [3]},
        {"bad_words": [[3]]},
        {"logit_bias": {3: 1.0}},
        {"logprobs": 1},
        {"response_format": {"type": "json_object"}},
        {"ignore_eos": False},
    ],
    ids=lambda promise: next(iter(promise)),
)
def test_a_request_that_promises_text_is_refused(model: str, promise: dict) -> None:
    fields = {"max_new_tokens": 4, "ignore_eos": True} | promise
    with (
        specdec.Engine(
            model, "ngram", 4, device="cpu", simulated_acceptance=0.8, capture="lazy"
        ) as engine,
        pytest.raises(ValueError, match=next(iter(promise))),
    ):
        engine.generate([1, 2], specdec.SamplingParams(**fields))
