"""Chat templates: Jinja sources that a model brings, rendered in a sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """A compiled template. Raises ValueError naming ``source`` where it is not valid Jinja."""

    def __init__(self, text: str, *, special_tokens: Mapping[str, str], source: str) -> None:
        """``special_tokens``: the variables ``bos_token``, ``eos_token`` and so on."""
        self.text = text
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(text)
        except jinja2.TemplateError as error:
            raise ValueError(f"{source}: the chat template is not valid: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt for ``messages``, each with a ``role`` and a ``content``.

        Raises ValueError with the template's own words where it refuses them.
        """
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error


class _GenerationTag(Extension):
    """``{% generation %}``: marks what the model wrote, for training; renders its body here."""

    tags = {"generation"}  # noqa: RUF012 - read by Jinja on the class

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> jinja2.Environment:
    """What templates are written against, in transformers and elsewhere."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
