"""How many steps one replay takes: "rounds per replay"."""

from collections.abc import Iterable
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


@dataclass(frozen=True, slots=True)
class Rounds:
    """Steps in the next replay, and why one where there might be more."""

    count: int = 1
    reason: str | None = None


ONE_ROUND = Rounds()


class RunningText(Protocol):
    """What the choice looks at: a request."""

    streamed: bool


class RoundsChoice:
    """``steps_per_replay``: a fixed number, or "auto".

    "auto" takes one round until steps show that the host is the limit: the GPU had its results
    ready before the host asked for them. Then a replay takes ``AUTO_ROUNDS``, so that the host's
    work per replay is spread over them, until one step of the GPU outlasts that work again. While
    a text is streamed it takes one round, so that tokens are shown as they come.
    """

    def __init__(self, steps_per_replay: int | str, never: str | None = None) -> None:
        """``never``: why this engine can take one round only."""
        self.setting = steps_per_replay
        self._never = never
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

    def choose(self, running: Iterable[RunningText]) -> Rounds:
        """For a step of these requests."""
        if self.setting == 1:
            return ONE_ROUND
        if self._never is not None:
            return Rounds(1, self._never)
        if isinstance(self.setting, int):
            return Rounds(self.setting)
        if not self._several:
            return Rounds(1, "auto: the host is not the limit")
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
