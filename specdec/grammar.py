"""Structured output: texts that follow a JSON schema, a regular expression or a grammar.

xgrammar compiles the format and tells which tokens may follow; the verify rows of a step get one
mask each, for the row's own prefix.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from specdec.json_schema import enforced_schema
from specdec.regex_syntax import check_regex
from specdec.tokenizer import Tokenizer

FORMATS = "json_object, json_schema, regex, grammar, choice or text"
MAX_CHARACTERS = 256 << 10  # of a format, written as JSON
MAX_KEPT = 64  # compiled formats
# Where in xgrammar's source an error arose.
_SOURCE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


class GrammarState:
    """Where one request stands in its format."""

    def __init__(self, compiled: Any, stop_ids: Sequence[int], vocab_size: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_ids))
        self._words = -(-vocab_size // 32)

    def masks(self, draft_ids: Sequence[int], width: int) -> tuple[int, np.ndarray]:
        """How many leading drafts are legal, and what may stand at each verify row.

        Args:
            draft_ids: proposed tokens; a negative one ends the draft.
            width: verify rows of the step.

        Returns:
            The number of legal drafts, and bit masks [width, ceil(V / 32)] int32: row j for the
            text followed by the first j drafts. Rows past the legal drafts allow everything; they
            are never read. The state is as before.
        """
        masks = np.full((width, self._words), -1, dtype=np.int32)
        legal = 0
        for row in range(width):
            self._matcher.fill_next_token_bitmask(masks, row)
            if row == len(draft_ids) or draft_ids[row] < 0:
                break
            if not _allows(masks[row], draft_ids[row]):
                break
            accepted = self._matcher.accept_token(draft_ids[row])
            assert accepted, draft_ids[row]
            legal += 1
            if self._matcher.is_terminated():
                break
        if legal:
            self._matcher.rollback(legal)
        return legal, masks

    def accept(self, token: int) -> bool:
        """The text goes on with ``token``. False where the format has no way on from here."""
        return bool(self._matcher.accept_token(token))

    @property
    def is_stuck(self) -> bool:
        """No token may stand here, not even one that ends the text."""
        return not self.masks([], 1)[1].any()


class GrammarCompiler:
    """Compiles formats for one tokenizer; the last ones are kept. For use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Raises ValueError where xgrammar is not installed."""
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError(
                "response_format needs the extra [grammar]: pip install 'xgrammar>=0.2'"
            ) from error
        self._vocab_size = vocab_size
        info = xgrammar.TokenizerInfo(
            _strings(tokenizer, vocab_size, eos_ids),
            vocab_type=_vocab_type(tokenizer),
            vocab_size=vocab_size,
            stop_token_ids=list(eos_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._eos_ids = tuple(eos_ids)
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, response_format: Mapping[str, Any]) -> GrammarState:
        """The start of a text in this format. Raises ValueError naming what is wrong with it."""
        try:
            return self._state(self._compiled(response_format))
        except (RuntimeError, TypeError, ValueError) as error:
            message = _SOURCE.sub("", str(error)).strip()
            raise ValueError(f"response_format: {message}") from error

    def _state(self, compiled: Any) -> GrammarState:
        return GrammarState(compiled, self._eos_ids, self._vocab_size)

    def _compiled(self, response_format: Mapping[str, Any]) -> Any:
        """Kept, or compiled now, with nobody else waiting for it."""
        key = json.dumps(response_format)
        if len(key) > MAX_CHARACTERS:
            raise ValueError(f"it has {len(key)} characters; {MAX_CHARACTERS} are supported")
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        compiled = self._compile(response_format)
        if self._state(compiled).is_stuck:
            raise ValueError(
                "no text can begin in this format: none of the model's tokens may stand first"
            )
        with self._lock:
            self._kept[key] = compiled
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, response_format: Mapping[str, Any]) -> Any:
        kind = response_format["type"]
        if kind == "json_object":
            return self._compiler.compile_json_schema({"type": "object"}, any_whitespace=False)
        if kind == "json_schema":
            schema = response_format["json_schema"]
            # Free white space lets a weak model write nothing else until its length ends.
            return self._compiler.compile_json_schema(
                enforced_schema(schema.get("schema", schema)), any_whitespace=False
            )
        if kind == "regex":
            check_regex(response_format["regex"])
            return self._compiler.compile_regex(response_format["regex"])
        if kind == "choice":
            words = " | ".join(_quoted(word) for word in response_format["choice"])
            return self._compiler.compile_grammar(f"root ::= {words}")
        return self._compiler.compile_grammar(response_format["grammar"])


def check_format(response_format: object) -> Mapping[str, Any] | None:
    """The format, or None for plain text. Raises TypeError or ValueError naming the field."""
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping) or "type" not in response_format:
        raise TypeError(f"response_format must be a mapping with a type, got {response_format!r}")
    kind = response_format["type"]
    if not isinstance(kind, str):
        raise TypeError(f"response_format: type must be a string, got {kind!r}")
    wanted: dict[str, type] = {
        "json_schema": Mapping,  # type: ignore[type-abstract]
        "regex": str,
        "grammar": str,
        "choice": Sequence,  # type: ignore[type-abstract]
    }
    if kind == "text":
        return None
    if kind != "json_object" and kind not in wanted:
        raise ValueError(f"response_format: type must be one of {FORMATS}, got {kind!r}")
    if kind in wanted and not isinstance(response_format.get(kind), wanted[kind]):
        raise ValueError(
            f"response_format: type {kind!r} needs {kind!r}, got {response_format.get(kind)!r}"
        )
    if kind == "json_schema":
        schema = response_format["json_schema"].get("schema", response_format["json_schema"])
        if not isinstance(schema, Mapping | bool):
            raise TypeError(f"response_format: schema must be a mapping, got {schema!r}")
    if kind == "choice":
        words = response_format["choice"]
        if (
            isinstance(words, str)
            or not words
            or not all(isinstance(word, str) and word for word in words)
        ):
            raise ValueError("response_format: choice must be a list of strings that are not empty")
    return response_format


def _allows(mask: np.ndarray, token: int) -> bool:
    return token // 32 < len(mask) and bool((int(mask[token // 32]) >> (token % 32)) & 1)


def _quoted(word: str) -> str:
    for plain, escaped in (
        ("\\", "\\\\"),
        ('"', '\\"'),
        ("\n", "\\n"),
        ("\r", "\\r"),
        ("\t", "\\t"),
    ):
        word = word.replace(plain, escaped)
    return f'"{word}"'


def _strings(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> list[str]:
    """The vocabulary; tokens that are no text (special, end of sequence) are empty."""
    special = set(eos_ids)
    for token_id, token in tokenizer.backend.get_added_tokens_decoder().items():
        if token.special:
            special.add(token_id)
    known = tokenizer.strings[:vocab_size]
    return ["" if s is None or i in special else s for i, s in enumerate(known)]


def _vocab_type(tokenizer: Tokenizer) -> Any:
    import xgrammar

    if isinstance(tokenizer.backend.decoder, tokenizers.decoders.ByteLevel):
        return xgrammar.VocabType.BYTE_LEVEL
    if "<0x0A>" in tokenizer.backend.get_vocab():
        return xgrammar.VocabType.BYTE_FALLBACK
    return xgrammar.VocabType.RAW
