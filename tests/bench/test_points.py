"""The statistics of a point, against values worked out by other means."""

import math

import numpy as np
import pytest

from specdec.bench.plot import crossover
from specdec.bench.points import Acceptance, Runs, digest, percentiles, point, wilson
from specdec.outputs import GenerationStats, StepRecord
from specdec.timed import TimedText
from specdec.verifier.modes import BatchDescriptor


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # From tables of the score interval without continuity correction.
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilson(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=1e-4)


def test_wilson_covers_the_true_share_as_often_as_it_says() -> None:
    """2,000 draws of 60 at 0.8: the coverage of 0.95 has a standard deviation of 0.005 and the
    interval's own error at this size is below 0.01, so 0.92 to 0.98 is never left by chance.
    """
    hits = np.random.default_rng(0).binomial(60, 0.8, 2000)
    inside = [low <= 0.8 <= high for low, high in (wilson(int(hit), 60) for hit in hits)]
    assert 0.92 < sum(inside) / len(inside) < 0.98
    assert wilson(0, 0) == (0.0, 1.0)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([]) == {"p50": 0.0, "p95": 0.0, "p99": 0.0}
    assert percentiles([7.0]) == {"p50": 7.0, "p95": 7.0, "p99": 7.0}
    values = [float(v) for v in range(1, 101)]
    assert percentiles(values[::-1]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}


def text_of(ids: list[int], drafted: list[int], accepted: list[int]) -> TimedText:
    stats = GenerationStats()
    for one, other in zip(drafted, accepted, strict=True):
        stats.record(one, other, other + 1)
    return TimedText(prompt_tokens=2, stats=stats, token_ids=ids)


def test_positions_and_loops() -> None:
    acceptance = Acceptance()
    acceptance.add(text_of([1, 2, 1, 2, 1, 2, 1], [3, 3, 1], [3, 1, 0]))
    made = acceptance.to_json()
    assert made["drafted_by_position"] == [3, 2, 2]
    assert made["accepted_by_position"] == [2, 1, 1]
    assert made["acceptance_by_position"] == pytest.approx([2 / 3, 1 / 2, 1 / 2])
    assert made["acceptance_intervals"][0] == list(wilson(2, 3))
    # Four runs of four tokens, of which two are new: a loop of two tokens flatters lookup.
    assert (made["ngrams"], made["distinct_ngrams"]) == (4, 2)
    assert made["repeated_share"] == 0.5


def test_a_digest_tells_texts_apart() -> None:
    assert digest([[1, 2], [3]]) == digest([(1, 2), (3,)])
    assert len({digest([[1, 2], [3]]), digest([[1], [2, 3]]), digest([[1, 2, 3]])}) == 3


def test_the_crossover_lies_where_the_line_meets_one() -> None:
    assert crossover([1, 4], [2.0, 0.5]) == pytest.approx(math.exp(math.log(4) * 2 / 3))
    assert crossover([1, 4, 16], [1.5, 1.0, 0.5]) == pytest.approx(4.0)
    assert crossover([1, 4, 16], [1.5, 1.2, 1.1]) is None
    assert crossover([1, 4], [0.5, 0.4]) is None


def test_the_crossover_is_not_where_speculation_pays_again_later() -> None:
    """Fault: the first dip below one was marked as the number from which on it never pays."""
    assert crossover([1, 4, 16], [1.2, 0.9, 1.1]) is None
    assert crossover([1, 4, 16, 64], [1.2, 0.9, 1.5, 0.5]) == pytest.approx(32.0)
    assert crossover([1, 4, 16], [0.9, 1.5, 0.5]) == pytest.approx(8.0)


def test_a_text_that_ran_twice_does_not_narrow_the_interval() -> None:
    """Fault: 4 prompts in 16 rows were counted as 16 texts, with intervals of half the width."""
    once, often = Acceptance(), Acceptance()
    for repeat in range(4):
        text = text_of([1, 2, 3, 4, 5], [2, 2, 2], [1, 0, 0])
        often.add(text, repeat == 0)
        if repeat == 0:
            once.add(text)
    one, many = once.to_json(), often.to_json()
    assert many["drafted"] == 4 * one["drafted"]
    assert many["acceptance_by_position"] == one["acceptance_by_position"]
    for made, wanted in zip(many["acceptance_intervals"], one["acceptance_intervals"], strict=True):
        assert made == pytest.approx(wanted)


def test_rows_that_ended_are_not_in_the_floor() -> None:
    """Fault: the KV of all rows was taken for read in every step, also after most had ended.

    Four rows for two steps, then one for eight: of 16 steps of rows half saw four rows. The one
    text of one token keeps its place among the times, since reports are compared by place.
    """
    records = [
        StepRecord("FULL", BatchDescriptor(4, 4, True), rows, rows, 0, None)
        for rows in (4, 4, *[1] * 8)
    ]
    runs = Runs(records=records, seconds=2.0)
    for steps in (2, 0, 10):
        text = text_of(list(range(1 + steps)), [0] * steps, [0] * steps)
        text.prompt_tokens = 100 * steps
        text.first_token, text.last_token = 0.5, 0.5 + 0.1 * steps
        runs.texts.append(text)
        runs.categories.append("a")
        runs.are_distinct.append(True)
    made = point(runs)
    assert made["mean_num_reqs"] == pytest.approx((2 * 4 * 4 + 8 * 1) / 16)
    assert made["mean_context"] == pytest.approx((2 * 201.5 + 10 * 1005.5) / 12)
    assert made["padding_waste"] == pytest.approx(1 - 16 / 40)
    assert made["ms_per_token_by_text"] == pytest.approx([100.0, 0.0, 100.0])
    assert made["ms_per_token"]["p50"] == pytest.approx(100.0)
    assert made["errors"] == []
