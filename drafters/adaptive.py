"""How many tokens to draft: the k with the most expected tokens per second, k=0 included.

Pure Python. What a step costs is measured (``step_costs``); acceptance is estimated online, by
position and adapter. Texts do not depend on what is chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdec.drafters.step_costs import StepCosts

# Acceptance assumed of a position that was never drafted, and for how many drafts that counts.
_PRIOR = 0.6
_PRIOR_WEIGHT = 4
# Drafts that an estimate looks back on, the most that one step may move it, and how far a probe
# may: drafts are rare then.
_MEMORY = 25
_MOST_OF_A_STEP = 0.1
# What a different k must promise to be taken: more for a wider draft, since staying at 0 loses
# nothing against plain decoding.
_TO_NARROWER, _TO_WIDER = 1.005, 1.03
# Share of the time that may be lost to trying a k that does not look worth it.
_PROBE_SHARE = 0.008
# What a probe is charged at least, as a share of a step: an estimate may be wrong.
_LEAST_CHARGE = 0.1
# Steps over which the cost of catching up is spread, where texts go on for so long.
_HORIZON = 64
# Drafts that are reached less often are not made for a row.
_TAIL = 0.01
_ROW_MEMORY = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The rows of the next step, as far as the choice depends on them."""

    num_reqs: int
    # Rows that the choice is for, by adapter and by the most that the row drafts (``row_limit``).
    rows: Mapping[tuple[str, int], int]
    num_context: int = 0  # tokens of all rows together
    has_lora: bool = False
    lag: int = 0  # steps since the drafter last read the row that it knows least of
    tokens_left: int = _HORIZON  # of the row that goes on longest
    floor: int = 0  # drafts that other rows of the batch take anyway
    rounds: int = 1  # steps that the choice holds for


@dataclass(slots=True)
class _Estimate:
    """Acceptance by position: of drafts whose predecessors were accepted, the share accepted."""

    rates: list[float]
    counts: list[float] = field(default_factory=list)


class AdaptiveK:
    """Chooses k for every step, and how much of it each row drafts."""

    def __init__(self, costs: StepCosts, base: str = "base") -> None:
        """``base``: the name that rows without an adapter go by."""
        self.costs = costs
        self._ks = costs.ks
        self._k_max = costs.ks[-1]
        self._base = base
        self._estimates = {base: _Estimate([_PRIOR] * self._k_max, [0.0] * self._k_max)}
        self._expected: dict[str, list[float]] = {}  # by adapter; what ``expected_tokens`` gives
        self._current = self._k_max
        self._allowance = 0.0  # seconds that probes may lose now
        self._num_probes = 0

    # -- the choice -------------------------------------------------------------------------------

    def choose(self, batch: Batch) -> int:
        """The k to draft with now."""
        rates = {k: self.rate(batch, k) for k in self._ks if k >= batch.floor}
        if not rates:
            return self._k_max
        best = max(rates, key=lambda k: rates[k])
        if self._current not in rates:
            self._current = best
        margin = _TO_WIDER if best > self._current else _TO_NARROWER
        if rates[best] > margin * rates[self._current]:
            self._current = best
        probe = self._probe(batch, rates)
        return self._current if probe is None else probe

    def rate(self, batch: Batch, k: int) -> float:
        """Expected tokens per second of all rows that adapt, catching up included."""
        tokens = self._tokens(batch, k)
        seconds = self._seconds(batch, k)
        if k and batch.lag:
            steps = batch.tokens_left * sum(batch.rows.values()) / tokens
            seconds += self._catch_up(batch, batch.lag) / min(max(steps, 1.0), _HORIZON)
        return tokens / seconds

    def _tokens(self, batch: Batch, k: int) -> float:
        return sum(
            count * self.expected_tokens(min(k, limit), adapter)
            for (adapter, limit), count in batch.rows.items()
        )

    def _seconds(self, batch: Batch, k: int) -> float:
        return self.costs.seconds(batch.num_reqs, k, batch.num_context, batch.has_lora)

    def _catch_up(self, batch: Batch, lag: int) -> float:
        of_batch = batch.num_reqs, lag, batch.num_context, batch.has_lora
        return self.costs.catch_up_seconds(*of_batch)

    def _probe(self, batch: Batch, rates: Mapping[int, float]) -> int | None:
        """Another k to try now, where that loses no more time than probes may.

        Without drafts nothing is learnt of them: the narrowest and the widest are tried in turn.
        With them, what a step without any takes is, and what a wider draft gets.
        """
        current = self._current
        step = self._seconds(batch, current)
        self._allowance += _PROBE_SHARE * batch.rounds * step
        wider = [k for k in self._ks if k > current]
        others = [*wider[:1], self._k_max] if current == 0 else [0, *wider[:1]]
        others = [k for k in dict.fromkeys(others) if k in rates and k != current]
        if not others:
            return None
        probe = others[self._num_probes % len(others)]
        # Seconds in which the choice would have made the same tokens are not lost.
        lost = self._seconds(batch, probe) - self._tokens(batch, probe) / rates[current]
        lost = batch.rounds * max(lost, _LEAST_CHARGE * step)
        lost += self._catch_up(batch, batch.lag if probe else batch.lag + batch.rounds)
        # What was not spent in good times must not be lost all at once.
        self._allowance = min(self._allowance, 2 * lost)
        if self._allowance < lost:
            return None
        self._allowance -= lost
        self._num_probes += 1
        return probe

    # -- rows -------------------------------------------------------------------------------------

    def row_limits(self, batch: Batch, k: int) -> list[float]:
        """For ``row_limit``: what the draft at each position beyond the first costs at least.

        In seconds for each token of a row's context, times the tokens that a second brings now: so
        many tokens must be expected of it.
        """
        of_batch = batch.num_reqs, k, batch.num_context, batch.has_lora
        per_second = self._tokens(batch, k) / self.costs.seconds(*of_batch)
        slopes = {each: self.costs.per_context_token(batch.num_reqs, each) for each in self._ks}
        prices = []
        for position in range(2, k + 1):
            wide = min(each for each in self._ks if each >= position)
            narrow = max(each for each in self._ks if each < position)
            slope = max(slopes[wide] - slopes[narrow], 0.0) / (wide - narrow)
            prices.append(per_second * slope)
        return prices

    @staticmethod
    def row_limit(acceptance: float, context: int, prices: Sequence[float]) -> int:
        """The most that a row drafts: its tail is left out where it is hardly ever reached.

        ``acceptance``: the row's own, of one draft after another. At least one token is drafted,
        so that it stays known. Further ones must be worth what they cost the row's attention.
        """
        limit, reached = 1, acceptance
        for price in prices:
            reached *= acceptance
            if reached < max(_TAIL, price * context):
                break
            limit += 1
        return limit

    @staticmethod
    def row_acceptance(acceptance: float, drafted: int, accepted: int) -> float:
        """A row's own acceptance after a step; it starts at 1."""
        tried = min(drafted, accepted + 1)
        return acceptance + (accepted - acceptance * tried) / (_ROW_MEMORY + tried)

    # -- what is known ----------------------------------------------------------------------------

    def expected_tokens(self, k: int, adapter: str | None = None) -> float:
        """Expected tokens of a row's step: one, and each draft whose predecessors are accepted."""
        name = self._base if adapter is None else adapter
        expected = self._expected.get(name)
        if expected is None:
            expected, running = [1.0], 1.0
            for position in range(self._k_max):
                running *= self.acceptance(position, name)
                expected.append(expected[-1] + running)
            self._expected[name] = expected
        return expected[min(k, self._k_max)]

    def acceptance(self, position: int, adapter: str) -> float:
        """Of an adapter whose drafts have not come so far yet it is the base's."""
        own = self._estimates.get(adapter)
        if own is None or not own.counts[position]:
            own = self._estimates[self._base]
        return own.rates[position]

    def observe(self, steps: Mapping[tuple[str, int, int], int]) -> None:
        """Rows' steps: how many of each (adapter, drafted, accepted)."""
        tries: dict[str, list[list[int]]] = {}
        for (adapter, drafted, accepted), times in steps.items():
            of_adapter = tries.setdefault(adapter, [[0, 0] for _ in range(self._k_max)])
            # A position counts where all before it were accepted.
            for position in range(min(drafted, accepted + 1, self._k_max)):
                of_adapter[position][0] += times
                of_adapter[position][1] += times * (position < accepted)
        for adapter, positions in tries.items():
            for position, (tried, hits) in enumerate(positions):
                if tried:
                    self._learn(adapter, position, tried, hits)

    def _learn(self, adapter: str, position: int, tried: int, hits: int) -> None:
        own = self._estimates.get(adapter)
        if own is None:
            own = _Estimate([0.0] * self._k_max, [0.0] * self._k_max)
            self._estimates[adapter] = own
        if not own.counts[position]:
            own.rates[position] = self.acceptance(position, adapter)
            own.counts[position] = _PRIOR_WEIGHT
        weight = min(tried / (tried + _MEMORY), _MOST_OF_A_STEP)
        if self._current == 0:
            weight = _MOST_OF_A_STEP
        weight = max(weight, tried / (tried + own.counts[position]))
        own.rates[position] += weight * (hits / tried - own.rates[position])
        own.counts[position] += tried
        if adapter == self._base:
            self._expected.clear()
        else:
            self._expected.pop(adapter, None)

    def crossover(self) -> list["CrossoverRow"]:
        """What wins at each number of requests, at the two contexts that were timed."""
        rows = []
        for has_lora in (False, True):
            for size in self.costs.sizes:
                if has_lora and not self.costs.is_timed(size, has_lora=True):
                    continue
                timing = self.costs.timing(size, 0, has_lora)
                for context in dict.fromkeys((timing.short_context, timing.long_context)):
                    rates = {
                        k: self.expected_tokens(k)
                        / self.costs.seconds(size, k, context * size, has_lora)
                        for k in self._ks
                    }
                    best = max(rates, key=lambda k: rates[k])
                    rows.append(CrossoverRow(size, context, has_lora, best, rates))
        return rows


@dataclass(frozen=True, slots=True)
class CrossoverRow:
    """Which k wins at a number of requests, by the costs and the base's acceptance of now."""

    num_reqs: int
    context: int  # tokens of each request
    has_lora: bool
    best_k: int
    tokens_per_second: dict[int, float]  # of each request, by k


def widths_up_to(k_max: int) -> Sequence[int]:
    """The widths that an adaptive engine keeps graphs for: 1, 2, 4, ... and ``k_max``."""
    widths = []
    width = 1
    while width < k_max:
        widths.append(width)
        width *= 2
    return [*widths, k_max]
