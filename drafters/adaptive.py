"""How many tokens to draft: the k with the most expected tokens per second, k=0 included.

Pure Python. The cost of a step comes from the captured graphs, timed at start-up and corrected by
what steps then take; acceptance is estimated online, by position.
"""

from collections.abc import Mapping, Sequence

# Weight of a new observation in the running estimates.
_RATE = 0.05
_COST_RATE = 0.1
# A different k must promise this much more before it is taken.
_HYSTERESIS = 1.03
# Share of the time that may be spent on trying a k that does not look worth it.
_PROBE_SHARE = 0.01
# Acceptance assumed of a position that was never drafted.
_PRIOR = 0.6


class AdaptiveK:
    """Chooses k for a step of some number of requests."""

    def __init__(self, costs: Mapping[tuple[int, int], float]) -> None:
        """``costs``: seconds of a decode step for each (number of requests, k) that has a graph."""
        if not costs:
            raise ValueError("costs must not be empty")
        self.costs = dict(costs)
        self._sizes = sorted({num_reqs for num_reqs, _ in costs})
        self._ks = sorted({k for _, k in costs})
        self._acceptance = [_PRIOR] * max(self._ks)
        self._current = self._ks[-1]
        self._undrafted_seconds = 0.0

    def choose(self, num_reqs: int) -> int:
        """The k to draft with now."""
        size = self._size(num_reqs)
        best = max(self._ks, key=lambda k: self.rate(size, k))
        if self.rate(size, best) > _HYSTERESIS * self.rate(size, self._current):
            self._current = best
        if self._current == 0 and len(self._ks) > 1:
            # Nothing is learnt without drafting: the smallest k is tried now and then.
            probe = self._ks[1]
            extra = self.costs[size, probe] - self.costs[size, 0]
            self._undrafted_seconds += self.costs[size, 0]
            if self._undrafted_seconds * _PROBE_SHARE > max(extra, self.costs[size, 0] * 0.1):
                self._undrafted_seconds = 0.0
                return probe
        return self._current

    def rate(self, num_reqs: int, k: int) -> float:
        """Expected tokens per second of each request."""
        return self.expected_tokens(k) / self.costs[self._size(num_reqs), k]

    def expected_tokens(self, k: int) -> float:
        """Expected tokens of a step: one, and each draft whose predecessors are accepted too."""
        total = running = 1.0
        for rate in self._acceptance[:k]:
            running *= rate
            total += running
        return total

    def observe(self, drafted: int, accepted: int) -> None:
        """One row's step. A position counts where all before it were accepted."""
        for position in range(min(drafted, accepted + 1)):
            hit = float(position < accepted)
            self._acceptance[position] += _RATE * (hit - self._acceptance[position])

    def observe_cost(self, num_reqs: int, k: int, seconds: float) -> None:
        """A step of ``num_reqs`` requests took this long."""
        key = self._size(num_reqs), k
        if key in self.costs:
            # One stall must not turn the choice: a step counts for twice its estimate at most.
            seconds = min(seconds, 2 * self.costs[key])
            self.costs[key] += _COST_RATE * (seconds - self.costs[key])

    def crossover(self) -> list[tuple[int, int, dict[int, float]]]:
        """Per number of requests: the k that wins now, and tokens per second for every k."""
        rows = []
        for size in self._sizes:
            rates = {k: self.rate(size, k) for k in self._ks}
            rows.append((size, max(rates, key=lambda k: rates[k]), rates))
        return rows

    def _size(self, num_reqs: int) -> int:
        """The smallest size with a graph that holds this many requests."""
        return next((size for size in self._sizes if size >= num_reqs), self._sizes[-1])


def widths_up_to(k_max: int) -> Sequence[int]:
    """The widths that an adaptive engine keeps graphs for: 1, 2, 4, ... and ``k_max``."""
    widths = []
    width = 1
    while width < k_max:
        widths.append(width)
        width *= 2
    return [*widths, k_max]
