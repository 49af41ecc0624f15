"""What a drafter is told about requests that come and go, and what is counted of its drafts."""

import logging
from collections.abc import Iterable, Mapping

from specdec.drafters.base import Drafter
from specdec.outputs import EngineStats
from specdec.request import Request
from specdec.runner import Runner

logger = logging.getLogger(__name__)


def before_step(runner: Runner, admitted: Iterable[Request]) -> None:
    """Some requests have taken rows; then what the host knows goes to the device."""
    runner.tell_drafter(
        [
            (request.row, None if request.repeats_by_steps else request.cache_salt)
            for request in admitted
        ]
    )


def from_sources(
    drafter: Drafter | None, drafted: int, accepted: int, num_from_first: int
) -> dict[str, tuple[int, int]]:
    """Drafted and accepted tokens of a row's step, by the drafter that proposed them."""
    if drafter is None:
        return {}
    if not drafter.sources:
        return {drafter.name: (drafted, accepted)}
    first, second = drafter.sources
    of_first = min(drafted, num_from_first), min(accepted, num_from_first)
    return {first: of_first, second: (drafted - of_first[0], accepted - of_first[1])}


def count(
    stats: EngineStats,
    drafter: Drafter | None,
    tally: Mapping[tuple[str, str, int, int, int], int],
) -> None:
    """Add rows' steps to the totals: times of (adapter, graph mode, drafted, accepted, of the first
    drafter).

    The engine only counts them as they come, since it does so for every row of every step.
    """
    for (adapter, mode, drafted, accepted, of_first), times in tally.items():
        sources = from_sources(drafter, drafted, accepted, of_first)
        stats.record(adapter, mode, drafted, accepted, sources, times)


def after_end(runner: Runner, request: Request) -> None:
    """A request has ended, and unless it failed its output is good text."""
    if request.finish_reason != "error":
        try:
            runner.teach_drafter(request.output_ids, request.cache_salt)
        except Exception:
            # Its text is whole, and what the drafter has not learnt changes no other.
            logger.exception("the drafter failed to learn a text")
