"""What a row samples from: weights of its tokens after temperature, top_k, top_p and min_p.

Shape letters: R requests, Q query rows of each, V vocabulary.

A weight is exp((logit - largest) / temperature) as an integer in units of 2**-40, so the largest
logit weighs 2**40, and a token 28.4 below it (after the temperature) weighs nothing and is cut: its
probability is below 5e-13. Sums of weights are exact in any order, so a cut is the same however the
vocabulary is split over programs, and the same here and in the Triton kernels up to the last bit of
an exponential.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# The weight of the largest logit.
ONE = 1 << 40
# 1 / temperature stays a number, and so does minus infinity times it.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30


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


class SamplingColumns(NamedTuple):
    """Columns of the request state, [S] each: views of one integer and one float tensor."""

    seq_len: Tensor
    prompt_len: Tensor
    top_k: Tensor
    seed: Tensor
    coupled: Tensor
    logprobs: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor


class SamplingFields(NamedTuple):
    """The same of a batch's rows, [R] each."""

    prompt_len: Tensor  # int64
    output_index: Tensor  # int64: committed tokens behind the prompt
    top_k: Tensor  # int64
    seed: Tensor  # int64
    coupled: Tensor  # bool
    wants_logprobs: Tensor  # bool
    temperature: Tensor  # float32
    top_p: Tensor  # float32
    min_p: Tensor  # float32


def scaled_logits(logits: Tensor, rows: SamplingRows) -> Tensor:
    """(logit - largest) / temperature, [R, Q, V] float32; greedy rows at temperature 1.

    logits [R, Q, V] float32.
    """
    temperature = rows.temperature.where(~rows.greedy, 1.0)
    scale = 1.0 / temperature.clamp(MIN_TEMPERATURE, MAX_TEMPERATURE)
    return (logits - logits.amax(-1, keepdim=True)) * scale[:, None, None]


def kept_weights(logits: Tensor, scaled: Tensor, rows: SamplingRows) -> Tensor:
    """Integer weights, 0 where a token is cut. [R, Q, V] each; ``scaled`` from ``scaled_logits``.

    The order of the cuts is top_k, top_p, min_p. Tokens rank by their logits, equal ones by the
    lower id. top_k keeps the first k of them; top_p those before which the mass, of what top_k
    kept, is short of its share (the first always stays); min_p those that weigh that share of the
    largest. Rows that are not finite come out as anything.
    """
    order = logits.argsort(dim=-1, descending=True, stable=True)
    weights = (scaled.exp() * ONE + 0.5).long().gather(-1, order)
    top_k, top_p, min_p = (each[:, None, None] for each in (rows.top_k, rows.top_p, rows.min_p))
    rank = torch.arange(logits.shape[-1], device=logits.device)
    weights = weights.where((top_k <= 0) | (rank < top_k), 0)
    limit = (top_p.double() * weights.sum(-1, keepdim=True).double()).ceil()
    before = weights.cumsum(-1) - weights
    keep = (top_p >= 1) | (before < limit.long())
    keep = keep & (weights >= (min_p.double() * ONE).ceil().long())
    return torch.empty_like(weights).scatter_(-1, order, weights.where(keep, 0))


def probabilities(weights: Tensor) -> Tensor:
    """Weights as float32 probabilities, exactly 0 where the weight is."""
    return weights.float() / weights.sum(-1, keepdim=True).float()


def log_probs_reference(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Plain PyTorch twin of ``log_probs``."""
    scaled = scaled_logits(logits, rows)
    weights = kept_weights(logits, scaled, rows)
    mass = weights.sum(-1, keepdim=True).float() / ONE
    return (scaled - mass.log()).where(weights > 0, -torch.inf)


def log_probs(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Log-probabilities after temperature, top_k, top_p and min_p, in that order.

    Args:
        logits: [R, Q, V] float32.

    Returns:
        [R, Q, V] float32, -inf where a token is cut. Among equal logits at the border of top_k or
        top_p the lower ids stay. The values of greedy rows mean nothing.
    """
    if logits.is_cuda:
        from specdec.kernels import sampler_triton

        return sampler_triton.log_probs(logits, rows)
    return log_probs_reference(logits, rows)
