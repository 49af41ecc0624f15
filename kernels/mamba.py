"""Mamba-2 layers over runs of tokens whose ends may be taken back.

Source: Dao and Gu, "Transformers are SSMs", 2024; the layer is laid out as in transformers.

Shape letters: T token rows, R requests, S state rows, H heads, P features of a head, N features of
the state, G groups of heads that share B and C, C = H * P + 2 * G * N channels of the convolution,
K taps of it, W tokens that a state row keeps.

A request's state is what its first ``folded`` tokens make of nothing, and what the newest W tokens
were made of (``inputs``, ``activated``). A pass that starts at position c folds the tokens from
``folded`` up to c into the state, since those are committed by now, and goes on over its own tokens
without storing what it comes to: whichever of them are rejected, the next pass folds those that
were not. So a step reads and writes one state per request, however many tokens it verifies.

A token's result depends on the tokens before it alone, added up one by one in their order, and not
on how passes cut the text.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerState:
    """The states of one layer; views of memory at fixed addresses."""

    ssm: Tensor  # [S, H, P, N] float32: what the folded tokens come to
    # [S, H, P] int32: how many those are. One number for each row of a state, so that whoever owns
    # the row owns its number too.
    folded: Tensor
    inputs: Tensor  # [S, W, C + H]: of the token at position p at p % W, before the convolution
    activated: Tensor  # [S, W, C]: the same tokens behind it

    @property
    def num_kept(self) -> int:
        return self.inputs.shape[1]


@dataclass(frozen=True)
class Runs:
    """Where the rows of a batch stand; see ``AttentionMetadata``. A state row has one request."""

    num_tokens: int  # T

    query_start_loc: Tensor  # [R + 1] int32
    context_lens: Tensor  # [R] int32
    seq_lens: Tensor  # [R] int32
    state_rows: Tensor  # [R] int64; the last state row takes no writes
    max_query_len: int
    tentative: bool  # tokens before these may be rejected too: nothing is folded

    @cached_property
    def spans(self) -> "_Spans":
        return _Spans(self)


@dataclass(frozen=True, slots=True)
class ScanConfig:
    """The constants of a layer's recurrence."""

    num_groups: int
    run_length: int  # tokens at the end of a run that stay out of the state, to be taken back
    dt_min: float
    dt_max: float


def causal_conv(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, runs: Runs
) -> Tensor:
    """SiLU of a causal convolution along each request's tokens, channel by channel: [T, C].

    inputs [T, C + H], rows apart by any stride; weight [C, K]; bias [C]. Taps are added in order in
    float32; the sum is rounded to the dtype before and after SiLU. Tokens before a run are read
    from the state. Rows at or past a request's end are zero.
    """
    if inputs.is_cuda:
        from specdec.kernels import mamba_triton

        return mamba_triton.causal_conv(inputs, weight, bias, state, runs)
    return causal_conv_reference(inputs, weight, bias, state, runs)


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
    """The recurrence ``h = exp(dt * A) h + dt * x B``, ``y = h C + skip * x``: [T, H * P] float32.

    activated [T, C] holds x, B and C of each token; the last H features of ``inputs`` [T, C + H]
    its dt before bias and softplus; a_log, skip and dt_bias [H], A = -exp(a_log). Brings the folded
    part of ``state`` up to date (module docstring). A run at position 0 starts from nothing,
    whatever its state row holds. Rows at or past a request's end are zero.
    """
    arguments = (activated, inputs, a_log, skip, dt_bias, state, runs, config)
    if inputs.is_cuda:
        from specdec.kernels import mamba_triton

        return mamba_triton.selective_scan(*arguments)
    return selective_scan_reference(*arguments)


def keep_run(inputs: Tensor, activated: Tensor, state: LayerState, runs: Runs) -> None:
    """Put the last W tokens of every run where the passes after it find them.

    Comes last, since it writes over what the others read.
    """
    if inputs.is_cuda:
        from specdec.kernels import mamba_triton

        mamba_triton.keep_run(inputs, activated, state, runs)
    else:
        keep_run_reference(inputs, activated, state, runs)


def gated_rms_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int) -> Tensor:
    """``rms_norm(y * silu(gate)) * weight`` over each group of features.

    y [T, D] float32; gate [T, D], rows apart by any stride; weight [D] -> [T, D] in gate's dtype,
    computed in float32 and rounded once.
    """
    if y.is_cuda:
        from specdec.kernels import mamba_triton

        return mamba_triton.gated_rms_norm(y, gate, weight, eps, num_groups)
    return gated_rms_norm_reference(y, gate, weight, eps, num_groups)


# -- the same in plain PyTorch, without a look at any value ----------------------------------------


class _Spans:
    """The tokens of each run as columns 0 .. Q - 1 of a matrix. What all layers of a pass share."""

    def __init__(self, runs: Runs) -> None:
        self.state_rows = runs.state_rows[:, None]
        starts = runs.query_start_loc[:-1].long()
        lengths = runs.query_start_loc[1:].long() - starts  # [R]
        self.context = runs.context_lens.long()
        # Columns that exist: from the text's first token to its end.
        self.begin = (-self.context).clamp_min(0)
        valid = torch.minimum(runs.seq_lens.long() - self.context, lengths)
        self.end = valid.where(runs.seq_lens > 0, 0)
        self.steps = torch.arange(runs.max_query_len, device=starts.device)
        self.token_rows = starts[:, None] + self.steps  # [R, Q]
        self.exists = (self.steps >= self.begin[:, None]) & (self.steps < self.end[:, None])
        # A place behind all tokens, for columns without one.
        self.num_rows = runs.num_tokens
        in_run = self.steps < lengths[:, None]
        self.targets = self.token_rows.where(in_run, self.num_rows)
        self.sources = self.token_rows.clamp_max(self.num_rows - 1)

    def gather(self, rows: Tensor, kept: Tensor, back: int) -> Tensor:
        """[R, back + Q, features]: of ``rows`` [T, features], and before a run of ``kept``."""
        before = torch.arange(-back, 0, device=self.steps.device)
        places = (self.context[:, None] + before) % kept.shape[1]
        return torch.cat([kept[self.state_rows, places], rows[self.sources]], dim=1)

    def scatter(self, values: Tensor) -> Tensor:
        """[T, features] of ``values`` [R, Q, features]; zero where no token is."""
        out = values.new_zeros(self.num_rows + 1, values.shape[2])
        out[self.targets] = values.where(self.exists[..., None], 0)
        return out[: self.num_rows]


def causal_conv_reference(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, runs: Runs
) -> Tensor:
    """Plain PyTorch twin of ``causal_conv``."""
    channels, taps = weight.shape
    spans, back = runs.spans, taps - 1
    window = spans.gather(inputs, state.inputs, back)[..., :channels]
    steps = torch.arange(-back, runs.max_query_len, device=inputs.device)
    in_text = spans.context[:, None] + steps >= 0
    window = window.float().where(in_text[..., None], 0.0)
    total = torch.zeros_like(window[:, back:])
    if bias is not None:
        total = total + bias.float()
    for tap in range(taps):
        end = tap + runs.max_query_len
        total = total + window[:, tap:end] * weight[:, tap].float()
    return spans.scatter(F.silu(total.to(inputs.dtype).float()).to(inputs.dtype))


def selective_scan_reference(
    activated: Tensor,
    inputs: Tensor,
    a_log: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    state: LayerState,
    runs: Runs,
    config: ScanConfig,
) -> Tensor:
    """Plain PyTorch twin of ``selective_scan``."""
    num_heads, head_size, state_size = state.ssm.shape[1:]
    groups, rows, spans = config.num_groups, runs.state_rows, runs.spans
    # Tokens that are not folded yet and stand before a run are at most as many.
    back = config.run_length
    tokens = spans.gather(activated, state.activated, back).float()
    dt = spans.gather(inputs[:, -num_heads:], state.inputs[..., -num_heads:], back).float()
    dt = F.softplus(dt + dt_bias.float()).clamp(config.dt_min, config.dt_max)  # [R, n, H]
    sizes = [num_heads * head_size, groups * state_size, groups * state_size]
    x, b, c = tokens.split(sizes, dim=2)
    x = x.unflatten(2, (num_heads, head_size))
    b, c = (
        each.unflatten(2, (groups, state_size)).repeat_interleave(num_heads // groups, dim=2)
        for each in (b, c)
    )
    old, old_folded = state.ssm[rows], state.folded[rows]
    is_new = spans.context <= 0
    begin = torch.where(is_new, spans.begin, old_folded[:, 0, 0] - spans.context)
    fold_to = torch.maximum(spans.begin, spans.end - config.run_length)
    steps = torch.arange(-back, runs.max_query_len, device=dt.device)
    is_run = (steps >= begin[:, None]) & (steps < spans.end[:, None])
    folds = (is_run & (steps == fold_to[:, None]))[..., None, None, None]
    # A step over no token leaves the state as it is, to the bit: times one, plus zero.
    decay = torch.exp(dt * -torch.exp(a_log.float())).where(is_run[..., None], 1.0)
    added = (dt[..., None] * x).where(is_run[..., None, None], 0.0)
    b = b.where(is_run[..., None, None], 0.0)
    columns = (each.unbind(1) for each in (
        folds, decay[..., None, None], added[..., None], b[:, :, :, None], c[:, :, :, None]
    ))  # fmt: skip
    current = old.where(~is_new[:, None, None, None], 0.0)
    folded, outputs = old, []
    for step, (fold, kept, new, across, out) in enumerate(zip(*columns, strict=True), -back):
        folded = current.where(fold, folded)
        current = torch.addcmul(new * across, current, kept)
        if step >= 0:
            outputs.append((current * out).sum(-1))
    if not runs.tentative:
        has_run = (spans.end > spans.begin)[:, None, None]
        state.ssm[rows] = folded
        new_folded = (spans.context + fold_to).int()[:, None, None]
        state.folded[rows] = new_folded.where(has_run, old_folded)
    y = torch.stack(outputs, dim=1) + skip.float()[:, None] * x[:, back:]
    return spans.scatter(y.flatten(2))


def keep_run_reference(inputs: Tensor, activated: Tensor, state: LayerState, runs: Runs) -> None:
    """Plain PyTorch twin of ``keep_run``."""
    spans = runs.spans
    is_kept = spans.exists & (spans.steps >= spans.end[:, None] - state.num_kept)
    # What is not kept goes to the row that nobody reads.
    rows = spans.state_rows.where(is_kept, state.inputs.shape[0] - 1)
    places = ((spans.context[:, None] + spans.steps) % state.num_kept).where(is_kept, 0)
    for kept, values in ((state.inputs, inputs), (state.activated, activated)):
        kept[rows, places] = values[spans.sources].where(is_kept[..., None], 0)


def gated_rms_norm_reference(
    y: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int
) -> Tensor:
    """Plain PyTorch twin of ``gated_rms_norm``."""
    gated = (y * F.silu(gate.float())).unflatten(1, (num_groups, -1))
    inverse = torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * (gated * inverse).flatten(1)).to(gate.dtype)
