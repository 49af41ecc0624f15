"""Rules on logits that depend on a row's own text: penalties, biases, bans and the minimum length.

They act on every verify row with that row's own prefix: row j has the committed tokens and the
drafts before j. Nothing is kept from step to step, so a rejected draft leaves no trace.

Shape letters: S state rows, R requests, Q query length, V vocabulary, L context.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from specdec.kernels.rules_triton import RuleTensors

# Limits of the per-row tables; a request that needs more is refused by name.
MAX_STOP_IDS = 32
MAX_BAD_WORDS = 32
MAX_BAD_WORD_LEN = 8


class LogitRules:
    """The rules of every state row, at fixed addresses. A row of zeros changes nothing."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.bias = torch.zeros(num_rows, vocab_size, dtype=torch.float32, device=device)
        # Presence, frequency, and repetition as its logarithm, so that 0 is off.
        self.penalties = torch.zeros(num_rows, 3, dtype=torch.float32, device=device)
        self.min_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.stop_ids = torch.full((num_rows, MAX_STOP_IDS), -1, dtype=torch.int64, device=device)
        # Right-aligned token sequences; -1 stands for "any token" before a word and ends the table.
        shape = (num_rows, MAX_BAD_WORDS, MAX_BAD_WORD_LEN)
        self.bad_words = torch.full(shape, -1, dtype=torch.int64, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleRows:
    """The rules of a batch's rows, and the text they look at."""

    rules: LogitRules
    slots: Tensor  # [R] int64
    text: Tensor  # [S, L + 1] int32: the tokens of every state row, and a spare column
    seq_lens: Tensor  # [R] int64
    prompt_lens: Tensor  # [R] int64

    @property
    def tokens(self) -> Tensor:  # [R, L] int32
        return self.text[self.slots, :-1]

    @property
    def tensors(self) -> "RuleTensors":
        """The same, as the kernel of a GPU reads it."""
        from specdec.kernels.rules_triton import RuleTensors

        rules = self.rules
        return RuleTensors(
            slots=self.slots,
            text=self.text,
            seq_lens=self.seq_lens,
            prompt_lens=self.prompt_lens,
            bias=rules.bias,
            penalties=rules.penalties,
            min_tokens=rules.min_tokens,
            stop_ids=rules.stop_ids,
            bad_words=rules.bad_words,
        )


def apply_rules(logits: Tensor, draft_ids: Tensor, rows: RuleRows) -> Tensor:
    """The logits under every row's rules.

    Args:
        logits: [R, Q, V] float32.
        draft_ids: [R, Q - 1] int64 in the vocabulary; row j of the logits follows j of them.

    Returns:
        [R, Q, V] float32; -inf where a token is banned, and NaN where a logit is NaN or +inf, so
        that no ban hides a row that is not sound.
    """
    if logits.is_cuda:
        from specdec.kernels import rules_triton

        return rules_triton.apply_rules(logits, draft_ids, rows.tensors)
    ruled = logits + rows.rules.bias[rows.slots][:, None]
    ruled = _penalise(ruled, draft_ids, rows)
    ruled = _ban_bad_words(ruled, draft_ids, rows)
    return _ban_early_stops(ruled, rows).where(logits < torch.inf, torch.nan)


def apply_masks(logits: Tensor, allowed: Tensor) -> Tensor:
    """-inf where a bit of ``allowed`` [R, Q, ceil(V / 32)] int32 is 0; logits are [R, Q, V].

    NaN and +inf stay not finite, whatever is allowed.
    """
    bits = (allowed[..., None] >> torch.arange(32, device=logits.device)) & 1
    keep = bits.flatten(-2)[..., : logits.shape[-1]] > 0
    return logits.masked_fill(~keep & (logits < torch.inf), -torch.inf)


def _penalise(logits: Tensor, draft_ids: Tensor, rows: RuleRows) -> Tensor:
    """Repetition (Keskar et al. 2019) over the text; presence and frequency over the output."""
    vocab_size = logits.shape[-1]
    at = torch.arange(rows.tokens.shape[1], device=logits.device)
    committed = at < rows.seq_lens[:, None]
    is_output = committed & (at >= rows.prompt_lens[:, None])
    ids = rows.tokens.long().where(committed, 0)
    empty = logits.new_zeros(ids.shape[0], vocab_size)
    seen = empty.scatter_add(1, ids, committed.to(logits))[:, None]  # [R, 1, V]
    counts = empty.scatter_add(1, ids, is_output.to(logits))[:, None]
    # Drafts before row j count as its own output.
    vocab = torch.arange(vocab_size, device=logits.device)
    one_hot = (draft_ids[..., None] == vocab).to(logits)
    drafted = F.pad(one_hot.cumsum(1), (0, 0, 1, 0))  # [R, Q, V]
    seen, counts = seen + drafted, counts + drafted

    presence, frequency, log_repetition = rows.rules.penalties[rows.slots].T[..., None, None]
    factor = log_repetition.exp()
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where((seen > 0) & (log_repetition != 0), repeated, logits)
    return logits - frequency * counts - presence * (counts > 0)


def _ban_bad_words(logits: Tensor, draft_ids: Tensor, rows: RuleRows) -> Tensor:
    """Ban the last token of every bad word whose other tokens stand right before."""
    words = rows.rules.bad_words[rows.slots]  # [R, words, length]
    width = MAX_BAD_WORD_LEN - 1
    back = torch.arange(width, device=logits.device) - width
    at = rows.seq_lens[:, None] + back
    recent = rows.tokens.gather(1, at.clamp_min(0)).long().where(at >= 0, -2)
    text = torch.cat([recent, draft_ids], dim=1)
    before = text.unfold(1, width, 1)[:, :, None]  # [R, Q, 1, width]
    prefix = words[:, None, :, :-1]
    complete = ((prefix == before) | (prefix < 0)).all(-1)  # [R, Q, words]
    last = words[:, None, :, -1].expand_as(complete)
    return _ban(logits, last, complete & (last >= 0))


def _ban_early_stops(logits: Tensor, rows: RuleRows) -> Tensor:
    """Ban the ends of a text before its minimum length."""
    ids = rows.rules.stop_ids[rows.slots][:, None].expand(-1, logits.shape[1], -1)
    steps = torch.arange(logits.shape[1], device=logits.device)
    index = (rows.seq_lens - rows.prompt_lens)[:, None] + steps
    early = index < rows.rules.min_tokens[rows.slots][:, None]  # [R, Q]
    return _ban(logits, ids, early[..., None] & (ids >= 0))


def _ban(logits: Tensor, ids: Tensor, banned: Tensor) -> Tensor:
    """-inf at ``ids`` [R, Q, n] where ``banned``; the other entries of ``ids`` may be anything."""
    value = logits.new_full((), -torch.inf).where(banned, torch.inf)
    return logits.scatter_reduce(2, ids.clamp_min(0), value, "amin")
