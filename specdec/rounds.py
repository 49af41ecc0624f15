"""How many steps one replay takes: "rounds per replay"."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec.config import EngineConfig
from specdec.drafters.base import Drafter
from specdec.verifier.modes import CUDAGraphMode

# Under "auto": rounds where the host is the limit, and how much of a step the GPU must have kept
# the host waiting for one round to be enough.
AUTO_ROUNDS = 4
_MIN_WAITING = 0.1
# Weight of a new observation in the running estimates.
_RATE = 0.05
# What a launch takes the host, in seconds: fixed, and for every request. Measured with
# bench/host_cost.py on the host of one H200 (0.18 ms at one request, 1.7 ms at 64). Whether a step
# takes several rounds follows what its own host takes; this says which sizes get graphs for it.
HOST_SECONDS, HOST_SECONDS_PER_REQUEST = 0.16e-3, 24e-6
# A host so many times slower than that one finds its graphs captured.
_SLOWER_HOST = 1.5


@dataclass(frozen=True, slots=True)
class Rounds:
    """Steps in the next replay, and why one where there might be more."""

    count: int = 1
    reason: str | None = None


ONE_ROUND = Rounds()
OUTLASTS = "auto: a replay outlasts the host's work for it"


class RunningText(Protocol):
    """What the choice looks at: a request."""

    streamed: bool


class RoundsChoice:
    """``steps_per_replay``: a fixed number, or "auto".

    "auto" has graphs of several rounds for those numbers of requests at which a replay of one, as
    timed at start-up, is no longer than the host's work for it may be (``decide``). There it takes
    one round until steps show that the host is the limit: the GPU had its results ready before the
    host asked for them. Then a replay takes ``AUTO_ROUNDS``, so that the host's work per replay is
    spread over them, until one step of the GPU outlasts that work again. While a text is streamed
    it takes one round, so that tokens are shown as they come.
    """

    def __init__(self, steps_per_replay: int | str, never: str | None = None) -> None:
        """``never``: why this engine can take one round only."""
        self.setting = steps_per_replay
        self._never = never
        self._sizes: list[int] = []  # numbers of requests that ``decide`` was asked about
        self._kept: set[int] = set()
        self._waiting = 1.0  # share of a step of one round that the host waited for the GPU
        self._host = 0.0  # seconds that the host works for a replay of one round
        self._several = False

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of rounds above 1 that may be chosen: those that graphs are for."""
        if self._never is not None or self.setting == 1:
            return ()
        return (self.setting if isinstance(self.setting, int) else AUTO_ROUNDS,)

    @property
    def is_asked_for(self) -> bool:
        """Steps will take several rounds wherever they can."""
        return self.setting != "auto" and bool(self.counts)

    @property
    def is_undecided(self) -> bool:
        """Which graphs of several rounds are worth having is still to be told: ``decide``."""
        return self.setting == "auto" and bool(self.counts) and not self._sizes

    def decide(self, replay_seconds: Mapping[int, float]) -> set[int]:
        """Of the numbers of requests that graphs of several rounds may hold, those that get them.

        ``replay_seconds``: of one round at each of them. To be called before the first step.
        """
        self._sizes = sorted(replay_seconds)
        self._kept = {
            size for size, seconds in replay_seconds.items() if self.may_pay(size, seconds)
        }
        if not self._kept:
            self._never = OUTLASTS
        return self._kept

    @staticmethod
    def may_pay(num_reqs: int, replay_seconds: float) -> bool:
        """Whether the host may be the limit of steps whose replay takes so long."""
        host = HOST_SECONDS + HOST_SECONDS_PER_REQUEST * num_reqs
        return replay_seconds < _SLOWER_HOST * host

    def choose(self, running: Sequence[RunningText]) -> Rounds:
        """For a step of these requests."""
        if self.setting == 1:
            return ONE_ROUND
        if self._never is not None:
            return Rounds(1, self._never)
        if isinstance(self.setting, int):
            return Rounds(self.setting)
        if not self._several:
            return Rounds(1, "auto: the host is not the limit")
        if self._sizes:
            size = bisect_left(self._sizes, len(running))
            if size == len(self._sizes) or self._sizes[size] not in self._kept:
                return Rounds(1, OUTLASTS)
        if any(request.streamed for request in running):
            return Rounds(1, "auto: a text is streamed")
        return Rounds(AUTO_ROUNDS)

    def observe(self, rounds: int, seconds: float, waited: float) -> None:
        """A replay and the host's work for it took ``seconds``, of which the host waited."""
        if rounds == 1:
            self._waiting += _RATE * (waited / seconds - self._waiting)
            self._host += (_RATE if self._host else 1.0) * (seconds - waited - self._host)
            self._several = self._waiting < _MIN_WAITING
        elif seconds / rounds > (1 + _MIN_WAITING) * self._host:
            self._several = False
            self._waiting = 2 * _MIN_WAITING


def make_rounds_choice(
    config: EngineConfig, drafter: Drafter | None, mode: CUDAGraphMode, device: torch.device
) -> RoundsChoice:
    """Several rounds lie in one FULL graph of a uniform batch, and so does their drafter."""
    never = None
    if drafter is not None and not drafter.capturable:
        never = f"drafter {drafter.name!r} drafts on the host"
    elif mode.decode_mode() is not CUDAGraphMode.FULL:
        never = f"cudagraph_mode is {mode}"
    elif config.steps_per_replay == "auto" and device.type != "cuda":
        never = "auto: the host is the device"
    return RoundsChoice(config.steps_per_replay, never)
