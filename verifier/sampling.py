"""From logits to the distribution a row samples from, and to its tokens.

Shape letters: R requests, Q query length, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.sampling import gumbel_noise, uniform_noise

# Streams of the counter-based noise. A draft and the target share COUPLED; the other three are
# independent of it and of each other.
COUPLED, ACCEPT, RECOVER, DRAFT = range(4)

# Likeliest tokens whose log-probabilities a pass brings along; a request takes what it asked for.
MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """Sampling parameters of a batch's rows, and where each row's output stands."""

    temperature: Tensor  # [R] float32; 0 is greedy
    top_k: Tensor  # [R] int64; 0 is off
    top_p: Tensor  # [R] float32 in (0, 1]
    min_p: Tensor  # [R] float32 in [0, 1]
    seed: Tensor  # [R] int64: the 64 bits of the row's key
    coupled: Tensor  # [R] bool: coupled acceptance, else rejection sampling
    output_index: Tensor  # [R] int64: index of the first token this pass may commit

    @property
    def greedy(self) -> Tensor:  # [R] bool
        return self.temperature == 0

    def at(self, offset: int) -> "SamplingRows":
        """The same rows, ``offset`` output tokens later."""
        return SamplingRows(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            coupled=self.coupled,
            output_index=self.output_index + offset,
        )

    def indices(self, query_len: int) -> Tensor:
        """Output index of each query row, [R, Q] int64."""
        steps = torch.arange(query_len, device=self.output_index.device)
        return self.output_index[:, None] + steps


def log_probs(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Log-probabilities after temperature, top_k, top_p and min_p, in that order.

    Args:
        logits: [R, Q, V] float32.

    Returns:
        [R, Q, V] float32, -inf where a token is cut. Among equal logits at the border of top_k or
        top_p the lower ids stay. Greedy rows come out at temperature 1; their values are not used.
    """
    temperature = rows.temperature.where(~rows.greedy, 1.0)[:, None, None]
    logp = (logits / temperature).log_softmax(-1)
    ranked, order = logp.sort(dim=-1, descending=True, stable=True)
    vocab_size = logits.shape[-1]
    top_k = rows.top_k.where(rows.top_k > 0, vocab_size)[:, None, None]
    keep = torch.arange(vocab_size, device=logits.device) < top_k
    ranked = ranked.masked_fill(~keep, -torch.inf).log_softmax(-1)
    probs = ranked.exp()
    # A token stays while the mass before it is short of top_p; the first always stays.
    before = probs.cumsum(-1) - probs
    keep = keep & (before < rows.top_p[:, None, None])
    keep = keep & (probs >= rows.min_p[:, None, None] * probs[..., :1])
    keep[..., 0] = True
    ranked = ranked.masked_fill(~keep, -torch.inf).log_softmax(-1)
    return torch.empty_like(ranked).scatter_(-1, order, ranked)


def coupled_tokens(logp: Tensor, rows: SamplingRows) -> Tensor:
    """Gumbel-max tokens whose noise is a function of (seed, output index, token id) alone.

    Args:
        logp: [R, Q, V] float32 from ``log_probs``.

    Returns:
        [R, Q] int64. A draft that adds the same noise proposes just these tokens where it agrees.
    """
    noise = gumbel_noise(rows.seed, rows.indices(logp.shape[1]), logp.shape[2], COUPLED)
    return (logp + noise).argmax(-1)


def draft_tokens(logits: Tensor, rows: SamplingRows | None) -> tuple[Tensor, Tensor | None]:
    """A draft model's token for one position of each row, and the distribution it came from.

    Args:
        logits: [R, V] float32; ``rows.output_index`` is that position's.

    Returns:
        Tokens [R] int64 and, unless all rows are greedy, probabilities [R, V] float32.
    """
    if rows is None:
        return logits.argmax(-1), None
    logp = log_probs(logits[:, None], rows)
    index = rows.output_index[:, None]
    vocab_size = logits.shape[1]
    shared = gumbel_noise(rows.seed, index, vocab_size, COUPLED)
    own = gumbel_noise(rows.seed, index, vocab_size, DRAFT)
    noise = torch.where(rows.coupled[:, None, None], shared, own)
    sampled = (logp + noise).argmax(-1)[:, 0]
    return torch.where(rows.greedy, logits.argmax(-1), sampled), logp[:, 0].exp()


def accept_uniform(rows: SamplingRows, query_len: int) -> Tensor:
    """Uniform numbers of the acceptance test, [R, Q] float32 in [0, 1)."""
    return uniform_noise(rows.seed, rows.indices(query_len), ACCEPT)


def recover_noise(rows: SamplingRows, num_accepted: Tensor, vocab_size: int) -> Tensor:
    """Noise that picks the token after the accepted run, [R, V] float32."""
    index = (rows.output_index + num_accepted)[:, None]
    return gumbel_noise(rows.seed, index, vocab_size, RECOVER)[:, 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprobs:
    """Log-softmax of the raw logits, for the tokens that a pass may commit."""

    chosen: Tensor  # [R, Q] float32
    top_ids: Tensor  # [R, Q, n] int64, likeliest first
    top: Tensor  # [R, Q, n] float32

    @classmethod
    def stack(cls, rounds: "list[Logprobs]") -> "Logprobs":
        """Of several rounds, as [R, rounds, ...]."""
        return cls(
            chosen=torch.stack([each.chosen for each in rounds], dim=1),
            top_ids=torch.stack([each.top_ids for each in rounds], dim=1),
            top=torch.stack([each.top for each in rounds], dim=1),
        )


def token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> Logprobs:
    """Log-probabilities of ``tokens`` [R, Q] (-1 for none) and of the ``count`` likeliest."""
    logp = logits.log_softmax(-1)
    top, top_ids = logp.topk(min(count, logits.shape[-1]), dim=-1)
    chosen = logp.gather(2, tokens.clamp_min(0)[..., None])[..., 0]
    return Logprobs(chosen=chosen, top_ids=top_ids, top=top)
