"""Triton side of ``specdec.kernels.sampling``: the same integers, drawn in one kernel.

Shape letters: R requests, Q rows per request, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels import sampling

_BLOCK = 1024
_GOLDEN = tl.constexpr(sampling.GOLDEN)
_MIX_1 = tl.constexpr(sampling.MIX_1)
_MIX_2 = tl.constexpr(sampling.MIX_2)
_SERIES_BELOW = tl.constexpr(sampling.SERIES_BELOW)


@triton.jit
def _shift_right(x, bits: tl.constexpr):
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def _mix(x):
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


@triton.jit
def row_key(seed, index, stream):
    """The key of a row's sequence, as ``sampling.row_keys``. All int64."""
    return _mix(_mix(_mix(seed + _GOLDEN) ^ index) + (stream + 1) * _GOLDEN)


@triton.jit
def random_bits(key, tokens):
    """One 64-bit integer per token, as ``sampling.random_bits``. tokens int64."""
    return _mix(key + (tokens + 1) * _GOLDEN)


@triton.jit
def gumbel_from_bits(bits):
    """Standard Gumbel noise, as ``sampling.gumbel_from_bits``."""
    v = (_shift_right(bits, 24).to(tl.float32) + 0.5) * 9.094947017729282e-13  # 2 ** -40
    v = tl.minimum(v, 0.9999999403953552)  # 1 - 2 ** -24
    series = v * (1 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    return -tl.log(tl.where(v < _SERIES_BELOW, series, -tl.log(1 - v)))


@triton.jit
def uniform_from_key(key):
    """One number in [0, 1) of a row's key, as ``sampling.uniform_noise``."""
    return _shift_right(_mix(key), 40).to(tl.float32) * 5.960464477539063e-08  # 2 ** -24


@triton.jit(do_not_specialize=["vocab_size", "num_rows_each"])
def _gumbel_kernel(
    seed,  # [R] int64
    index,  # [R, Q] int64
    out,  # [R, Q, V] float32
    vocab_size,
    num_rows_each,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.full([], STREAM, tl.int64)
    key = row_key(tl.load(seed + row // num_rows_each), tl.load(index + row), stream)
    noise = gumbel_from_bits(random_bits(key, tokens))
    tl.store(out + row * vocab_size + tokens, noise, mask=tokens < vocab_size)


@triton.jit(do_not_specialize=["num_rows", "num_rows_each"])
def _uniform_kernel(
    seed, index, out, num_rows, num_rows_each, STREAM: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    seeds = tl.load(seed + rows // num_rows_each, mask=mask, other=0)
    indices = tl.load(index + rows, mask=mask, other=0)
    key = row_key(seeds, indices, tl.full([], STREAM, tl.int64))
    tl.store(out + rows, uniform_from_key(key), mask=mask)


def gumbel_noise(seed: Tensor, index: Tensor, vocab_size: int, stream: int) -> Tensor:
    """``specdec.kernels.sampling.gumbel_noise``."""
    index = index.contiguous()
    out = torch.empty(*index.shape, vocab_size, dtype=torch.float32, device=index.device)
    if out.numel() == 0:
        return out
    _gumbel_kernel[(index.numel(), triton.cdiv(vocab_size, _BLOCK))](
        seed, index, out, vocab_size, index.shape[1], STREAM=stream, BLOCK=_BLOCK
    )
    return out


def uniform_noise(seed: Tensor, index: Tensor, stream: int) -> Tensor:
    """``specdec.kernels.sampling.uniform_noise``."""
    index = index.contiguous()
    out = torch.empty(index.shape, dtype=torch.float32, device=index.device)
    if out.numel() == 0:
        return out
    _uniform_kernel[(triton.cdiv(index.numel(), 128),)](
        seed, index, out, index.numel(), index.shape[1], STREAM=stream, BLOCK=128
    )
    return out
