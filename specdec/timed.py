"""Runs prompts through an engine and takes the time of every token that comes back."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdec.outputs import GenerationStats, StreamEvent
from specdec.params import SamplingParams

if TYPE_CHECKING:
    from specdec.engine import Engine


@dataclass(kw_only=True, slots=True)
class TimedText:
    """One prompt's text, with seconds counted from when it was handed to the engine."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None  # where ``finish_reason`` is "error"
    prompt_tokens: int
    stats: GenerationStats
    first_token: float = 0.0
    last_token: float = 0.0
    gaps: list[float] = field(default_factory=list)  # before each token but the first

    @property
    def decode_tokens(self) -> int:
        """Tokens that decode steps brought: all but the first, which the prefill brings."""
        return max(len(self.token_ids) - 1, 0)

    @property
    def decode_seconds(self) -> float:
        return self.last_token - self.first_token


def run_timed(
    engine: "Engine",
    prompts: Sequence[str | Sequence[int]],
    params: Sequence[SamplingParams],
    on_event: Callable[[int, StreamEvent], None] | None = None,
    *,
    lora: str | None = None,
) -> list[TimedText]:
    """Run all prompts at once, as many side by side as the engine holds, in the prompts' order.

    ``on_event`` is called with a prompt's number and each thing that a step adds to its text.
    One text per prompt: ``n`` > 1 is refused. Raises what ``Engine.add_request`` raises.
    """
    if any(each.n != 1 for each in params):
        raise ValueError("n must be 1 here: one text per prompt")
    started = time.perf_counter()
    requests = []
    try:
        for prompt, each in zip(prompts, params, strict=True):
            requests += engine.add_request(prompt, each, lora)
        texts = [TimedText(prompt_tokens=len(r.prompt_ids), stats=r.stats) for r in requests]
        while any(text.finish_reason is None for text in texts):
            engine.step()
            now = time.perf_counter() - started
            for number, (request, text) in enumerate(zip(requests, texts, strict=True)):
                while request.events:
                    event = request.events.popleft()
                    _add(text, event, now)
                    if on_event is not None:
                        on_event(number, event)
    except BaseException:
        for request in requests:
            engine.abort(request.id)
        raise
    return texts


def _add(text: TimedText, event: StreamEvent, now: float) -> None:
    if event.token_ids:
        # Tokens of one step come together: all but its first without a gap.
        inside = [0.0] * (len(event.token_ids) - 1)
        if text.token_ids:
            text.gaps += [now - text.last_token, *inside]
        else:
            text.first_token = now
            text.gaps += inside
        text.last_token = now
    text.text += event.text
    text.token_ids += event.token_ids
    text.finish_reason = event.finish_reason
    text.error = event.error
