"""Triton side of ``specdec.verifier.processors.apply_rules``: all rules on logits in one kernel.

Shape letters: S state rows, R requests, Q query length, V vocabulary, L context.

A program takes part of the vocabulary for all Q rows of a request. Rules that a request does not
have cost it one load each: counts of the text, and the places of bans, are made by those alone that
need them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.weights_triton import flat_rows, row_stride_of

_CHUNK = 1024


class RuleTensors(NamedTuple):
    """The rules of all requests, and of a batch's rows the text that they look at."""

    slots: Tensor  # [R] int64: the state row of each request of the batch
    text: Tensor  # [S, L + 1] int32
    seq_lens: Tensor  # [R] int64
    prompt_lens: Tensor  # [R] int64
    bias: Tensor  # [S, V] float32
    penalties: Tensor  # [S, 3] float32
    min_tokens: Tensor  # [S] int64
    stop_ids: Tensor  # [S, a power of two] int64; -1 is none
    bad_words: Tensor  # [S, words, length], powers of two, int64


@triton.jit
def _ban(values, ids, banned, NUM: tl.constexpr):
    """-inf at the ids that stand in ``banned`` [NUM]; -1 there is none."""
    index = tl.arange(0, NUM)
    for each in range(NUM):
        token = tl.max(tl.where(index == each, banned, -1), axis=0)
        values = tl.where(ids == token, float("-inf"), values)
    return values


@triton.jit
def _counts(token, take, CHUNK: tl.constexpr):
    """How often each number below CHUNK stands among those that are taken, [CHUNK] int32."""
    counts = tl.histogram(tl.where(take, token, 0), CHUNK)
    others = tl.sum((take == 0).to(tl.int32), axis=0)
    return counts - tl.where(tl.arange(0, CHUNK) == 0, others, 0)


@triton.jit(
    do_not_specialize=["token_stride"],
    do_not_specialize_on_alignment=[
        *("slots", "tokens", "seq_lens", "prompt_lens", "draft_ids", "penalties"),
        *("min_tokens", "stop_ids", "bad_words"),
    ],
)
def _rules_kernel(
    logits,
    out,  # [R, Q, V] float32
    slots,  # [R] int64
    tokens,  # [S, L + 1] int32
    seq_lens,  # [R] int64
    prompt_lens,  # [R] int64
    draft_ids,  # [R, Q - 1] int64
    bias,  # [S, V] float32
    penalties,  # [S, 3] float32
    min_tokens,  # [S] int64
    stop_ids,  # [S, NUM_STOPS] int64
    bad_words,  # [S, NUM_WORDS, WORD_LEN] int64
    vocab_size,
    row_stride,
    token_stride,
    Q: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WORD_LEN: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * CHUNK
    ids = start + tl.arange(0, CHUNK)
    inside = ids < vocab_size
    slot = tl.load(slots + request)
    seq_len = tl.load(seq_lens + request)
    prompt_len = tl.load(prompt_lens + request)
    text = tokens + slot * token_stride

    presence = tl.load(penalties + slot * 3)
    frequency = tl.load(penalties + slot * 3 + 1)
    log_repetition = tl.load(penalties + slot * 3 + 2)
    has_penalty = (presence != 0.0) | (frequency != 0.0) | (log_repetition != 0.0)
    in_prompt = tl.zeros([CHUNK], tl.int32)
    in_output = tl.zeros([CHUNK], tl.int32)
    if has_penalty:
        for first in range(0, seq_len.to(tl.int32), CHUNK):
            at = first + tl.arange(0, CHUNK)
            token = tl.load(text + at, mask=at < seq_len, other=-1) - start
            here = (at < seq_len) & (token >= 0) & (token < CHUNK)
            is_output = here & (at >= prompt_len)
            in_output += _counts(token, is_output, CHUNK)
            in_prompt += _counts(token, here & (at < prompt_len), CHUNK)
    factor = tl.exp(log_repetition)

    words = bad_words + (slot * NUM_WORDS + tl.arange(0, NUM_WORDS)) * WORD_LEN
    last = tl.load(words + WORD_LEN - 1)
    has_words = tl.max(last, axis=0) >= 0
    too_short = tl.load(min_tokens + slot) - (seq_len - prompt_len)
    shift = tl.load(bias + slot * vocab_size + ids, mask=inside, other=0.0)

    for step in range(Q):
        row = (request * Q + step) * row_stride
        raw = tl.load(logits + row + ids, mask=inside, other=float("-inf"))
        values = raw + shift
        if has_penalty:
            # The draft before this row counts as its output.
            if step > 0:
                draft = tl.load(draft_ids + request * (Q - 1) + step - 1)
                in_output += (ids == draft).to(tl.int32)
            repeated = tl.where(values > 0, tl.div_rn(values, factor), values * factor)
            values = tl.where(in_prompt + in_output > 0, repeated, values)
            counts = in_output.to(tl.float32)
            values = values - frequency * counts - presence * (counts > 0).to(tl.float32)
        if has_words:
            complete = last >= 0
            for place in range(WORD_LEN - 1):
                wanted = tl.load(words + place)
                # The tokens before this row: the text, then the drafts.
                at = seq_len + step - (WORD_LEN - 1) + place
                is_text = (at < seq_len) & (at >= 0)
                token = tl.load(text + at, mask=is_text, other=-2).to(tl.int64)
                draft = tl.load(
                    draft_ids + request * (Q - 1) + at - seq_len, mask=at >= seq_len, other=-2
                )
                before = tl.where(at >= seq_len, draft, token)
                complete = complete & ((wanted == before) | (wanted < 0))
            values = _ban(values, ids, tl.where(complete, last, -1), NUM_WORDS)
        if step < too_short:
            stops = tl.load(stop_ids + slot * NUM_STOPS + tl.arange(0, NUM_STOPS))
            values = _ban(values, ids, stops, NUM_STOPS)
        # No ban hides a row that is not sound.
        values = tl.where(raw < float("inf"), values, float("nan"))
        tl.store(out + (request * Q + step) * vocab_size + ids, values, mask=inside)


def apply_rules(logits: Tensor, draft_ids: Tensor, rules: RuleTensors) -> Tensor:
    """``specdec.verifier.processors.apply_rules``."""
    logits, draft_ids = flat_rows(logits), draft_ids.contiguous()
    num_reqs, query_len, vocab_size = logits.shape
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if num_reqs:
        _rules_kernel[(num_reqs, triton.cdiv(vocab_size, _CHUNK))](
            logits, out, *rules[:4], draft_ids, *rules[4:], vocab_size, row_stride_of(logits),
            rules.text.stride(0), Q=query_len, NUM_STOPS=rules.stop_ids.shape[1],
            NUM_WORDS=rules.bad_words.shape[1], WORD_LEN=rules.bad_words.shape[2], CHUNK=_CHUNK,
            num_warps=8, **pdl_options(logits),
        )  # fmt: skip
    return out
