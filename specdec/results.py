"""What a call of the engine gives back for requests that have ended."""

from collections.abc import Sequence

from specdec.outputs import Generation
from specdec.request import Request


def result_of(group: Sequence[Request], simulated: bool) -> Generation:
    """The result of one prompt's requests, one per choice."""
    first, *others = [
        Generation(
            text=request.text,
            token_ids=request.output_ids,
            finish_reason=request.finish_reason or "abort",
            prompt_tokens=len(request.prompt_ids),
            stats=request.stats,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            simulated=simulated,
            error=request.error,
        )
        for request in group
    ]
    first.further_choices = others
    return first


def results_of(groups: Sequence[Sequence[Request]], simulated: bool) -> list[Generation]:
    """One result per prompt. Raises what their steps raised, where these failed for all of them."""
    requests = [request for group in groups for request in group]
    failures = [r.failure for r in requests if r.finish_reason == "error" and r.failure is not None]
    if failures and len(failures) == len(requests):
        raise failures[0]
    return [result_of(group, simulated) for group in groups]
