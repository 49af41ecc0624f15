"""The end of an engine's start: graphs are captured, timed, and captured for several rounds."""

from collections.abc import Callable

from specdec.drafters.step_costs import StepCosts
from specdec.graph_report import start_progress
from specdec.rounds import OUTLASTS, RoundsChoice
from specdec.runner import Runner


def capture_and_time(
    runner: Runner,
    rounds: RoundsChoice,
    *,
    eager: bool,
    adapts: bool,
    num_adapter_slots: int,
    largest: Callable[[int], int],
) -> StepCosts | None:
    """Capture what is captured at start-up. What steps cost, for an engine that adapts its k.

    eager: else graphs are captured on first use, but those that are timed. largest: the largest of
    all ranks' numbers, which must have the same graphs.
    """
    costs = None
    if not eager:
        costs = runner.decode_costs(num_adapter_slots) if adapts else None
        runner.forget_replays()
        return costs
    with start_progress("capturing") as progress:
        runner.capture_all(progress)
        costs = runner.decode_costs(num_adapter_slots) if adapts else None
        if rounds.is_undecided:
            timer = runner.timer(num_adapter_slots)
            seconds = timer.round_seconds(runner.round_sizes, costs)
            # Ranks agree on whole numbers, so in nanoseconds.
            agreed = {size: largest(round(1e9 * each)) / 1e9 for size, each in seconds.items()}
            runner.capture_rounds(rounds.decide(agreed), OUTLASTS, progress)
    runner.forget_replays()
    return costs
