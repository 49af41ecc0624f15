"""What the Triton kernels of sampling share: ranks, weights and noise, as ``sampler`` has them.

Shape letters: R requests, Q rows of each, N = R * Q rows, V vocabulary.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.argmax_triton import ranked
from specdec.kernels.sampler import MAX_TEMPERATURE, MIN_TEMPERATURE, ONE
from specdec.kernels.sampling import COUPLED, DRAFT
from specdec.kernels.sampling_triton import gumbel_from_bits, random_bits, row_key

# Below everything that ``ranked`` makes of a token.
NO_RANK = tl.constexpr(-(1 << 63))
UNIT = tl.constexpr(float(ONE))
MIN_HEAT = tl.constexpr(MIN_TEMPERATURE)
_MAX_HEAT = tl.constexpr(MAX_TEMPERATURE)
_COUPLED = tl.constexpr(COUPLED)
_DRAFT = tl.constexpr(DRAFT)
# A logit this far below the largest, after the temperature, weighs nothing.
REACH = tl.constexpr(28.5)

# Rows of one tensor lie at any alignment, and are read one value a program.
ANY_ALIGNMENT = [
    *("temperature", "top_k", "top_p", "min_p", "seed", "coupled", "output_index"),
    *("best", "group_max", "counts", "total", "peak", "cut", "mass", "choice", "is_open"),
]


class Drawn(NamedTuple):
    """What ``draw`` finds of N rows."""

    peak: Tensor  # [N] float32: the largest logit; not finite where the row is not sound
    cut: Tensor  # [N] int64: the lowest rank that top_k and top_p keep
    mass: Tensor  # [N] int64: the sum of the weights that stay
    choice: Tensor  # [N] int64: rank of the choice, its id in the lower half


@triton.jit
def id_of(rank):
    """The id in a rank, int64."""
    return 0x7FFFFFFF - (rank & 0xFFFFFFFF)


@triton.jit
def logit_of(rank):
    """The float32 logit, or score, in a rank."""
    order = (rank >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def scale_of(temperature):
    """1 / temperature, as in ``sampler.scaled_logits``."""
    safe = tl.minimum(tl.maximum(temperature, MIN_HEAT), _MAX_HEAT)
    return tl.div_rn(1.0, tl.where(temperature == 0.0, 1.0, safe))


@triton.jit
def weight_of(scaled):
    return (tl.exp(scaled) * UNIT + 0.5).to(tl.int64)


@triton.jit
def min_weight_of(min_p):
    return tl.ceil(min_p.to(tl.float64) * UNIT).to(tl.int64)


@triton.jit
def kept_weights(logits, ids, inside, peak, temperature, min_p, cut):
    """Scaled logits of a row's tokens, and their weights, 0 where a token is cut.

    As ``sampler.kept_weights``. peak, temperature, min_p, cut: of the row.
    """
    values = tl.load(logits + ids, mask=inside, other=float("-inf"))
    scaled = (values - peak) * scale_of(temperature)
    weights = weight_of(scaled)
    kept = inside & (weights >= min_weight_of(min_p)) & (ranked(values, ids) >= cut)
    return scaled, tl.where(kept, weights, 0)


@triton.jit
def best_of(best, row, num_chunks, BLOCK_PARTS: tl.constexpr):
    """The rank of a row's best token."""
    index = tl.arange(0, BLOCK_PARTS)
    parts = tl.load(best + row * num_chunks + index, mask=index < num_chunks, other=NO_RANK)
    return tl.max(parts, axis=0)


@triton.jit
def choice_noise(seed, index, ids, by_coupling):
    """Gumbel noise of the stream that a choice takes: drafts by rejection have their own."""
    stream = tl.where(by_coupling, _COUPLED, _DRAFT).to(tl.int64)
    return gumbel_from_bits(random_bits(row_key(seed, index, stream), ids.to(tl.int64)))


def flat_rows(logits: Tensor) -> Tensor:
    """[R, Q, V] with rows at one distance, which are next to each other in memory."""
    num_reqs, query_len, _ = logits.shape
    row_stride = logits.stride(1) if query_len > 1 else logits.stride(0)
    is_even = num_reqs == 1 or logits.stride(0) == query_len * row_stride
    return logits if is_even and logits.stride(2) == 1 else logits.contiguous()


def row_stride_of(logits: Tensor) -> int:
    return logits.stride(1) if logits.shape[1] > 1 else logits.stride(0)
