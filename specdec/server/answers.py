"""Bodies of answers: whole ones and the chunks of a stream, in OpenAI's two interfaces."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from specdec.request import Request
from specdec.server.front import Job, Piece
from specdec.server.logprobs import ChatLogprobs, CompletionLogprobs, TokenTexts
from specdec.server.openai_types import TextRequest


class Answer:
    """One HTTP request's answer. Subclasses say what a choice looks like."""

    prefix: str
    whole: str
    chunked: str
    logprobs_form: type[CompletionLogprobs] | type[ChatLogprobs]

    def __init__(self, wanted: TextRequest, model: str, job: Job, texts: TokenTexts) -> None:
        self._wanted = wanted
        self._job = job
        self._num_top = wanted.params.logprobs
        self._logprobs = [self.logprobs_form(texts) for _ in job.texts]
        self._sent = [0] * len(job.texts)  # tokens whose log-probabilities have been sent
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def body(self) -> dict[str, Any]:
        """The whole answer, of texts that have ended."""
        choices = []
        for number, text in enumerate(self._job.texts):
            choice = {"index": number, **self._content(text.text)}
            choice["logprobs"] = self._logprobs_of(number, len(text.output_ids))
            choice["finish_reason"] = text.finish_reason
            if self._wanted.return_token_ids:
                choice["token_ids"] = text.output_ids
            choices.append(choice)
        return self._head | {"object": self.whole, "choices": choices, "usage": usage(self._job)}

    def first_chunks(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return []

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """What a piece becomes; None where it has nothing to show."""
        shows_tokens = self._num_top is not None or self._wanted.return_token_ids
        has_tokens = shows_tokens and bool(piece.token_ids)
        if not piece.text and piece.finish_reason is None and not has_tokens:
            return None
        choice = {"index": piece.number, **self._delta(piece.text)}
        choice["logprobs"] = self._logprobs_of(piece.number, len(piece.token_ids))
        choice["finish_reason"] = piece.finish_reason
        if self._wanted.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return self._chunk([choice])

    def usage_chunk(self) -> dict[str, Any] | None:
        """A stream's last chunk, where it was asked for."""
        if not self._wanted.include_usage:
            return None
        return self._chunk([]) | {"usage": usage(self._job)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head | {"object": self.chunked, "choices": choices}
        return chunk | {"usage": None} if self._wanted.include_usage else chunk

    def _logprobs_of(self, number: int, num_tokens: int) -> dict[str, Any] | None:
        """Those of the next ``num_tokens`` tokens of a text."""
        if self._num_top is None:
            return None
        start = self._sent[number]
        self._sent[number] += num_tokens
        entries = self._job.texts[number].logprobs[start : self._sent[number]]
        return self._logprobs[number].add(entries, self._num_top)

    def _content(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str) -> dict[str, Any]:
        raise NotImplementedError


class CompletionAnswer(Answer):
    """/v1/completions."""

    prefix = "cmpl"
    whole = chunked = "text_completion"
    logprobs_form = CompletionLogprobs

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _delta = _content


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunked = "chat.completion.chunk"
    logprobs_form = ChatLogprobs

    def first_chunks(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(len(self._job.texts))
        ]

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


def usage(job: Job) -> dict[str, Any]:
    """Tokens of all texts; a prompt counts once however many choices it has."""
    completion = sum(len(text.output_ids) for text in job.texts)
    drafted, accepted = draft_counts(job.texts)
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": job.prompt_tokens + completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "drafted": drafted,
        "accepted": accepted,
    }


def draft_counts(texts: Sequence[Request]) -> tuple[int, int]:
    """Drafted and accepted tokens of all ``texts``."""
    return (
        sum(text.stats.drafted for text in texts),
        sum(text.stats.accepted for text in texts),
    )
