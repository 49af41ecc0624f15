"""Log-probabilities in the two forms of OpenAI's interface."""

from collections.abc import Sequence
from typing import Any

from specdec.detokenize import REPLACEMENT, Detokenizer
from specdec.outputs import TokenLogprob
from specdec.tokenizer import Tokenizer

# What OpenAI shows for a probability of zero: JSON has no infinity.
LEAST = -9999.0


class TokenTexts:
    """Each token's own text.

    A token that holds a part of a character has none: it goes by the vocabulary's string for it.
    Without a tokenizer a token goes by "token_id:" and its id.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def __getitem__(self, token_id: int) -> tuple[str, list[int] | None]:
        """The text, and its bytes where it is whole characters."""
        if token_id not in self._known:
            self._known[token_id] = self._find(token_id)
        return self._known[token_id]

    def _find(self, token_id: int) -> tuple[str, list[int] | None]:
        if self.tokenizer is None:
            return f"token_id:{token_id}", None
        strings = self.tokenizer.strings
        string = strings[token_id] if token_id < len(strings) else None
        if string is None:
            return f"token_id:{token_id}", None
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        if REPLACEMENT in text:
            return string, None
        return text, list(text.encode())


class CompletionLogprobs:
    """The form of /v1/completions, of one text that may come in parts."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._detokenizer = Detokenizer(texts.tokenizer)

    def add(self, entries: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
        """The next tokens; ``text_offset``: how many characters were certain before each."""
        offsets = []
        for entry in entries:
            offsets.append(len(self._detokenizer.text))
            self._detokenizer.push([entry.token_id])
        return {
            "tokens": [self._texts[entry.token_id][0] for entry in entries],
            "token_logprobs": [max(entry.logprob, LEAST) for entry in entries],
            "top_logprobs": [
                {self._texts[token][0]: max(value, LEAST) for token, value in entry.top.items()}
                for entry in entries
            ]
            if num_top
            else None,
            "text_offset": offsets,
        }


class ChatLogprobs:
    """The form of /v1/chat/completions."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def add(self, entries: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
        content = []
        for entry in entries:
            # The sampled token comes last where it is none of the likeliest.
            likeliest = list(entry.top.items())[:num_top]
            content.append(
                self._one(entry.token_id, entry.logprob)
                | {"top_logprobs": [self._one(token, value) for token, value in likeliest]}
            )
        return {"content": content, "refusal": None}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, encoded = self._texts[token_id]
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": encoded}
