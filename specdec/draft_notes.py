"""What a drafter is told on the host about requests that come and go."""

from collections.abc import Iterable

from specdec.drafters.base import Drafter
from specdec.request import Request


def before_step(drafter: Drafter | None, admitted: Iterable[Request]) -> None:
    """Some requests have taken rows; then what the host knows goes to the device."""
    if drafter is None:
        return
    for request in admitted:
        drafter.enter(request.row, None if request.repeats_by_steps else request.cache_salt)
    drafter.refresh()


def after_end(drafter: Drafter | None, request: Request) -> None:
    """A request has ended, and unless it failed its output is good text."""
    if drafter is not None and request.finish_reason != "error":
        drafter.learn(request.output_ids, request.cache_salt)
