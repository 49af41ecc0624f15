"""Token ids to text as they come, without half characters."""

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from tokenizers import decoders

from specdec.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one growing sequence.

    What ``push`` and a last ``flush`` return, joined, is the decode of all ids. A character whose
    bytes have not all come is held back; at the end it shows as U+FFFD, as in the decode. One
    difference: of a run of byte tokens (``<0x0A>``, as SentencePiece models have them) that is no
    UTF-8 as a whole, only the invalid bytes are replaced. The tokenizers library replaces all of
    them, characters that were complete and shown too.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool = True) -> None:
        """Without a tokenizer all text is empty."""
        self._decoder = _decoder_for(tokenizer, skip_special_tokens)
        self.text = ""
        # Characters of ``text`` after each token: the text of the first n ids is
        # text[: text_lengths[n - 1]], as far as it was certain by then.
        self.text_lengths: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; returns the text that became certain."""
        before = len(self.text)
        for token_id in ids:
            self.text += self._decoder.step(token_id)
            self.text_lengths.append(len(self.text))
        return self.text[before:]

    def flush(self) -> str:
        """The end of the text: what was held back. Call once, after the last ``push``."""
        tail = self._decoder.finish()
        self.text += tail
        if self.text_lengths:
            self.text_lengths[-1] = len(self.text)
        return tail


class _Decoder(Protocol):
    def step(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


class _NoText:
    def step(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class _ByteLevelDecoder:
    """For byte-level tokenizers: a token is the same bytes everywhere, so UTF-8 does the rest."""

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes[token_id])

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For any tokenizer: decodes the last few tokens again with each new one.

    ``ids[start:]`` is the window, of whose text ``shown`` characters were returned. A window
    starts with tokens that were shown in full, since decoders treat the first token of a text
    apart (its leading space).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0
        self._boundary = 0  # tokens before it are shown in full
        self._shown = 0

    def follow(self, token_id: int) -> None:
        """Begin as after a token that somebody else shows."""
        self._ids = [token_id]
        self._boundary = 1
        self._shown = len(self._decode(0))

    def step(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._start)
        certain = text.rstrip(REPLACEMENT)
        new = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if certain == text and new:
            shown = len(self._decode(self._boundary))
            if shown:
                self._start, self._shown = self._boundary, shown
            self._boundary = len(self._ids)
        return new

    def finish(self) -> str:
        return self._decode(self._start)[self._shown :]

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(
            self._ids[start:], skip_special_tokens=self._skip_special_tokens
        )


class _ByteFallbackDecoder:
    """For vocabularies of words with a token per byte for what no word spells."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, table: "_ByteTokens"):
        self._tokenizer = tokenizer
        self._bytes = table.values
        self._skipped = table.special_ids if skip_special_tokens else frozenset()
        self._words = _WindowDecoder(tokenizer, skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._begun = False

    def step(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        first, self._begun = not self._begun, True
        value = self._bytes.get(token_id)
        if value is None:
            return self._utf8.decode(b"", final=True) + self._words.step(token_id)
        if first:
            self._words.follow(token_id)
            if value.isascii():
                # The decoder may strip a space that begins the text.
                value = self._tokenizer.decode([token_id]).encode()
        return self._utf8.decode(value)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True) + self._words.finish()


class _ByteLevelTokens(dict[int, bytes]):
    """The bytes of each id of a byte-level vocabulary, filled as ids are met."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        # Of the tokenizer itself only its backend is kept: this table lives as long as it does.
        self._backend = tokenizer.backend
        self._skip_special_tokens = skip_special_tokens

    def __missing__(self, token_id: int) -> bytes:
        text = self._backend.decode([token_id], skip_special_tokens=self._skip_special_tokens)
        value: bytes = text.encode()
        if REPLACEMENT in text:
            # The token holds a part of a character, so it is spelled in byte characters.
            spelled = self._backend.id_to_token(token_id) or ""
            value = bytes(_BYTE_OF[character] for character in spelled)
        self[token_id] = value
        return value


class _ByteTokens:
    """The tokens of a vocabulary that stand for one byte, and those that are not shown."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        matches = ((i, _BYTE_TOKEN.fullmatch(s or "")) for i, s in enumerate(tokenizer.strings))
        self.values = {i: bytes([int(match[1], 16)]) for i, match in matches if match}


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# One table per tokenizer, shared by all texts.
_byte_level_tables: WeakKeyDictionary[Tokenizer, dict[bool, _ByteLevelTokens]] = WeakKeyDictionary()
_byte_token_tables: WeakKeyDictionary[Tokenizer, _ByteTokens] = WeakKeyDictionary()


def _decoder_for(tokenizer: Tokenizer | None, skip_special_tokens: bool) -> _Decoder:
    if tokenizer is None:
        return _NoText()
    kind = tokenizer.backend.decoder
    if isinstance(kind, decoders.ByteLevel):
        tables = _byte_level_tables.setdefault(tokenizer, {})
        if skip_special_tokens not in tables:
            tables[skip_special_tokens] = _ByteLevelTokens(tokenizer, skip_special_tokens)
        return _ByteLevelDecoder(tables[skip_special_tokens])
    if kind is not None and b'"ByteFallback"' in kind.__getstate__():
        if tokenizer not in _byte_token_tables:
            _byte_token_tables[tokenizer] = _ByteTokens(tokenizer)
        return _ByteFallbackDecoder(tokenizer, skip_special_tokens, _byte_token_tables[tokenizer])
    return _WindowDecoder(tokenizer, skip_special_tokens)


def _byte_characters() -> dict[int, str]:
    """The printable character that byte-level BPE spells each byte with."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spelled = {byte: chr(byte) for byte in sorted(printable)}
    others = (byte for byte in range(256) if byte not in printable)
    return spelled | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


_BYTE_OF = {character: byte for byte, character in _byte_characters().items()}
