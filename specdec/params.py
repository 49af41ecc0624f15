"""What a user may ask of one request."""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The likeliest tokens of a position that a request may ask for, as in OpenAI's interface.
MAX_LOGPROBS = 20
MAX_CHOICES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request. A bad value raises ValueError or TypeError naming it.

    Attributes:
        max_new_tokens: tokens to generate at most, at least 1; clipped to the context.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 or None is off.
        top_p: keep the likeliest tokens whose mass reaches top_p, in (0, 1].
        min_p: keep tokens at least min_p times as likely as the likeliest, in [0, 1].
        seed: 0 <= seed < 2**64. Same seed, same text: with or without a drafter, for any k.
        stop: strings that end the text right before their first match.
        stop_token_ids: tokens that end the text; they act even with ``ignore_eos``.
        ignore_eos: run on past the model's end-of-sequence tokens.
        min_tokens: no end of sequence and no stop token before this many tokens.
        n: number of texts; choice i draws with key (seed, i).
        presence_penalty, frequency_penalty: subtracted once, and once per occurrence in the output.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen, > 0.
        logit_bias: added to the logits of these token ids.
        bad_words: strings or token-id sequences that are never completed.
        logprobs: per token, its log-probability and those of this many likeliest tokens.
        response_format: the text follows a format: {"type": "json_object"}, or "json_schema",
            "regex", "grammar" (EBNF) or "choice" with the schema, pattern, grammar or list of
            strings under the type's name.
        priority: requests of a lower number are admitted first and preempted last.
        k: drafts per step for this request, between 0 and the engine's k; None takes the engine's.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    logprobs: int | None = None
    response_format: Mapping[str, Any] | None = None
    priority: int = 0
    k: int | str | None = None

    def __post_init__(self) -> None:
        _check_int("max_new_tokens", self.max_new_tokens, 1)
        _check_float("temperature", self.temperature, low=0.0)
        if self.top_k is not None:
            _check_int("top_k", self.top_k, 0)
        _check_float("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)
        _check_bool("ignore_eos", self.ignore_eos)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) is above max_new_tokens ({self.max_new_tokens})"
            )
        _check_int("n", self.n, 1, MAX_CHOICES)
        _check_float("presence_penalty", self.presence_penalty)
        _check_float("frequency_penalty", self.frequency_penalty)
        _check_float("repetition_penalty", self.repetition_penalty, low=0.0, open_low=True)
        _check_int("priority", self.priority, -(2**31), 2**31)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.k is not None and self.k != "auto":
            _check_int("k", self.k, 0)
        self._check_stop()
        self._check_token_lists()

    def _check_stop(self) -> None:
        for word in self.stop_strings:
            if not isinstance(word, str):
                raise TypeError(f"stop must be a string or strings, got {word!r}")
            if not word:
                raise ValueError("stop must not hold an empty string")

    def _check_token_lists(self) -> None:
        for token in _sequence("stop_token_ids", self.stop_token_ids):
            _check_int("stop_token_ids", token, 0)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(
                    f"logit_bias must map token ids to numbers, got {self.logit_bias!r}"
                )
            for token, bias in self.logit_bias.items():
                _check_int("logit_bias", token, 0)
                _check_float("logit_bias", bias)
        for word in _sequence("bad_words", self.bad_words):
            if not word:
                raise ValueError("bad_words must not hold an empty word")
            if not isinstance(word, str):
                for token in _sequence("bad_words", word):
                    _check_int("bad_words", token, 0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(_sequence("stop", self.stop))


def params_of(
    prompts: Sequence[object], params: "SamplingParams | Sequence[SamplingParams] | None"
) -> list[SamplingParams]:
    """One for each prompt. Raises TypeError or ValueError where they do not match."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if not isinstance(params, Sequence):
        raise TypeError(f"params must be SamplingParams or a list of them, got {params!r}")
    if len(params) != len(prompts):
        raise ValueError(f"params: {len(params)} given for {len(prompts)} prompts")
    return list(params)


def _sequence(name: str, value: object) -> Sequence:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list, got {value!r}")
    return value


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if number < low or (high is not None and number > high):
        limit = f"between {low} and {high}" if high is not None else f"at least {low}"
        raise ValueError(f"{name} must be {limit}, got {value}")


def _check_float(
    name: str,
    value: object,
    *,
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value!r}")
    too_low = low is not None and (number <= low if open_low else number < low)
    if too_low or (high is not None and number > high):
        bounds = f"{'above' if open_low else 'at least'} {low}" if low is not None else ""
        bounds += f"{' and ' if bounds else ''}at most {high}" if high is not None else ""
        raise ValueError(f"{name} must be {bounds}, got {value!r}")
