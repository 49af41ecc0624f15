"""The sampling parameters of a batch's rows out of the request state, in one Triton kernel.

The plain-PyTorch twin is in ``RowState`` of ``specdec.verifier.state``. Shape letters: S state
rows, R requests of the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.sampler import SamplingColumns, SamplingFields


@triton.jit(
    do_not_specialize=["num_reqs", "int_stride", "float_stride"],
    do_not_specialize_on_alignment=[
        *("slots", "seq_len", "prompt_len", "top_k", "seed", "coupled", "logprobs"),
        *("temperature", "top_p", "min_p"),
    ],
)
def _rows_kernel(
    slots,
    seq_len,
    prompt_len,
    top_k,
    seed,
    coupled,
    logprobs,
    temperature,
    top_p,
    min_p,
    ints,  # [4, R] int64
    flags,  # [2, R] bool
    floats,  # [3, R] float32
    num_reqs,
    int_stride,
    float_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_reqs
    slot = tl.load(slots + rows, mask=mask, other=0)
    at, float_at = slot * int_stride, slot * float_stride
    prompt = tl.load(prompt_len + at, mask=mask, other=0)
    tl.store(ints + rows, prompt, mask=mask)
    length = tl.load(seq_len + at, mask=mask, other=0)
    tl.store(ints + num_reqs + rows, length - prompt, mask=mask)
    tl.store(ints + 2 * num_reqs + rows, tl.load(top_k + at, mask=mask, other=0), mask=mask)
    tl.store(ints + 3 * num_reqs + rows, tl.load(seed + at, mask=mask, other=0), mask=mask)
    tl.store(flags + rows, tl.load(coupled + at, mask=mask, other=0) > 0, mask=mask)
    wants = tl.load(logprobs + at, mask=mask, other=0) > 0
    tl.store(flags + num_reqs + rows, wants, mask=mask)
    heat = tl.load(temperature + float_at, mask=mask, other=0.0)
    tl.store(floats + rows, heat, mask=mask)
    tl.store(floats + num_reqs + rows, tl.load(top_p + float_at, mask=mask, other=0.0), mask=mask)
    share = tl.load(min_p + float_at, mask=mask, other=0.0)
    tl.store(floats + 2 * num_reqs + rows, share, mask=mask)


def sampling_fields(slots: Tensor, columns: SamplingColumns) -> SamplingFields:
    """Gather the fields of ``slots`` [R] int64."""
    num_reqs = slots.shape[0]
    ints = torch.empty(4, num_reqs, dtype=torch.int64, device=slots.device)
    flags = torch.empty(2, num_reqs, dtype=torch.bool, device=slots.device)
    floats = torch.empty(3, num_reqs, dtype=torch.float32, device=slots.device)
    if num_reqs:
        _rows_kernel[(triton.cdiv(num_reqs, 32),)](
            slots, *columns, ints, flags, floats, num_reqs, columns.seq_len.stride(0),
            columns.temperature.stride(0), BLOCK=32, num_warps=1, **pdl_options(slots),
        )  # fmt: skip
    return SamplingFields(*ints, *flags, *floats)
