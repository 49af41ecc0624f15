"""/v1/completions and /v1/chat/completions."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec.intake import Prompt
from specdec.params import SamplingParams
from specdec.server.answers import Answer, ChatAnswer, CompletionAnswer
from specdec.server.body import read_object
from specdec.server.errors import (
    CLIENT_GONE,
    ApiError,
    ModelNotFoundError,
    as_api_error,
    ended_in_error,
)
from specdec.server.front import Job, Piece, ServingEngine
from specdec.server.logprobs import TokenTexts
from specdec.server.metrics import JobTimer, Metrics
from specdec.server.openai_types import FIELDS, TextRequest, parse_chat, parse_completion
from specdec.server.settings import ServerSettings
from specdec.server.sse import DONE, ClientGoneError, EventStream, event, while_connected

_log = logging.getLogger(__name__)


class TextService:
    """Turns requests for texts into jobs of the engine, and jobs into answers."""

    def __init__(self, front: ServingEngine, settings: ServerSettings, metrics: Metrics) -> None:
        self._front = front
        self._settings = settings
        self._metrics = metrics
        self._tokenizer = front.engine.tokenizer
        self._texts = TokenTexts(self._tokenizer)

    async def completions(self, request: Request) -> Response:
        return await self._serve(request, parse_completion, CompletionAnswer)

    async def chat_completions(self, request: Request) -> Response:
        return await self._serve(request, parse_chat, ChatAnswer)

    async def _serve(
        self,
        request: Request,
        parse: Callable[[Mapping[str, Any]], TextRequest],
        answer_class: type[Answer],
    ) -> Response:
        arrived = time.perf_counter()
        settings = self._settings
        values = await read_object(request, max_bytes=settings.max_body, timeout=settings.timeout)
        deadline = asyncio.get_running_loop().time() + settings.timeout
        wanted = parse(values)

        async def answer() -> Response:
            async with asyncio.timeout_at(deadline):
                lora = self._adapter(wanted.model)
                job = await self._start(wanted, lora)
            texts = _Texts(self, wanted, answer_class, job, lora, arrived)
            return texts.stream(deadline) if wanted.stream else await texts.whole(deadline)

        try:
            return await while_connected(request.receive, answer())
        except ClientGoneError:
            self._metrics.aborted.labels("disconnect").inc()
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            raise self._told(error) from error

    def _adapter(self, model: str | None) -> str | None:
        if model is None or model == self._settings.model_name:
            return None
        if model not in self._front.engine.loras:
            raise ModelNotFoundError(model)
        return model

    async def _start(self, wanted: TextRequest, lora: str | None) -> Job:
        prompts: list[Prompt]
        if wanted.messages is not None:
            prompts = [await asyncio.to_thread(self._chat_ids, wanted.messages)]
        else:
            assert wanted.prompts is not None
            # Before any is encoded: a body has room for a million.
            self._front.count_texts(wanted.prompts, wanted.params)
            prompts = [await self._ids(prompt) for prompt in wanted.prompts]
        params = wanted.params
        if not wanted.has_limit:
            params = replace(params, max_new_tokens=self._room(len(prompts[0]), params))
        return await self._front.start(prompts, params, lora, streamed=wanted.stream)

    async def _ids(self, prompt: Prompt) -> Prompt:
        # In the engine's thread a long text would hold up everybody's next step.
        if isinstance(prompt, str) and self._tokenizer is not None:
            return await asyncio.to_thread(self._tokenizer.encode, prompt)
        return prompt

    def _chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        if self._tokenizer is None or not self._tokenizer.is_chat:
            raise ValueError("messages: this model has no chat template; use /v1/completions")
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _room(self, prompt_len: int, params: SamplingParams) -> int:
        """The tokens that fit after a prompt into the context and into the whole pool."""
        engine = self._front.engine
        # The last token of a text needs no position.
        fits = min(engine.max_model_len, engine.stats().total_kv_blocks * engine.block_size + 1)
        return max(1, fits - prompt_len, params.min_tokens)

    def _told(self, error: Exception) -> Exception:
        """What the client is told of an error, or the error itself where it is a fault of ours."""
        if isinstance(error, TimeoutError):
            self._metrics.aborted.labels("timeout").inc()
        return as_api_error(error, FIELDS) or error


class _Texts:
    """The texts of one request on their way to its client."""

    def __init__(
        self,
        service: TextService,
        wanted: TextRequest,
        answer_class: type[Answer],
        job: Job,
        lora: str | None,
        arrived: float,
    ) -> None:
        self._service = service
        self._job = job
        model = lora if lora is not None else service._settings.model_name
        self._answer = answer_class(wanted, model, job, service._texts)
        self._timer = JobTimer(service._metrics, job, lora, arrived)
        self._has_ended = False

    async def whole(self, deadline: float) -> Response:
        try:
            async with asyncio.timeout_at(deadline):
                async for _ in self._pieces():
                    pass
            return JSONResponse(self._answer.body())
        finally:
            self._job.close()

    def stream(self, deadline: float) -> Response:
        return EventStream(
            self._lines(), on_error=self._last_event, close=self._close, deadline=deadline
        )

    async def _lines(self) -> AsyncIterator[bytes]:
        answer = self._answer
        for chunk in answer.first_chunks():
            yield event(chunk)
        async for pieces in self._pieces():
            chunks = [answer.chunk(piece) for piece in pieces]
            lines = [event(chunk) for chunk in chunks if chunk is not None]
            if lines:
                yield b"".join(lines)
        last = answer.usage_chunk()
        yield DONE if last is None else event(last) + DONE
        self._has_ended = True

    async def _pieces(self) -> AsyncIterator[list[Piece]]:
        async for pieces in self._job.pieces():
            for piece in pieces:
                self._timer.note(piece)
                if piece.finish_reason == "abort":
                    raise ApiError(503, "the server is shutting down", code="shutting_down")
                if piece.finish_reason == "error":
                    raise ended_in_error(piece.error)
            yield pieces

    def _last_event(self, error: Exception) -> bytes:
        """A stream's status has been sent, so its end is an event, as OpenAI's client expects."""
        self._has_ended = True
        told = self._service._told(error)
        if not isinstance(told, ApiError):
            _log.error("a stream failed", exc_info=error)
            told = ApiError(500, "internal server error")
        return event(told.body)

    def _close(self) -> None:
        if not self._has_ended:
            self._service._metrics.aborted.labels("disconnect").inc()
        self._job.close()
