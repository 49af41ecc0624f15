"""Requests of OpenAI's interface, checked and turned into prompts and sampling parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.intake import Prompt
from specdec.params import SamplingParams
from specdec.server.body import Fields
from specdec.server.errors import as_api_error, bad_request

MAX_N = 128
# Every text is searched for each of them after each step, in everybody's time.
MAX_STOPS = 256
DEFAULT_COMPLETION_TOKENS = 16
# Where it is not limited a chat's answer may fill the context; the engine clips it.
NO_LIMIT = 2**31 - 1
_ROLES = ("system", "developer", "user", "assistant")
# Fields that are called the same here and in SamplingParams.
_SAME = (
    *("top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words"),
    *("response_format", "k"),
)
FIELDS = frozenset(
    (*_SAME, "prompt", "messages", "model", "temperature", "max_tokens", "max_completion_tokens")
) | {"logit_bias", "logprobs", "top_logprobs", "stream_options"}
_NO_TOOLS = "; this server calls no tools"
_CHAT_UNSUPPORTED = {
    "tools": _NO_TOOLS,
    "tool_choice": _NO_TOOLS,
    "parallel_tool_calls": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "function_call": _NO_TOOLS,
    **dict.fromkeys(
        ("audio", "modalities", "prediction", "reasoning_effort", "web_search_options"), ""
    ),
    **dict.fromkeys(("store", "metadata", "service_tier", "verbosity"), ""),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest:
    """What /v1/completions or /v1/chat/completions is asked for.

    ``prompts`` or ``messages``, by the interface. ``has_limit``: the answer's length is limited by
    more than the context.
    """

    model: str | None
    params: SamplingParams
    prompts: list[Prompt] | None = None
    messages: list[dict[str, str]] | None = None
    has_limit: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool


def parse_completion(values: Mapping[str, Any]) -> TextRequest:
    """Raises ApiError (400) naming the field that is wrong."""
    fields = Fields(values)
    prompts = _prompts(fields.take("prompt"))
    if fields.flag("echo"):
        raise bad_request("echo is not supported", "echo")
    if fields.take("best_of", n := fields.take("n", 1)) != n:
        raise bad_request("best_of is not supported (use n)", "best_of")
    limit = fields.take("max_tokens")
    logprobs = fields.take("logprobs")
    params = {
        "max_new_tokens": DEFAULT_COMPLETION_TOKENS if limit is None else limit,
        "logprobs": logprobs,
        "n": n,
    }
    request = _common(fields, params, {"max_new_tokens": "max_tokens"})
    fields.finish({"suffix": ""})
    return TextRequest(**request, prompts=prompts, has_limit=True)


def parse_chat(values: Mapping[str, Any]) -> TextRequest:
    """Raises ApiError (400) naming the field that is wrong."""
    fields = Fields(values)
    messages = _messages(fields.take("messages"))
    limits = {name: fields.take(name) for name in ("max_tokens", "max_completion_tokens")}
    given = {name: value for name, value in limits.items() if value is not None}
    if len(given) == 2:
        raise bad_request("max_completion_tokens and max_tokens are the same; give one of them")
    name = next(iter(given), "max_completion_tokens")
    wants_logprobs = fields.flag("logprobs")
    top = fields.take("top_logprobs")
    if top is not None and not wants_logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    params = {"max_new_tokens": given.get(name, NO_LIMIT)}
    if wants_logprobs:
        params["logprobs"] = 0 if top is None else top
    request = _common(fields, params, {"max_new_tokens": name, "logprobs": "top_logprobs"})
    fields.finish(_CHAT_UNSUPPORTED)
    return TextRequest(**request, messages=messages, has_limit=bool(given))


def _common(fields: Fields, params: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """What both interfaces have. ``names``: what the client calls some of the parameters."""
    model = fields.string("model", None)
    # A label for the caller's own use; it plays no part here.
    fields.string("user", None)
    stream = fields.flag("stream")
    include_usage = _include_usage(fields.take("stream_options"), stream)
    return_token_ids = fields.flag("return_token_ids")
    params |= {name: value for name in _SAME if (value := fields.take(name)) is not None}
    params["temperature"] = fields.take("temperature", 1.0)
    params["logit_bias"] = _logit_bias(fields.take("logit_bias"))
    _check_sizes(params, names)
    _check_format(params.get("response_format"))
    return {
        "model": model,
        "params": _sampling(params, names),
        "stream": stream,
        "include_usage": include_usage,
        "return_token_ids": return_token_ids,
    }


def _sampling(params: dict[str, Any], names: Mapping[str, str]) -> SamplingParams:
    try:
        return SamplingParams(**params)
    except (ValueError, TypeError, OverflowError) as error:
        message = str(error)
        for ours, theirs in names.items():
            message = message.replace(ours, theirs)
        raise as_api_error(type(error)(message), FIELDS) or error from error


def _check_sizes(params: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Refuse numbers that no tensor holds (JSON has no largest), and too many stop strings."""
    stop = params.get("stop")
    if isinstance(stop, list) and len(stop) > MAX_STOPS:
        raise bad_request(f"stop may hold at most {MAX_STOPS} strings, got {len(stop)}", "stop")
    for name, value in params.items():
        most = 2**64 - 1 if name == "seed" else NO_LIMIT
        if name == "n":
            most = MAX_N
        shown = names.get(name, name)
        if isinstance(value, int) and value > most:
            raise bad_request(f"{shown} must be at most {most}, got {_short(value)}", shown)
        if isinstance(value, int) and value < -most:
            raise bad_request(f"{shown} must be at least {-most}, got {_short(value)}", shown)


def _short(value: int) -> str:
    return str(value) if abs(value) < 10**30 else f"a number of {value.bit_length()} bits"


def _check_format(response_format: object) -> None:
    if response_format is None:
        return
    if not isinstance(response_format, dict) or not isinstance(response_format.get("type"), str):
        raise bad_request("response_format must be an object with a type", "response_format")
    schema = response_format.get("json_schema")
    if response_format["type"] == "json_schema" and not (
        isinstance(schema, dict) and isinstance(schema.get("schema"), dict | bool)
    ):
        raise bad_request(
            'response_format: type "json_schema" needs {"json_schema": {"schema": {...}}}',
            "response_format",
        )


def _logit_bias(value: object) -> dict[int, Any] | None:
    """JSON's keys are strings."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise bad_request(f"logit_bias must map token ids to numbers, got {value!r}", "logit_bias")
    biases = {}
    for key, bias in value.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise bad_request(f"logit_bias: {key!r} is no token id", "logit_bias")
        biases[int(key)] = bias
    return biases


def _include_usage(options: object, stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise bad_request(f"stream_options must be an object, got {options!r}", "stream_options")
    if not stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    fields = Fields(options)
    include = fields.flag("include_usage")
    fields.finish()
    return include


def _prompts(value: object) -> list[Prompt]:
    """One prompt or many; a list of integers is one."""
    if value is None:
        raise bad_request("prompt is required", "prompt")
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if not value:
            raise bad_request("prompt is empty; at least one token is needed", "prompt")
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) for item in value):
            for item in value:
                _check_ids(item)
            return value
        _check_ids(value)
        return [value]
    raise bad_request("prompt must be a string, token ids, or a list of either", "prompt")


def _check_ids(ids: list[object]) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise bad_request(f"prompt must hold strings or token ids, got {token!r}", "prompt")


def _messages(value: object) -> list[dict[str, str]]:
    if value is None:
        raise bad_request("messages is required", "messages")
    if not isinstance(value, list) or not value:
        raise bad_request("messages must be a list of at least one message", "messages")
    return [_message(f"messages[{number}]", each) for number, each in enumerate(value)]


def _message(at: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise bad_request(f"{at} must be an object, got {value!r}", "messages")
    role, content = value.get("role"), value.get("content")
    if role not in _ROLES:
        known = ", ".join(_ROLES)
        raise bad_request(f"{at}.role must be one of {known}, got {role!r}", "messages")
    given = {name for name, each in value.items() if each is not None}
    unknown = sorted(given - {"role", "content", "name"})
    if unknown:
        raise bad_request(f"{at}: {', '.join(unknown)} not supported", "messages")
    message = {"role": role, "content": _content(at, content)}
    name = value.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise bad_request(f"{at}.name must be a string, got {name!r}", "messages")
        message["name"] = name
    return message


def _content(at: str, content: object) -> str:
    """A string, or parts of text, which are joined by line ends."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{at}.content must be a string or parts, got {content!r}", "messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise bad_request(f"{at}.content: parts of type {kind!r} not supported", "messages")
        if not isinstance(part.get("text"), str):
            raise bad_request(f"{at}.content: a part's text must be a string", "messages")
        texts.append(part["text"])
    return "\n".join(texts)
