"""From a prompt and its parameters to requests: all checks are here, before anything runs."""

import itertools
import secrets
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from specdec.adapters import AdapterTable, find_adapter
from specdec.grammar import GrammarCompiler, GrammarState, check_format
from specdec.params import SamplingParams
from specdec.request import Request
from specdec.tokenizer import Tokenizer
from specdec.verifier.processors import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_STOP_IDS

Prompt = str | Sequence[int]
# Parameters that simulated acceptance cannot serve.
TEXT_PROMISES = (
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "logit_bias",
    "logprobs",
    "response_format",
)


class Intake:
    """Checks requests against one engine's limits and gives them ids, keys and ends."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        block_size: int,
        num_kv_blocks: int,
        max_k: int,
        speculates: bool,
        adapts: bool,
        acceptance: str,
        simulates: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        # A config may name ids that this model cannot emit.
        self.eos_token_ids = frozenset(id for id in eos_token_ids if 0 <= id < vocab_size)
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_kv_blocks = num_kv_blocks
        self.max_k = max_k
        self.speculates = speculates
        self.adapts = adapts
        self.acceptance = acceptance
        self.simulates = simulates
        self.adapters: AdapterTable | None = None
        self._arrivals = itertools.count()
        self._grammars: GrammarCompiler | None = None
        self._grammars_lock = threading.Lock()

    def make(
        self, prompt: Prompt, params: SamplingParams, lora: str | None = None
    ) -> list[Request]:
        """One request per choice. Raises ValueError or TypeError naming what is wrong."""
        adapter = find_adapter(self.adapters, lora) if lora is not None else None
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {params!r}")
        prompt_ids = self._prompt_ids(prompt)
        self._check_params(params)
        end = min(len(prompt_ids) + params.max_new_tokens, self.max_model_len)
        needed = -(-(end - 1) // self.block_size)
        if needed > self.num_kv_blocks:
            raise ValueError(
                f"num_kv_blocks: this request may need {needed} blocks of {self.block_size} "
                f"positions and the pool has {self.num_kv_blocks}; lower max_new_tokens"
            )
        arrival = next(self._arrivals)
        seed = int(params.seed) if params.seed is not None else secrets.randbits(64)
        if self.simulates:
            # A run repeats itself, and prompts of one length are not given the same draws.
            seed = zlib.crc32(repr(list(prompt_ids)).encode())
        coupled = self.acceptance == "coupled" or (
            self.acceptance == "auto" and params.seed is not None
        )
        stop_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids |= self.eos_token_ids
        if params.min_tokens and len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"min_tokens: at most {MAX_STOP_IDS} end and stop tokens, got {len(stop_ids)}"
            )
        bad_words = self._bad_words(params)
        start = self._grammar_start(params)
        return [
            Request(
                id=f"req-{arrival}",
                index=index,
                prompt_ids=prompt_ids,
                params=params,
                k=self._request_k(params),
                adapts=self._adapts(params, coupled),
                end=end,
                seed=choice_seed(seed, index),
                coupled=coupled,
                stop_ids=stop_ids,
                bad_words=bad_words,
                grammar=start() if start is not None else None,
                arrival=arrival,
                adapter=adapter,
            )
            for index in range(params.n)
        ]

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "prompt: this model has no tokenizer; pass a list of token ids, not a string"
                )
            ids = self.tokenizer.encode(_text("prompt", prompt))
        else:
            ids = [self._token_id("prompt", token) for token in _as_list(prompt)]
        if not ids:
            raise ValueError("prompt is empty; at least one token is needed")
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"prompt has {len(ids)} tokens; max_model_len is {self.max_model_len} and at "
                f"least one new token must fit"
            )
        return ids

    def _token_id(self, field: str, token: Any) -> int:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise TypeError(f"{field} must hold token ids, got {token!r}")
        token = token.__index__()
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"{field}: token id {token} is not in 0..{self.vocab_size - 1}")
        return token

    def _check_params(self, params: SamplingParams) -> None:
        if self.simulates:
            _check_no_text(params)
        for token in params.stop_token_ids or ():
            self._token_id("stop_token_ids", token)
        for token in params.logit_bias or ():
            self._token_id("logit_bias", token)
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop: this model has no tokenizer; use stop_token_ids")
        for word in params.stop_strings:
            _text("stop", word)
        k = params.k
        if self.speculates and k not in (None, "auto") and int(k) > self.max_k:
            raise ValueError(f"k must be between 0 and the engine's k ({self.max_k}), got {k}")

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Token sequences to ban. A string is banned at the start of a word and inside one."""
        words: list[list[int]] = []
        for word in params.bad_words or ():
            if not isinstance(word, str):
                words.append([self._token_id("bad_words", token) for token in word])
            elif self.tokenizer is None:
                raise ValueError("bad_words: this model has no tokenizer; pass token ids")
            else:
                for text in (word, " " + word):
                    text = _text("bad_words", text)
                    ids = self.tokenizer.encode(text, add_special_tokens=False)
                    words.append(ids)
        longest = max((len(word) for word in words), default=0)
        if len(words) > MAX_BAD_WORDS or longest > MAX_BAD_WORD_LEN:
            raise ValueError(
                f"bad_words: at most {MAX_BAD_WORDS} sequences of {MAX_BAD_WORD_LEN} tokens, got "
                f"{len(words)} of up to {longest} (a string counts as two)"
            )
        return words

    def _grammar_start(self, params: SamplingParams) -> Callable[[], GrammarState] | None:
        """What makes the start of a text in the asked format, once per choice."""
        start = self.prepare_format(params.response_format)
        for name in ("ignore_eos", "min_tokens"):
            if start is not None and getattr(params, name):
                raise ValueError(f"{name} cannot be combined with response_format")
        return start

    def prepare_format(self, response_format: object) -> Callable[[], GrammarState] | None:
        """What makes the start of a text in a format, which is compiled now; None for plain text.

        May be called in any thread. Raises ValueError or TypeError naming what is wrong with it.
        """
        checked = check_format(response_format)
        if checked is None:
            return None
        if self.tokenizer is None:
            raise ValueError("response_format: this model has no tokenizer")
        if not self.eos_token_ids:
            raise ValueError("response_format: this model has no end-of-sequence token")
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(
                    self.tokenizer, self.vocab_size, sorted(self.eos_token_ids)
                )
        grammars = self._grammars
        grammars.start(checked)
        return lambda: grammars.start(checked)

    def _request_k(self, params: SamplingParams) -> int:
        if not self.speculates:
            return 0
        if params.k == "auto" and not self.adapts:
            raise ValueError("k='auto' needs an engine with k='auto'; this one has a fixed k")
        return self.max_k if params.k in (None, "auto") else int(params.k)

    def _adapts(self, params: SamplingParams, coupled: bool) -> bool:
        """Whether the engine chooses the request's k as it goes.

        Not where rejection sampling must repeat its text for a seed: that depends on where steps
        begin, so the k of such a row may not depend on its neighbours.
        """
        repeats = params.seed is not None and params.temperature > 0
        return self.adapts and params.k in (None, "auto") and (coupled or not repeats)


def _check_no_text(params: SamplingParams) -> None:
    """Refuse what promises something of the text, which simulated acceptance makes meaningless."""
    for name in TEXT_PROMISES:
        if getattr(params, name) is not None:
            raise ValueError(f"{name} promises something of a text that is simulated")
    if not params.ignore_eos:
        raise ValueError("ignore_eos must be True with simulated_acceptance: no text ends itself")


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Any], bool]:
    """A call's prompts, and whether it has one and no list. TypeError for what is neither."""
    if not isinstance(prompts, str | Sequence):
        raise TypeError(f"prompt must be a string or a list, got {type(prompts).__name__}")
    if isinstance(prompts, str) or not prompts or not isinstance(prompts[0], str | Sequence):
        return [prompts], True
    return list(prompts), False


def choice_seed(seed: int, index: int) -> int:
    """The 64-bit noise key of choice ``index``; choice 0 has the request's own."""
    # An odd multiplier maps different choices of one seed to different keys.
    return (seed + index * 0x9E3779B97F4A7C15) % 2**64


def _text(field: str, text: str) -> str:
    """``text``. Raises ValueError where it holds half of a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{field}: {text[error.start]!r} at character {error.start} is half of a surrogate pair"
        ) from error
    return text


def _as_list(prompt: Any) -> list:
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise TypeError(f"prompt must be a string or a list of token ids, got {prompt!r}")
    return list(prompt)
