"""k="auto" in simulation: what is chosen, and what it gets against plain decoding. No engine."""

import random
from collections import Counter

import pytest

from specdec.drafters.adaptive import AdaptiveK, Batch, widths_up_to
from specdec.drafters.step_costs import CostKey, StepCosts, Timing

KS = (0, 1, 2, 4)
# (the first draft, each further one) in plain steps: lookup, a small and a large draft model, a
# drafter that is mostly fixed cost, and one whose drafts cost what they can save.
CHEAP, SMALL, LARGE, FIXED, USELESS = (0.0, 0.02), (0.1, 0.1), (0.3, 0.2), (0.7, 0.05), (0.0, 1.0)


def flat_costs(first, further, sizes=(1, 8), plain=1.0):
    """The same at every context."""
    costs = {}
    for size in sizes:
        for k in KS:
            seconds = plain + (first if k else 0.0) + further * k
            costs[CostKey(size, k)] = Timing(100, seconds, 1100, seconds)
    return costs


class World:
    """Rows that decode, with acceptances and costs that the choice can only learn.

    ``acceptance(step, adapter, position)``; ``true``: what steps really take, if not as measured.
    """

    def __init__(
        self, acceptance, costs, *, rows=("base",), width=0, pass_seconds=0.0, true=None, text=300
    ):
        self.rng = random.Random(3)
        self.acceptance, self.true, self.text = acceptance, true or costs, text
        self.rows, self.width, self.pass_seconds = rows, width, pass_seconds
        timing = Timing(100, pass_seconds, 1100, pass_seconds)
        catch_up = {CostKey(key.num_reqs, 0): timing for key in costs}
        self.choice = AdaptiveK(StepCosts(costs, catch_up, width))
        self.own = [1.0] * len(rows)
        self.limits = [KS[-1]] * len(rows)
        self.lag, self.left, self.step = 0, text, 0
        self.seconds = self.tokens = self.probing = 0.0
        self.chosen = []

    def plain(self):
        size = self.choice.costs.size(len(self.rows))
        return self.true[CostKey(size, 0)].short_seconds

    def run(self, steps):
        self.seconds = self.tokens = self.probing = 0.0
        self.chosen = []
        size = self.choice.costs.size(len(self.rows))
        for _ in range(steps):
            batch = Batch(
                num_reqs=len(self.rows),
                rows=Counter(zip(self.rows, self.limits, strict=True)),
                lag=self.lag,
                tokens_left=max(int(self.left), 1),
            )
            k = self.choice.choose(batch)
            self.chosen.append(k)
            seconds = self.true[CostKey(size, k)].short_seconds
            if k and self.lag and self.width:
                seconds += -(-(self.lag + 1) // self.width) * self.pass_seconds
            seen = Counter()
            if self.step % 16 == 0 and k > 1:
                prices = self.choice.row_limits(batch, k)
                self.limits = [self.choice.row_limit(own, 100, prices) for own in self.own]
            for row, adapter in enumerate(self.rows):
                drafted, accepted = min(k, self.limits[row]), 0
                while accepted < drafted and self.rng.random() < self.acceptance(
                    self.step, adapter, accepted
                ):
                    accepted += 1
                seen[adapter, drafted, accepted] += 1
                self.own[row] = self.choice.row_acceptance(self.own[row], drafted, accepted)
                self.tokens += 1 + accepted
            self.left -= 1
            if k and self.choice._current == 0:
                self.probing += seconds - self.plain()
            self.choice.observe(seen)
            if not (k and self.lag):
                self.choice.costs.observe(len(self.rows), k, seconds)
            self.seconds += seconds
            self.step += 1
            self.lag = 0 if k else self.lag + 1
            if self.left <= 0:
                self.left, self.lag = self.text, 0
        return self

    def speedup(self):
        return self.tokens / len(self.rows) * self.plain() / self.seconds


def best_fixed(rate, costs):
    """Speed-up of the best fixed k, where every position is accepted at ``rate``."""
    plain = costs[CostKey(1, 0)].short_seconds
    return max(
        sum(rate**i for i in range(k + 1)) * plain / costs[CostKey(1, k)].short_seconds for k in KS
    )


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize(
    ("rows", "drafter"),
    [*((1, each) for each in (CHEAP, SMALL, LARGE, FIXED, USELESS)), (8, SMALL), (8, FIXED)],
    ids=str,
)
def test_it_gets_what_the_best_k_gets_and_never_less_than_plain_decoding(rows, drafter, rate):
    costs = flat_costs(*drafter)
    world = World(lambda *_: rate, costs, rows=("base",) * rows)
    world.run(1000)
    assert world.run(1500).speedup() >= max(0.985, 0.93 * best_fixed(rate, costs))


@pytest.mark.parametrize("pass_seconds", [0.0, 0.2])
@pytest.mark.parametrize("drafter", [SMALL, LARGE], ids=str)
@pytest.mark.parametrize("shape", ["steps", "ramp", "texts", "flicker"])
def test_drifting_acceptance_never_falls_below_plain_decoding(shape, drafter, pass_seconds):
    """From good to useless and back: at once, slowly, with every text, every few steps."""

    def rate(step, adapter, position):
        return {
            "steps": 0.9 if step // 600 % 2 else 0.05,
            "ramp": abs(step % 1200 - 600) / 600,
            "texts": 0.8 if step // 300 % 3 == 0 else 0.1,
            "flicker": 0.9 if step // 40 % 4 == 0 else 0.0,
        }[shape]

    world = World(rate, flat_costs(*drafter), width=16, pass_seconds=pass_seconds)
    assert world.run(4800).speedup() >= 0.98


def test_a_drafter_that_becomes_good_is_found_soon():
    world = World(lambda step, *_: 0.9 if step >= 2000 else 0.0, flat_costs(*SMALL))
    world.run(2000)
    assert set(world.chosen[500:]) <= {0, 1, 4} and world.chosen[500:].count(0) > 1400
    world.run(1500)
    assert set(world.chosen[-200:]) <= {0, 4} and world.chosen[-200:].count(4) > 190


@pytest.mark.parametrize("drafter", [CHEAP, LARGE, USELESS], ids=str)
@pytest.mark.parametrize(("width", "pass_seconds"), [(0, 0.0), (16, 0.02), (16, 0.4), (5, 0.2)])
def test_probes_cost_under_a_hundredth_with_catching_up(drafter, width, pass_seconds):
    world = World(lambda *_: 0.0, flat_costs(*drafter), width=width, pass_seconds=pass_seconds)
    world.run(200)
    world.run(3000)
    assert world.choice._current == 0
    assert 0 < world.probing < 0.01 * world.seconds
    # Nor are those of a long time saved up to be made at once.
    most = max(sum(k > 0 for k in world.chosen[i : i + 50]) for i in range(0, 3000, 50))
    assert most <= 6


def test_catching_up_is_part_of_drafting_again():
    """Draft KV that lags: near a text's end it is not worth reading, at its beginning it is."""
    costs = StepCosts(
        flat_costs(*SMALL), {CostKey(1, 0): Timing(100, 0.3, 1100, 0.3)}, catch_up_width=16
    )
    assert [costs.catch_up_passes(lag) for lag in (0, 1, 15, 16, 100)] == [0, 1, 1, 2, 7]
    choice = AdaptiveK(costs)
    rows = {("base", 4): 1}

    def rate(k, lag, left):
        return choice.rate(Batch(num_reqs=1, rows=rows, lag=lag, tokens_left=left), k)

    assert rate(4, 0, 5) == rate(4, 0, 500) > rate(0, 0, 5)
    assert rate(4, 100, 500) > rate(0, 100, 500)
    assert rate(4, 100, 5) < rate(0, 100, 5)
    assert rate(0, 100, 5) == rate(0, 0, 5)


def test_adapters_have_an_acceptance_of_their_own():
    """The base is drafted well and adapter "bad" is not; each batch gets what suits its rows."""
    rates = {"base": 0.9, "bad": 0.05, "new": 0.9}
    world = World(lambda step, adapter, _: rates[adapter], flat_costs(*SMALL))
    chosen = {}
    for _ in range(6):
        for rows in (("base",), ("bad",)):
            world.rows, world.left, world.lag = rows, 300, 0
            world.own, world.limits = [1.0], [4]
            world.run(150)
            chosen[rows] = Counter(world.chosen)
    assert chosen["base",][4] > 130 and chosen["bad",][0] > 130
    choice = world.choice
    assert choice.expected_tokens(4, "base") > 3.5 and choice.expected_tokens(4, "bad") < 1.3
    # One that nothing is known of is taken for the base, position by position.
    assert choice.expected_tokens(4, "new") == choice.expected_tokens(4, "base")
    choice.observe({("new", 1, 0): 200})
    assert choice.acceptance(0, "new") < 0.1
    assert choice.acceptance(1, "new") == choice.acceptance(1, "base")
    # The step's k is the one that most tokens come of, over all rows.
    mixed = Batch(num_reqs=8, rows={("base", 4): 1, ("bad", 4): 7})
    assert choice.choose(mixed) == 0
    assert choice.choose(Batch(num_reqs=8, rows={("base", 4): 7, ("bad", 4): 1})) == 4


def test_costs_are_those_of_the_context():
    """Attention's share grows: at long contexts narrower drafts win."""
    costs = StepCosts(
        {
            CostKey(2, 0): Timing(100, 1.0, 1100, 2.0),
            CostKey(2, 1): Timing(100, 1.2, 1100, 2.3),
            CostKey(2, 4): Timing(100, 1.4, 1100, 6.4),
        }
    )
    assert costs.seconds(2, 4, 2 * 100) == 1.4
    assert costs.seconds(2, 4, 2 * 600) == pytest.approx(3.9)
    # Of one request in a graph for two the other row has no context.
    assert costs.seconds(1, 4, 1200) == pytest.approx(3.9)
    assert costs.seconds(2, 4, 10) == 1.4
    assert costs.seconds(2, 0, 2 * 2100) == pytest.approx(3.0)
    choice = AdaptiveK(costs)
    best = {
        context: max((0, 1, 4), key=lambda k: choice.rate(
            Batch(num_reqs=2, rows={("base", 4): 2}, num_context=2 * context), k
        ))
        for context in (100, 1000)
    }  # fmt: skip
    assert best == {100: 4, 1000: 1}
    rows = {(row.num_reqs, row.context): row.best_k for row in choice.crossover()}
    assert rows == {(2, 100): 4, (2, 1100): 1}


def test_costs_with_adapters_are_their_own_and_start_at_the_base_s():
    steps = flat_costs(*SMALL)
    costs = StepCosts(steps | {CostKey(1, k, True): Timing(100, 5.0, 1100, 5.0) for k in KS})
    assert costs.seconds(1, 4, has_lora=True) == 5.0 and costs.seconds(1, 4) == 1.5
    assert {row.has_lora for row in AdaptiveK(costs).crossover()} == {False, True}
    late = StepCosts(steps)
    assert late.seconds(1, 4, has_lora=True) == late.seconds(1, 4)
    for _ in range(100):
        late.observe(1, 4, 3.0, has_lora=True)
    assert late.seconds(1, 4, has_lora=True) == pytest.approx(3.0, rel=0.01)
    assert late.seconds(1, 4) == 1.5
    assert {row.has_lora for row in AdaptiveK(late).crossover()} == {False}


def test_costs_follow_what_steps_take_and_no_single_stall():
    costs = StepCosts(flat_costs(*SMALL))
    costs.observe(1, 4, 1000.0)
    assert costs.seconds(1, 4) < 1.7
    for _ in range(200):
        costs.observe(1, 4, 9.0)
    assert costs.seconds(1, 4) == pytest.approx(9.0, rel=0.01)
    assert costs.seconds(8, 4) == 1.5
    with pytest.raises(ValueError, match="steps"):
        StepCosts({})


@pytest.mark.parametrize("wrong", [0.6, 1.6])
def test_a_cost_that_was_measured_wrongly_is_corrected(wrong):
    """Drafts that cost less, or more, than what was timed: neither is stuck to."""
    measured = flat_costs(*SMALL)
    true = {
        key: t._replace(short_seconds=t.short_seconds * (wrong if key.k else 1.0))
        for key, t in measured.items()
    }
    rate = 0.55
    world = World(lambda *_: rate, measured, true=true)
    world.run(2000)
    plain = max(sum(rate**i for i in range(k + 1)) / true[CostKey(1, k)].short_seconds for k in KS)
    assert world.run(2000).speedup() >= max(0.98, 0.93 * plain)


def test_a_host_that_is_the_limit_costs_the_same_at_any_k():
    """Beside the device, the host's work hides what drafts cost; it is not taken for theirs."""
    costs = StepCosts(flat_costs(*SMALL))
    for _ in range(50):
        costs.observe(1, 0, 2.0, waited=0.0)
    assert costs.seconds(1, 0) == costs.seconds(1, 4) == pytest.approx(2.0)
    assert costs.device_seconds(1, 0) == 1.0
    for _ in range(50):
        costs.observe(1, 4, 1.8, waited=1.7)
    assert costs.seconds(1, 4) == pytest.approx(1.8, rel=0.02)
    assert costs.seconds(1, 0) == pytest.approx(1.0, rel=0.1)


def test_rows_take_no_less_than_those_whose_k_is_their_own():
    """The graph is that wide anyway: narrower drafts save nothing."""
    choice = AdaptiveK(StepCosts(flat_costs(*LARGE)))
    choice.observe({("base", 1, 0): 1000})
    rows = {("base", 4): 3}
    assert choice.choose(Batch(num_reqs=4, rows=rows)) == 0
    assert choice.choose(Batch(num_reqs=4, rows=rows, floor=2)) in (2, 4)
    assert choice.choose(Batch(num_reqs=4, rows=rows, floor=4)) == 4


def test_a_row_leaves_out_the_tail_that_is_hardly_reached():
    choice = AdaptiveK(StepCosts(flat_costs(*SMALL)))
    batch = Batch(num_reqs=8, rows={("base", 4): 8})
    free = choice.row_limits(batch, 4)
    assert free == [0.0, 0.0, 0.0]
    limits = [choice.row_limit(own, 1000, free) for own in (1.0, 0.5, 0.3, 0.2, 0.05, 0.0)]
    assert limits == [4, 4, 3, 2, 1, 1]
    own = 1.0
    for _ in range(60):
        own = choice.row_acceptance(own, 4, 0)
    assert choice.row_limit(own, 1000, free) == 1
    # One token is always drafted, so a row that turns comes back.
    for _ in range(40):
        own = choice.row_acceptance(own, 1, 1)
    assert choice.row_limit(own, 1000, free) == 4
    assert choice.row_acceptance(0.7, 0, 0) == 0.7


def test_a_long_context_leaves_out_the_tail_sooner():
    """Each further draft reads the row's KV once more."""
    costs = {CostKey(8, k): Timing(100, 1.0 + 0.1 * k, 1100, 1.5 + 0.1 * k + 0.4 * k) for k in KS}
    choice = AdaptiveK(StepCosts(costs))
    prices = choice.row_limits(Batch(num_reqs=8, rows={("base", 4): 8}, num_context=800), 4)
    limits = [choice.row_limit(0.5, context, prices) for context in (0, 500, 2000, 8000)]
    assert limits == sorted(limits, reverse=True) and limits[0] == 4 and limits[-1] == 1


def test_widths():
    assert [list(widths_up_to(k)) for k in (1, 2, 3, 4, 7)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 7],
    ]
