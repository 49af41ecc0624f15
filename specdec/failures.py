"""Steps that fail: which request is at fault is found by running those of a failed step alone."""

import logging

import torch

from specdec.request import Request
from specdec.scheduler import Scheduler, StepPlan

logger = logging.getLogger(__name__)

# Failed steps without a new token after which a request's step-mates and it run one by one.
MAX_FAILURES = 3


def find_culprit(
    scheduler: Scheduler, plan: StepPlan, error: BaseException, device: torch.device
) -> Request | None:
    """Note that ``plan``, which has been given back, failed. The request to end, if it is known.

    A fault that passes costs its requests nothing but time. Where one of them has been in
    ``MAX_FAILURES`` failed steps since its last token, all of the step's run alone, one after the
    other: who fails alone is the culprit, who goes on is not. Raises ``error`` where no request is
    in the plan or where it is an interrupt, and what a broken device raises: none of them is a
    request's fault.
    """
    if not isinstance(error, Exception) or not plan.requests:
        raise error
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for request in plan.requests:
        request.num_failures += 1
        request.failure = error
    first = plan.requests[0]
    worst = max(request.num_failures for request in plan.requests)
    is_alone = len(plan.requests) == 1
    if is_alone and (first in scheduler.suspects or worst >= MAX_FAILURES):
        logger.error("request %s is ended: its steps fail", first.id, exc_info=error)
        first.error = f"{type(error).__name__}: {error}"
        return first
    logger.warning("a step failed; its requests are computed anew", exc_info=error)
    if worst >= MAX_FAILURES:
        scheduler.isolate(plan.requests)
    return None
