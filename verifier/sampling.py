"""From logits to the distribution a row samples from, and to its tokens.

Shape letters: R requests, Q query length, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.sampler import SamplingRows, kept_weights, probabilities, scaled_logits
from specdec.kernels.sampling import ACCEPT, COUPLED, DRAFT, RECOVER, gumbel_noise, uniform_noise

# Likeliest tokens whose log-probabilities a pass brings along; a request takes what it asked for.
MAX_LOGPROBS = 20


def coupled_tokens(logp: Tensor, rows: SamplingRows) -> Tensor:
    """Gumbel-max tokens whose noise is a function of (seed, output index, token id) alone.

    Args:
        logp: [R, Q, V] float32 log-probabilities, up to a number of each row.

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
        Tokens [R] int64 and, unless all rows are greedy, probabilities [R, V] float32; on a GPU
        only those of rows that sample by rejection are written, since no other is read.
    """
    if rows is None:
        return logits.argmax(-1), None
    if logits.is_cuda:
        from specdec.kernels import sampler_triton

        return sampler_triton.draft_tokens(logits, rows)
    scaled = scaled_logits(logits[:, None], rows)
    weights = kept_weights(logits[:, None], scaled, rows)
    index = rows.output_index[:, None]
    vocab_size = logits.shape[1]
    shared = gumbel_noise(rows.seed, index, vocab_size, COUPLED)
    own = gumbel_noise(rows.seed, index, vocab_size, DRAFT)
    noise = torch.where(rows.coupled[:, None, None], shared, own)
    sampled = (scaled.where(weights > 0, -torch.inf) + noise).argmax(-1)[:, 0]
    return torch.where(rows.greedy, logits.argmax(-1), sampled), probabilities(weights)[:, 0]


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


def token_logprobs(
    logits: Tensor, tokens: Tensor, count: int, wanted: Tensor | None = None
) -> Logprobs:
    """Log-probabilities of ``tokens`` [R, Q] (-1 for none) and of the ``count`` likeliest.

    logits: [R, Q, V] float32. wanted: [R] bool, requests that need them (None: all). On a GPU those
    of the others, and of rows that are not finite, are 0.
    """
    if logits.is_cuda:
        from specdec.kernels import logprobs_triton

        if wanted is None:
            wanted = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
        chosen, top_ids, top = logprobs_triton.token_logprobs(logits, tokens, count, wanted)
        return Logprobs(chosen=chosen, top_ids=top_ids, top=top)
    logp = logits.log_softmax(-1)
    top, top_ids = logp.topk(min(count, logits.shape[-1]), dim=-1)
    chosen = logp.gather(2, tokens.clamp_min(0)[..., None])[..., 0]
    return Logprobs(chosen=chosen, top_ids=top_ids, top=top)
