"""Where a text ends: the exact token, inside an accepted run too, and the text up to it."""

import time

from specdec.detokenize import Detokenizer
from specdec.outputs import StreamEvent, TokenLogprob
from specdec.request import Request
from specdec.tokenizer import Tokenizer
from specdec.verifier.batch import RowResult


class TextTail:
    """The text of one request as it grows, and how much of it may be shown.

    What could still turn out to be the start of a stop string is held back.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop_strings: tuple[str, ...]) -> None:
        self.text = ""
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._stop_strings = stop_strings
        self._held = max((len(stop) - 1 for stop in stop_strings), default=0)
        self._shown = 0

    def push(self, token: int) -> bool:
        """Add a token. True where a stop string is now complete; the text ends before it."""
        if self._detokenizer is None:
            return False
        return self._add(self._detokenizer.push([token]))

    def finish(self) -> bool:
        """Add what an incomplete character left. True where that completes a stop string."""
        if self._detokenizer is None:
            return False
        return self._add(self._detokenizer.flush())

    def _add(self, piece: str) -> bool:
        start = max(len(self.text) - self._held, 0)
        self.text += piece
        found = [at for s in self._stop_strings if (at := self.text.find(s, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def take(self, *, ended: bool) -> str:
        """Text that may be shown and has not been yet."""
        stop = len(self.text) if ended else max(len(self.text) - self._held, self._shown)
        piece = self.text[self._shown : stop]
        self._shown = max(stop, self._shown)
        return piece


def commit(request: Request, tail: TextTail, result: RowResult) -> int:
    """Append a pass's tokens up to the text's end, and set its finish reason if it has one.

    Returns how many tokens were committed; the rest of the run counts nowhere.
    """
    committed, room = 0, request.remaining
    grammar, stop_ids = request.grammar, request.stop_ids
    for token in result.token_ids[:room]:
        if grammar is not None and not grammar.accept(token):
            request.finish_reason = "error"
            request.error = "response_format: no token can go on from here in this format"
            break
        committed += 1
        if token in stop_ids or tail.push(token):
            request.finish_reason = "stop"
            break
    else:
        if committed == room:
            request.finish_reason = "length"
    kept = result.token_ids[:committed]
    request.output_ids += kept
    request.token_times += [time.perf_counter()] * committed
    if request.params.logprobs is not None and result.logprobs is not None:
        for token, row in zip(kept, result.logprobs, strict=False):
            request.logprobs.append(_logprob(token, request, *row))
    if committed:
        request.num_failures, request.failure = 0, None
    if request.finish_reason is None and result.failed:
        request.finish_reason = "error"
        request.error = "no token has a finite logit"
        if request.grammar is not None and request.grammar.is_stuck:
            request.error = "response_format: no token can go on from here in this format"
    if request.finish_reason is not None:
        close(request, tail)
    return committed


def _logprob(
    token: int, request: Request, chosen: float, top_ids: list[int], top: list[float]
) -> TokenLogprob:
    likeliest = dict(zip(top_ids, top, strict=True))
    kept = dict(list(likeliest.items())[: request.params.logprobs])
    return TokenLogprob(token, chosen, kept | {token: chosen})


def close(request: Request, tail: TextTail) -> None:
    """Make the text final."""
    if tail.finish():
        request.finish_reason = "stop"
    request.text = tail.text


def event(request: Request, tail: TextTail, num_new: int) -> StreamEvent:
    """What a pass added, for a stream."""
    ended = request.finish_reason is not None
    return StreamEvent(
        request_id=request.id,
        index=request.index,
        text=tail.take(ended=ended),
        token_ids=request.output_ids[len(request.output_ids) - num_new :],
        finish_reason=request.finish_reason,
        times=request.token_times[len(request.token_times) - num_new :],
        error=request.error,
    )
