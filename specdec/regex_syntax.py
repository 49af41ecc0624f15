"""Regular expressions as xgrammar reads them: what it would pass over is refused by name.

Inside JSON a pattern becomes one of characters that stand there unescaped, so that every text it
allows is valid JSON and, once parsed, what the pattern matches.
"""

import re
from collections.abc import Iterable

LAST = 0x10FFFF
# Characters that a JSON string holds as they are: no control, no quote, no backslash; and no
# surrogates, which are no text.
JSON_CHARACTERS = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, LAST))
# Characters that a pattern may stand for once its repeats are written out. In JSON its automaton
# grows faster than that.
MAX_EXPANDED = 100_000
MAX_JSON_EXPANDED = 1000

Ranges = list[tuple[int, int]]

_DIGIT: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: Ranges = [
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
]
# Space in some languages only.
_MORE_SPACE: Ranges = [(0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]
_ASCII: Ranges = [(0, 0x7F)]
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0x00}


def check_regex(pattern: str) -> None:
    """Raise ValueError naming what of ``pattern`` is not supported."""
    _Reader(pattern, [(0, LAST)]).read(MAX_EXPANDED)


def json_pattern(pattern: str) -> tuple[str, int]:
    """``pattern`` over ``JSON_CHARACTERS``, and its size once its repeats are written out.

    All of a text must match it. What is a digit or a letter outside ASCII differs between
    languages, so classes of all but those hold no such character. Raises ValueError naming what
    is not supported, or a part that no character of JSON fits without an escape.
    """
    return _Reader(pattern, JSON_CHARACTERS).read(MAX_JSON_EXPANDED)


def json_characters(low: int, high: int | None) -> str:
    """A pattern of ``low`` to ``high`` characters."""
    return f"{_class(JSON_CHARACTERS)}{{{low},{'' if high is None else high}}}"


class _Reader:
    def __init__(self, pattern: str, alphabet: Iterable[tuple[int, int]]) -> None:
        self._text = pattern
        self._at = 0
        self._alphabet = list(alphabet)

    def read(self, most: int) -> tuple[str, int]:
        translated, size = self._alternatives(0)
        if self._at < len(self._text):
            raise self._wrong("')' closes nothing")
        if size > most:
            raise ValueError(
                f"the pattern {self._shown} stands for {size} characters once its repeats are "
                f"written out; {most} are supported"
            )
        return translated, size

    def _alternatives(self, depth: int) -> tuple[str, int]:
        if depth > 50:
            raise self._wrong("groups are nested too deeply")
        parts, total = [], 0
        while True:
            part, size = self._sequence(depth)
            parts.append(part)
            total += size
            if self._peek() != "|":
                return "|".join(parts), total
            self._at += 1

    def _sequence(self, depth: int) -> tuple[str, int]:
        parts, total = [], 0
        # All of a text must match, so these anchors are always true, and others never.
        if depth == 0 and self._peek() == "^":
            self._at += 1
        while (char := self._peek()) not in ("", "|", ")"):
            if char == "$" and depth == 0 and self._text[self._at + 1 : self._at + 2] in ("", "|"):
                self._at += 1
                break
            if char in "^$":
                raise self._wrong(f"the anchor {char} stands elsewhere than at an end")
            part, size = self._atom(depth)
            repeat, factor = self._repeat()
            parts.append(part + repeat)
            total += size * factor
        return "".join(parts), total

    def _atom(self, depth: int) -> tuple[str, int]:
        char = self._next()
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._emit(self._members()), 1
        if char == ".":
            return self._emit(_complement([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])), 1
        if char in "*+?{":
            raise self._wrong(f"{char} repeats nothing")
        ranges = self._escape() if char == "\\" else [(ord(char), ord(char))]
        return self._emit(ranges), 1

    def _group(self, depth: int) -> tuple[str, int]:
        if self._peek() == "?":
            start = self._at - 1
            self._at += 1
            kind = self._next()
            if kind == "<" and self._peek() not in ("=", "!"):
                while self._next() != ">":
                    pass
            elif kind != ":":
                what = self._text[start : self._at + 1]
                raise self._wrong(f"{what!r} (a look-around, flag or the like)")
        inner, size = self._alternatives(depth + 1)
        if self._next() != ")":
            raise self._wrong("a group is not closed")
        return f"(?:{inner})", size

    def _repeat(self) -> tuple[str, int]:
        char, factor = self._peek(), 1
        if char not in ("*", "+", "?", "{"):
            return "", 1
        self._at += 1
        if char == "{":
            end = self._text.find("}", self._at)
            low, comma, high = self._text[self._at : max(end, self._at)].partition(",")
            if not low.isdecimal() or (high and not high.isdecimal()) or len(low + high) > 12:
                raise self._wrong("a repeat must be {n}, {n,} or {n,m}")
            if high and int(high) < int(low):
                raise self._wrong(f"the repeat {{{low},{high}}} is empty")
            self._at = end + 1
            char, factor = f"{{{low}{comma}{high}}}", max(int(high or low), 1)
        if self._peek() == "?":
            # Lazy or not, the same texts match as a whole.
            self._at += 1
        if self._peek() and self._peek() in "*+?{":
            raise self._wrong("a repeat follows a repeat")
        return char, factor

    def _members(self) -> Ranges:
        start, negated = self._at, self._peek() == "^"
        self._at += negated
        ranges: Ranges = []
        while self._peek() != "]":
            first = self._member()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._member()
                if len(first) > 1 or len(last) > 1 or first[0][0] != first[0][1]:
                    raise self._wrong("a range lies between two characters")
                if last[0][1] < first[0][0]:
                    raise self._wrong("a range is empty")
                first = [(first[0][0], last[0][1])]
            ranges += first
        self._at += 1
        if not negated:
            return ranges
        others = _complement(ranges)
        names_kind = re.search(r"\\[dwDW]", self._text[start : self._at]) is not None
        return _intersect(others, _ASCII) if names_kind else others

    def _member(self) -> Ranges:
        char = self._next()
        if char == "\\" and self._peek() == "b":
            self._at += 1
            return [(0x08, 0x08)]
        return self._escape() if char == "\\" else [(ord(char), ord(char))]

    def _escape(self) -> Ranges:
        char = self._next()
        kind = {"d": _DIGIT, "w": _WORD, "s": _SPACE}.get(char.lower())
        if kind is not None:
            if char in "DW":
                return _intersect(_complement(kind), _ASCII)
            return _complement([*kind, *_MORE_SPACE]) if char == "S" else list(kind)
        code = _CONTROLS.get(char)
        if char in ("x", "u"):
            width = 2 if char == "x" else 4
            digits = self._text[self._at : self._at + width]
            if len(digits) < width or not all(
                digit in "0123456789abcdefABCDEF" for digit in digits
            ):
                raise self._wrong(f"\\{char} needs {width} hexadecimal digits")
            self._at += width
            code = int(digits, 16)
        elif code is None and char.isascii() and char.isalnum():
            raise self._wrong(f"\\{char}")
        code = ord(char) if code is None else code
        return [(code, code)]

    def _emit(self, ranges: Ranges) -> str:
        kept = _intersect(ranges, self._alphabet)
        if not kept:
            raise self._wrong("no character that JSON holds without an escape fits")
        return _class(kept)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise self._wrong("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    @property
    def _shown(self) -> str:
        return repr(self._text if len(self._text) <= 60 else self._text[:60] + "...")

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"the pattern {self._shown} is not supported at {self._at}: {what}")


def _complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    result, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            result.append((start, low - 1))
        start = max(start, high + 1)
    return [*result, (start, LAST)] if start <= LAST else result


def _intersect(first: Iterable[tuple[int, int]], second: Iterable[tuple[int, int]]) -> Ranges:
    pairs = [(max(a, c), min(b, d)) for a, b in first for c, d in second]
    return sorted({(low, high) for low, high in pairs if low <= high})


def _class(ranges: Iterable[tuple[int, int]]) -> str:
    inside = "".join(
        _spelled(low) if low == high else f"{_spelled(low)}-{_spelled(high)}"
        for low, high in ranges
    )
    return f"[{inside}]"


def _spelled(code: int) -> str:
    return ("\\" if chr(code) in "\\[]^-" else "") + chr(code)
