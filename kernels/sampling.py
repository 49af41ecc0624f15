"""Counter-based random numbers: noise is a function of what it is for, never of when it is drawn.

Shape letters: R requests, Q rows per request, V vocabulary.

Every number is a hash of (seed, output index, stream, token id) and of nothing else: not of the
batch, the padding of the vocabulary or the step. The chain is SplitMix64 with Stafford's thirteenth
mixer: a key per (seed, index, stream), then one element of that key's sequence per token. The
integers are the same here and in the Triton kernel.
"""

import torch
from torch import Tensor

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, the SplitMix64 increment
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
# Streams of noise, which are independent of each other. A draft and the target share COUPLED.
COUPLED, ACCEPT, RECOVER, DRAFT, SIMULATED = range(5)
# Below this probability -log(1 - v) is taken from its series, where float32 would lose 1 - v.
SERIES_BELOW = 1 / 64


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 bits; PyTorch's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 64-bit integers in which every input bit moves every output bit."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def row_keys(seed: Tensor, index: Tensor, stream: int) -> Tensor:
    """The key of each row's sequence. seed [R] int64, index [R, Q] int64 -> [R, Q] int64."""
    keys = _mix(_mix(seed + GOLDEN)[:, None] ^ index)
    # Python's integers do not wrap, so the product is brought into int64's range by hand.
    offset = ((stream + 1) * GOLDEN + 2**63) % 2**64 - 2**63
    return _mix(keys + offset)


def random_bits(keys: Tensor, vocab_size: int) -> Tensor:
    """One 64-bit integer per token. keys [...] int64 -> [..., V] int64."""
    tokens = torch.arange(1, vocab_size + 1, device=keys.device)
    return _mix(keys[..., None] + tokens * GOLDEN)


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, from 64-bit integers.

    With ``v`` uniform in (0, 1) from 40 bits the noise is -log(-log(1 - v)). Large values, which
    decide an argmax, lie at small ``v``, where float32 is dense.
    """
    v = (_shift_right(bits, 24).to(torch.float32) + 0.5) * 2.0**-40
    v = v.clamp_max(1 - 2.0**-24)
    series = v * (1 + v * (0.5 + v * (1 / 3 + v * 0.25)))
    return -torch.log(torch.where(v < SERIES_BELOW, series, -torch.log(1 - v)))


def gumbel_noise_reference(seed: Tensor, index: Tensor, vocab_size: int, stream: int) -> Tensor:
    """Plain PyTorch twin of ``gumbel_noise``."""
    return gumbel_from_bits(random_bits(row_keys(seed, index, stream), vocab_size))


def gumbel_noise(seed: Tensor, index: Tensor, vocab_size: int, stream: int) -> Tensor:
    """Gumbel noise for each token of each row.

    seed [R] int64 (any 64 bits), index [R, Q] int64 (the output index of each row), stream: a small
    non-negative number that tells uses apart -> [R, Q, V] float32, finite.
    """
    if seed.is_cuda:
        from specdec.kernels import sampling_triton

        return sampling_triton.gumbel_noise(seed, index, vocab_size, stream)
    return gumbel_noise_reference(seed, index, vocab_size, stream)


def uniform_noise_reference(seed: Tensor, index: Tensor, stream: int) -> Tensor:
    """Plain PyTorch twin of ``uniform_noise``."""
    bits = _mix(row_keys(seed, index, stream))
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24


def uniform_noise(seed: Tensor, index: Tensor, stream: int) -> Tensor:
    """One uniform number per row: seed [R] int64, index [R, Q] int64 -> [R, Q] float32 in [0, 1).

    It shares no integer with the Gumbel noise of the same stream.
    """
    if seed.is_cuda:
        from specdec.kernels import sampling_triton

        return sampling_triton.uniform_noise(seed, index, stream)
    return uniform_noise_reference(seed, index, stream)
