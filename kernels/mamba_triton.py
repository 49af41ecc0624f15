"""Triton side of ``specdec.kernels.mamba``; its shape letters.

One kernel serves prompts and decode rows, in its loop over a run's tokens every multiply-add is
written as ``fma``, and nothing else is contracted (``enable_fp_fusion=False``): a token's bits do
not depend on the pass that brings it, nor on whether it is folded anew from what was kept.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.mamba import LayerState, Runs, ScanConfig

# Tokens and channels of a program of the convolution, and features of one of the recurrence.
_BLOCK_T, _BLOCK_C, _BLOCK_P = 8, 256, 32


@triton.jit
def _run(query_start_loc, context_lens, seq_lens, request):
    """First token row, number of rows, context, and the steps ``begin .. end`` that exist."""
    start = tl.load(query_start_loc + request)
    length = tl.load(query_start_loc + request + 1) - start
    context = tl.load(context_lens + request)
    seq_len = tl.load(seq_lens + request)
    begin = tl.maximum(-context, 0)
    end = tl.where(seq_len > 0, tl.minimum(seq_len - context, length), 0)
    return start.to(tl.int64), length, context, begin, end


@triton.jit
def _causal_conv_kernel(
    inputs,  # [T, C + H], rows row_stride apart
    weight,  # [C, TAPS]
    bias,  # [C], or anything without HAS_BIAS
    out,  # [T, C]
    kept,  # [S, W, KEPT_WIDTH]
    query_start_loc,
    context_lens,
    seq_lens,
    state_rows,
    row_stride,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    W: tl.constexpr,
    KEPT_WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some tokens of one run, some channels."""
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    start, length, context, begin, end = _run(query_start_loc, context_lens, seq_lens, request)
    first = tl.program_id(1) * BLOCK_T
    if first < length:
        row = tl.load(state_rows + request)
        steps = first + tl.arange(0, BLOCK_T)
        channels = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
        mask = channels < C
        exists = ((steps >= begin) & (steps < end))[:, None] & mask[None, :]
        dtype: tl.constexpr = out.dtype.element_ty
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(TAPS):
            at = steps + (tap - TAPS + 1)
            position = context + at
            own = (start + at)[:, None] * row_stride + channels[None, :]
            value = tl.load(inputs + own, mask=exists & (at >= begin)[:, None], other=0.0)
            place = tl.maximum(position, 0) % W
            earlier = (row * W + place)[:, None] * KEPT_WIDTH + channels[None, :]
            is_earlier = exists & ((at < 0) & (position >= 0))[:, None]
            value += tl.load(kept + earlier, mask=is_earlier, other=0.0)
            scale = tl.load(weight + channels * TAPS + tap, mask=mask, other=0.0).to(tl.float32)
            total = tl.fma(value.to(tl.float32), scale[None, :], total)
        total = total.to(dtype).to(tl.float32)
        result = tl.where(exists, total / (1.0 + tl.exp(-total)), 0.0)
        stored = (steps < length)[:, None] & mask[None, :]
        offsets = (start + steps)[:, None] * C + channels[None, :]
        tl.store(out + offsets, result.to(dtype), mask=stored)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), to a few units in the last place for any x."""
    small = tl.exp(-tl.abs(x))
    one_more = 1.0 + small
    # What the rounding of 1 + small took away is put back as a factor.
    is_lost = one_more == 1.0
    log1p = tl.log(one_more) * (small / tl.where(is_lost, 1.0, one_more - 1.0))
    return tl.maximum(x, 0.0) + tl.where(is_lost, small, log1p)


@triton.jit
def _selective_scan_kernel(
    activated,  # [T, C]
    inputs,  # [T, C + H], rows row_stride apart
    out,  # [T, H * P] float32
    a_log,
    skip,
    dt_bias,
    ssm,  # [S, H, P, N] float32
    folded,  # [S, H, P] int32
    kept_inputs,  # [S, W, C + H]
    kept_activated,  # [S, W, C]
    query_start_loc,
    context_lens,
    seq_lens,
    state_rows,
    row_stride,
    dt_min,
    dt_max,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    W: tl.constexpr,
    RUN_LENGTH: tl.constexpr,
    TENTATIVE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some rows of one head's state, through one run."""
    wait_for_inputs(PDL)
    C: tl.constexpr = H * P + 2 * GROUPS * N
    request, head = tl.program_id(0), tl.program_id(1)
    start, length, context, begin, end = _run(query_start_loc, context_lens, seq_lens, request)
    row = tl.load(state_rows + request)
    features = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    columns = tl.arange(0, BLOCK_N)
    feature_mask, column_mask = features < P, columns < N
    mask = feature_mask[:, None] & column_mask[None, :]
    of_head = (row * H + head) * P
    state_at = ssm + (of_head + features)[:, None] * N + columns[None, :]
    output_at = out + head * P + features
    b_column = H * P + (head // (H // GROUPS)) * N

    if end > begin:
        step = begin
        state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
        if context > 0:
            state = tl.load(state_at, mask=mask, other=0.0)
            step = tl.load(folded + of_head + tl.program_id(2) * BLOCK_P) - context
        fold_to = tl.maximum(begin, end - RUN_LENGTH)
        if TENTATIVE:
            fold_to = end
        a = -tl.exp(tl.load(a_log + head).to(tl.float32))
        d = tl.load(skip + head).to(tl.float32)
        bias = tl.load(dt_bias + head).to(tl.float32)
        while step < end:
            if step == fold_to:
                tl.store(state_at, state, mask=mask)
            token = start + step
            token_at, input_at = activated + token * C, inputs + token * row_stride
            if step < 0:
                place = row * W + (context + step) % W
                token_at, input_at = kept_activated + place * C, kept_inputs + place * (C + H)
            dt = _softplus(tl.load(input_at + C + head).to(tl.float32) + bias)
            dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
            x = tl.load(token_at + head * P + features, mask=feature_mask, other=0.0)
            x = x.to(tl.float32)
            b = tl.load(token_at + b_column + columns, mask=column_mask, other=0.0)
            update = (dt * x)[:, None] * b.to(tl.float32)[None, :]
            state = tl.fma(state, tl.exp(dt * a), update)
            if step >= 0:
                c_at = token_at + b_column + GROUPS * N + columns
                c = tl.load(c_at, mask=column_mask, other=0.0).to(tl.float32)
                y = tl.fma(d, x, tl.sum(state * c[None, :], axis=1))
                tl.store(output_at + token * (H * P), y, mask=feature_mask)
            step += 1
        if not TENTATIVE:
            numbers = tl.zeros([BLOCK_P], tl.int32) + (context + fold_to)
            tl.store(folded + of_head + features, numbers, mask=feature_mask)
    # Rows of no token are read by the layers that follow.
    nothing = tl.zeros([BLOCK_P], tl.float32)
    step = 0
    while step < length:
        if (step < begin) | (step >= end):
            tl.store(output_at + (start + step) * (H * P), nothing, mask=feature_mask)
        step += 1


@triton.jit
def _keep_run_kernel(
    inputs,  # [T, C + H], rows row_stride apart
    activated,  # [T, C]
    kept_inputs,  # [S, W, C + H]
    kept_activated,  # [S, W, C]
    query_start_loc,
    context_lens,
    seq_lens,
    state_rows,
    row_stride,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One of the last W tokens of one run, some channels."""
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    start, _, context, begin, end = _run(query_start_loc, context_lens, seq_lens, request)
    step = end - 1 - tl.program_id(1)
    if step >= begin:
        columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        place = tl.load(state_rows + request) * W + (context + step) % W
        token = start + step
        mask = columns < C + H
        own = tl.load(inputs + token * row_stride + columns, mask=mask)
        tl.store(kept_inputs + place * (C + H) + columns, own, mask=mask)
        mask = columns < C
        own = tl.load(activated + token * C + columns, mask=mask)
        tl.store(kept_activated + place * C + columns, own, mask=mask)


@triton.jit
def _gated_rms_norm_kernel(
    y,  # [T, D] float32
    gate,  # [T, D], rows row_stride apart
    weight,  # [D]
    out,  # [T, D]
    row_stride,
    eps,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One group of one row."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, BLOCK)
    mask = inside < SIZE
    columns = tl.program_id(1) * SIZE + inside
    z = tl.load(gate + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(y + row * D + columns, mask=mask, other=0.0) * (z / (1.0 + tl.exp(-z)))
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    result = scale * (value * inverse)
    tl.store(out + row * D + columns, result.to(out.dtype.element_ty), mask=mask)


def _places(runs: Runs) -> tuple[Tensor, ...]:
    return runs.query_start_loc, runs.context_lens, runs.seq_lens, runs.state_rows


def _options(like: Tensor) -> dict[str, Any]:
    return {"enable_fp_fusion": False, **pdl_options(like)}


def causal_conv(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, runs: Runs
) -> Tensor:
    """``specdec.kernels.mamba.causal_conv``."""
    channels, taps = weight.shape
    out = torch.empty(inputs.shape[0], channels, dtype=inputs.dtype, device=inputs.device)
    tokens = triton.cdiv(runs.max_query_len, _BLOCK_T)
    grid = (runs.state_rows.shape[0], tokens, triton.cdiv(channels, _BLOCK_C))
    _causal_conv_kernel[grid](
        inputs,
        weight,
        bias if bias is not None else weight,
        out,
        state.inputs,
        *_places(runs),
        inputs.stride(0),
        C=channels,
        TAPS=taps,
        W=state.num_kept,
        KEPT_WIDTH=state.inputs.shape[2],
        HAS_BIAS=bias is not None,
        BLOCK_T=_BLOCK_T,
        BLOCK_C=_BLOCK_C,
        num_warps=4,
        **_options(inputs),
    )
    return out


def selective_scan(
    activated: Tensor,
    inputs: Tensor,
    a_log: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    state: LayerState,
    runs: Runs,
    config: ScanConfig,
) -> Tensor:
    """``specdec.kernels.mamba.selective_scan``."""
    num_heads, head_size, state_size = state.ssm.shape[1:]
    shape = (inputs.shape[0], num_heads * head_size)
    out = torch.empty(shape, dtype=torch.float32, device=inputs.device)
    block = min(triton.next_power_of_2(head_size), _BLOCK_P)
    grid = (runs.state_rows.shape[0], num_heads, triton.cdiv(head_size, block))
    _selective_scan_kernel[grid](
        activated,
        inputs,
        out,
        a_log,
        skip,
        dt_bias,
        state.ssm,
        state.folded,
        state.inputs,
        state.activated,
        *_places(runs),
        inputs.stride(0),
        config.dt_min,
        config.dt_max,
        H=num_heads,
        P=head_size,
        N=state_size,
        GROUPS=config.num_groups,
        W=state.num_kept,
        RUN_LENGTH=config.run_length,
        TENTATIVE=runs.tentative,
        BLOCK_P=block,
        BLOCK_N=triton.next_power_of_2(state_size),
        num_warps=4,
        **_options(inputs),
    )
    return out


def keep_run(inputs: Tensor, activated: Tensor, state: LayerState, runs: Runs) -> None:
    """``specdec.kernels.mamba.keep_run``."""
    channels = activated.shape[1]
    width = state.inputs.shape[2]
    most = min(runs.max_query_len, state.num_kept)
    block = min(triton.next_power_of_2(width), 1024)
    _keep_run_kernel[(runs.state_rows.shape[0], most, triton.cdiv(width, block))](
        inputs,
        activated,
        state.inputs,
        state.activated,
        *_places(runs),
        inputs.stride(0),
        C=channels,
        H=width - channels,
        W=state.num_kept,
        BLOCK=block,
        num_warps=4,
        **_options(inputs),
    )


def gated_rms_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int) -> Tensor:
    """``specdec.kernels.mamba.gated_rms_norm``."""
    num_rows, size = y.shape
    out = torch.empty(num_rows, size, dtype=gate.dtype, device=y.device)
    block = triton.next_power_of_2(size // num_groups)
    _gated_rms_norm_kernel[(num_rows, num_groups)](
        y,
        gate,
        weight,
        out,
        gate.stride(0),
        eps,
        D=size,
        SIZE=size // num_groups,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        **_options(y),
    )
    return out
