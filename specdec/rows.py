"""What a request looks like on the device: plain values, the same for every rank."""

import math
from dataclasses import dataclass

from specdec.request import Request
from specdec.verifier.processors import MAX_STOP_IDS
from specdec.verifier.state import DecodeState

# Past these a value decides everything already, and float32 would overflow on the way.
MIN_TEMPERATURE, MAX_SHIFT, MAX_LOG_FACTOR = 1e-6, 1e20, 46.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRow:
    """The contents of a state row."""

    row: int
    token_ids: list[int]
    ints: dict[str, int]
    floats: dict[str, float]
    bias: dict[int, float]
    penalties: list[float]  # presence, frequency, log of repetition
    min_tokens: int
    stop_ids: list[int]
    bad_words: list[list[int]]

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> "RequestRow":
        params = request.params
        return cls(
            row=request.row,
            token_ids=request.token_ids,
            ints={
                "end": request.end,
                "k": request.k,
                "prompt_len": len(request.prompt_ids),
                "draft_len": request.num_cached,
                "top_k": min(params.top_k or 0, vocab_size),
                "seed": request.seed,
                "coupled": request.coupled,
                "logprobs": params.logprobs is not None,
                "adapter": request.adapter_slot,
            },
            floats={
                "temperature": _in_range(params.temperature, MIN_TEMPERATURE),
                "top_p": params.top_p,
                "min_p": params.min_p,
            },
            bias={token: _in_range(bias) for token, bias in (params.logit_bias or {}).items()},
            penalties=[
                _in_range(params.presence_penalty),
                _in_range(params.frequency_penalty),
                max(-MAX_LOG_FACTOR, min(math.log(params.repetition_penalty), MAX_LOG_FACTOR)),
            ],
            min_tokens=min(params.min_tokens, request.end),
            # Where there are more, the host ends the text at those that the device lets pass.
            stop_ids=sorted(request.stop_ids)[:MAX_STOP_IDS],
            bad_words=request.bad_words,
        )

    def write(self, state: DecodeState) -> None:
        state.write_row(self.row, self.token_ids, self.ints, self.floats)
        state.write_rules(
            self.row,
            bias=self.bias,
            penalties=self.penalties,
            min_tokens=self.min_tokens,
            stop_ids=self.stop_ids,
            bad_words=self.bad_words,
        )


def _in_range(value: float, low: float = -MAX_SHIFT) -> float:
    return max(low, min(value, MAX_SHIFT)) if value else 0.0
