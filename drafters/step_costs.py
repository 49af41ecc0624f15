"""What a decode step costs: graphs timed at two contexts, then corrected by what steps take.

Pure Python; ``specdec.step_timing`` takes the times.
"""

from collections.abc import Mapping
from typing import NamedTuple

# Weight of a new observation in the running estimates.
_RATE = 0.1
# One stall must not turn a choice: what is observed counts within these factors of the estimate.
_LEAST, _MOST = 0.5, 2.0
# Where the host waited for less of a step than this, the step's time is the host's.
_MIN_WAITED = 0.05


class CostKey(NamedTuple):
    """A graph of decode steps."""

    num_reqs: int
    k: int
    has_lora: bool = False


class Timing(NamedTuple):
    """Seconds of one replay where every row has a short context, and a long one (in tokens)."""

    short_context: int
    short_seconds: float
    long_context: int
    long_seconds: float

    @property
    def per_token(self) -> float:
        """Seconds for each further token of context of every row."""
        tokens = self.long_context - self.short_context
        return max(self.long_seconds - self.short_seconds, 0.0) / tokens if tokens > 0 else 0.0

    def seconds(self, context: float) -> float:
        """At a mean context of the graph's rows, along the line through both times."""
        return self.short_seconds + self.per_token * max(context - self.short_context, 0.0)


class StepCosts:
    """Seconds of a decode step, by number of requests, k, adapters and context."""

    def __init__(
        self,
        steps: Mapping[CostKey, Timing],
        catch_up: Mapping[CostKey, Timing] | None = None,
        catch_up_width: int = 0,
    ) -> None:
        """
        steps: of every graph of decode steps, base keys among them.
        catch_up: of the passes in which a drafter reads tokens that it lacks (with k=0 in the key).
        catch_up_width: tokens of each row that one such pass reads; 0 for a drafter without KV.
        """
        if not steps:
            raise ValueError("steps must not be empty")
        self._steps = dict(steps)
        self._catch_up = dict(catch_up or {})
        self._width = catch_up_width
        self._factors: dict[CostKey, float] = {}
        self._host: dict[int, float] = {}
        self.sizes = sorted({key.num_reqs for key in steps})
        self.ks = sorted({key.k for key in steps})

    def size(self, num_reqs: int) -> int:
        """Rows of the smallest graph that holds this many requests."""
        return next((size for size in self.sizes if size >= num_reqs), self.sizes[-1])

    def is_timed(self, num_reqs: int, *, has_lora: bool) -> bool:
        """Whether graphs of this size with adapters, or without, were timed."""
        return CostKey(num_reqs, self.ks[0], has_lora) in self._steps

    def timing(self, num_reqs: int, k: int, has_lora: bool = False) -> Timing:
        """As measured. Adapters that came after start-up begin at what base rows cost."""
        size = self.size(num_reqs)
        found = self._steps.get(CostKey(size, k, has_lora))
        return found if found is not None else self._steps[CostKey(size, k)]

    def seconds(
        self, num_reqs: int, k: int, num_context: float = 0.0, has_lora: bool = False
    ) -> float:
        """A step's time: the device's, or the host's beside it where that is longer.

        ``num_context``: tokens of all requests together.
        """
        size = self.size(num_reqs)
        device = self.device_seconds(num_reqs, k, num_context, has_lora)
        return max(device, self._host.get(size, 0.0))

    def device_seconds(
        self, num_reqs: int, k: int, num_context: float = 0.0, has_lora: bool = False
    ) -> float:
        size = self.size(num_reqs)
        factor = self._factors.get(CostKey(size, k, has_lora), 1.0)
        return factor * self.timing(num_reqs, k, has_lora).seconds(num_context / size)

    def per_context_token(self, num_reqs: int, k: int, has_lora: bool = False) -> float:
        """Seconds that one more token of one request's context adds to a step."""
        return self.timing(num_reqs, k, has_lora).per_token / self.size(num_reqs)

    def catch_up_passes(self, lag: int) -> int:
        """Passes before a step that drafts again, ``lag`` steps after the last that did."""
        # One more token than steps: the last draft of a fully accepted run was never fed.
        return -(-(lag + 1) // self._width) if self._width and lag else 0

    def catch_up_seconds(
        self, num_reqs: int, lag: int, num_context: float = 0.0, has_lora: bool = False
    ) -> float:
        """What those passes take."""
        passes = self.catch_up_passes(lag)
        if not passes or not self._catch_up:
            return 0.0
        size = self.size(num_reqs)
        timing = self._catch_up.get(CostKey(size, 0, has_lora)) or self._catch_up[CostKey(size, 0)]
        return passes * timing.seconds(num_context / size)

    def observe(
        self,
        num_reqs: int,
        k: int,
        seconds: float,
        *,
        num_context: float = 0.0,
        has_lora: bool = False,
        waited: float | None = None,
    ) -> None:
        """A step without catch-up took this long.

        ``waited``: seconds of it in which the host waited for the device, where the host works
        beside it; None where they take turns, so that the time is all the step's.
        """
        size = self.size(num_reqs)
        if waited is not None:
            host, known = seconds - waited, self._host.get(size)
            self._host[size] = host if known is None else known + _RATE * (_near(host, known))
            if waited < _MIN_WAITED * seconds:
                return
        key = CostKey(size, k, has_lora)
        if k not in self.ks:
            return
        estimate = self.device_seconds(num_reqs, k, num_context, has_lora)
        ratio = min(max(seconds / estimate, _LEAST), _MOST)
        self._factors[key] = self._factors.get(key, 1.0) * (1 + _RATE * (ratio - 1))


def _near(value: float, estimate: float) -> float:
    """How far ``value`` lies from ``estimate``, a stall counted as twice the estimate."""
    return min(value, _MOST * estimate) - estimate
