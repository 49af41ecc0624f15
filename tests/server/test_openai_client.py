"""The server through the real ``openai`` client, against an engine without drafter and server."""

import json

import openai
import pytest

from specdec.server.openai_types import MAX_N


def test_a_completion_is_the_engine_s_text(server, expected) -> None:
    out = server.openai.completions.create(
        model="tiny", prompt="hello", max_tokens=20, temperature=0
    )
    wanted = expected("hello", 20)
    (choice,) = out.choices
    assert (choice.text, choice.finish_reason) == (wanted.text, wanted.finish_reason)
    assert out.object == "text_completion" and out.model == "tiny"
    usage = out.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, len(wanted.token_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.completion_tokens_details
    assert usage.drafted == (
        details.accepted_prediction_tokens + details.rejected_prediction_tokens
    )
    assert 0 < usage.accepted == details.accepted_prediction_tokens < usage.drafted


@pytest.mark.parametrize("prompt", ["né 😀 漢字", "abc abc abc", [5, 17, 99, 3]])
@pytest.mark.parametrize("stop", [None, ["a"], ["zz", "e"]])
def test_a_stream_joins_to_the_plain_text(server, expected, prompt, stop) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0}
    if stop:
        body["stop"] = stop
    plain = server.openai.completions.create(**body)
    options = {"include_usage": True}
    chunks = list(server.openai.completions.create(**body, stream=True, stream_options=options))
    *parts, last = chunks
    assert "".join(part.choices[0].text for part in parts) == plain.choices[0].text
    assert plain.choices[0].text == expected(prompt, 40, stop=stop).text
    reasons = [part.choices[0].finish_reason for part in parts]
    assert reasons[-1] == plain.choices[0].finish_reason and not any(reasons[:-1])
    assert last.choices == [] and last.usage == plain.usage
    assert all(part.usage is None for part in parts) and len({chunk.id for chunk in chunks}) == 1


def test_prompts_and_choices_come_in_order(server, expected) -> None:
    prompts = ["one", "three", "five"]
    params = {"temperature": 0.9, "seed": 7, "n": 2}
    out = server.openai.completions.create(model="tiny", prompt=prompts, max_tokens=8, **params)
    wanted = [c.text for prompt in prompts for c in expected(prompt, 8, **params).choices]
    assert [choice.text for choice in out.choices] == wanted
    assert [choice.index for choice in out.choices] == list(range(6))
    assert out.usage.prompt_tokens == sum(map(len, prompts)) and len(set(wanted)) == 6

    texts = [""] * 6
    for chunk in server.openai.completions.create(
        model="tiny", prompt=prompts, max_tokens=8, stream=True, **params
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == wanted


def test_a_seed_repeats_and_no_seed_does_not(server) -> None:
    def text(**extra):
        out = server.openai.completions.create(
            model="tiny", prompt="go", max_tokens=24, temperature=1, **extra
        )
        return out.choices[0].text

    assert text(seed=3) == text(seed=3) != text(seed=4)
    assert text() != text()


def test_further_parameters_reach_the_engine(server, expected) -> None:
    params = {
        "seed": 5,
        "temperature": 0.8,
        "top_p": 0.9,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {97: 2.0, 98: -1.0},
    }
    extra = {
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "min_tokens": 9,
        "ignore_eos": True,
        "stop_token_ids": [101, 102],
        "bad_words": [[100]],
        "k": 2,
        "return_token_ids": True,
    }
    engine_only = {name: value for name, value in extra.items() if name != "return_token_ids"}
    wanted = expected("x", 20, **params, **engine_only)
    plain = expected("x", 20, seed=5, temperature=0.8)
    body = params | {"logit_bias": {"97": 2.0, "98": -1.0}}
    out = server.openai.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=20,
        **body,
        extra_body=extra,
    )
    assert out.choices[0].token_ids == wanted.token_ids != plain.token_ids


def test_completion_logprobs(server, expected) -> None:
    wanted = expected("hello", 10, logprobs=3)
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 10, "temperature": 0, "logprobs": 3}
    out = server.openai.completions.create(**body).choices[0]
    logprobs = out.logprobs
    assert logprobs.token_logprobs == pytest.approx([e.logprob for e in wanted.logprobs], abs=1e-4)
    assert all(3 <= len(top) <= 4 for top in logprobs.top_logprobs)
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == value
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if token.isascii():
            # Where broken characters stand before it, the text up to them is not certain yet.
            assert token in out.text[offset : offset + len(token) + 3]
    chunks = [c.choices[0].logprobs for c in server.openai.completions.create(**body, stream=True)]
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [value for chunk in chunks for value in getattr(chunk, name)]
        assert joined == pytest.approx(getattr(logprobs, name), abs=1e-4)


def test_chat_applies_the_template(server, expected) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 16}
    wanted = expected("system: be brief\nuser: hi\nassistant:", 16, logprobs=2)
    out = server.openai.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    (choice,) = out.choices
    assert choice.message.content == wanted.text and choice.message.role == "assistant"
    assert out.usage.completion_tokens == len(choice.logprobs.content) == len(wanted.token_ids)
    for got, entry in zip(choice.logprobs.content, wanted.logprobs, strict=True):
        assert got.logprob == pytest.approx(entry.logprob, abs=1e-4)
        assert [top.logprob for top in got.top_logprobs] == pytest.approx(
            list(entry.top.values())[:2], abs=1e-4
        )
        assert got.bytes is None or bytes(got.bytes).decode() == got.token

    chunks = list(server.openai.chat.completions.create(**body, stream=True, logprobs=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == wanted.text
    tokens = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [t.token for t in tokens] == [t.token for t in choice.logprobs.content]


def test_a_chat_without_a_limit_may_fill_the_context(server) -> None:
    out = server.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert out.choices[0].finish_reason == "length"
    assert out.usage.total_tokens == server.engine.max_model_len


def test_structured_output(server) -> None:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}, "kind": {"enum": ["x", "yy"]}},
        "required": ["yes", "kind"],
        "additionalProperties": False,
    }
    out = server.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        seed=1,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        },
    )
    value = json.loads(out.choices[0].message.content)
    assert set(value) == {"yes", "kind"} and value["kind"] in ("x", "yy")


def test_adapters_are_models(server, expected) -> None:
    names = [model.id for model in server.openai.models.list()]
    assert names[0] == "tiny" and {"a", "b"} <= set(names)
    assert server.openai.models.retrieve("a").parent == "tiny"
    texts = []
    for name in ("tiny", "a", "b"):
        out = server.openai.completions.create(
            model=name, prompt="hello", max_tokens=16, temperature=0
        )
        lora = None if name == "tiny" else name
        assert out.choices[0].text == expected("hello", 16, lora=lora).text and out.model == name
        texts.append(out.choices[0].text)
    assert len(set(texts)) == 3


def test_an_unknown_model_is_404_and_never_the_base_model(server) -> None:
    for name in ("typo", "", "base", "A"):
        with pytest.raises(openai.NotFoundError) as caught:
            server.openai.completions.create(model=name, prompt="hello", max_tokens=4)
        assert caught.value.code == "model_not_found" and caught.value.param == "model"
        assert repr(name) in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("typo")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("top_p", 0),
        ("n", MAX_N + 1),
        ("max_tokens", 0),
        ("seed", -1),
        ("stop", ["ok", ""]),
        ("logprobs", 21),
        ("frequency_penalty", "high"),
        ("logit_bias", {"300": 1}),
        ("prompt", ""),
        ("prompt", [1, 300]),
        ("echo", True),
        ("suffix", "end"),
        ("best_of", 3),
    ],
)
def test_a_bad_value_is_400_naming_the_field(server, field, value) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4} | {field: value}
    with pytest.raises(openai.BadRequestError, match=field) as caught:
        server.openai.completions.create(**body)
    assert caught.value.param == field and caught.value.type == "invalid_request_error"


def test_tools_are_refused_by_name(server) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        server.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], tools=[tool]
        )
