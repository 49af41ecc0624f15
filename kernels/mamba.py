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


@dataclass(frozen=True, slots=True)
class Runs:
    """Where the rows of a batch stand; see ``AttentionMetadata``. A state row has one request."""

    query_start_loc: Tensor  # [R + 1] int32
    context_lens: Tensor  # [R] int32
    seq_lens: Tensor  # [R] int32
    state_rows: Tensor  # [R] int64; the last state row takes no writes
    max_query_len: int
    tentative: bool  # tokens before these may be rejected too: nothing is folded


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
    """The tokens of each run as columns of a matrix, from ``first`` (negative: before it) on."""

    def __init__(self, runs: Runs, first: int) -> None:
        device = runs.context_lens.device
        self.steps = torch.arange(first, runs.max_query_len, device=device)  # [n]
        starts = runs.query_start_loc[:-1].long()
        self.lengths = runs.query_start_loc[1:].long() - starts  # [R]
        self.context = runs.context_lens.long()
        # Rows that exist: from the text's first token to its end.
        self.begin = (-self.context).clamp_min(0)
        valid = torch.minimum(runs.seq_lens.long() - self.context, self.lengths)
        self.end = valid.where(runs.seq_lens > 0, 0)
        self.token_rows = starts[:, None] + self.steps  # [R, n]
        self.in_run = (self.steps >= 0) & (self.steps < self.lengths[:, None])
        self.exists = (self.steps >= self.begin[:, None]) & (self.steps < self.end[:, None])
        self.positions = self.context[:, None] + self.steps

    def gather(self, rows: Tensor, kept: Tensor, state_rows: Tensor) -> Tensor:
        """[R, n, features]: from ``rows`` [T, features], before a run from ``kept`` [S, W, .]."""
        own = rows[self.token_rows.clamp(0, rows.shape[0] - 1)]
        earlier = kept[state_rows[:, None], self.positions % kept.shape[1]]
        return own.where(self.steps[:, None] >= 0, earlier)

    def scatter(self, values: Tensor, num_rows: int) -> Tensor:
        """[num_rows, features] of ``values`` [R, n, features]; zero where no token is."""
        values = values.where(self.exists[..., None], 0)
        out = values.new_zeros(num_rows + 1, values.shape[2])
        out[self.token_rows.where(self.in_run, num_rows)] = values
        return out[:num_rows]


def causal_conv_reference(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, runs: Runs
) -> Tensor:
    """Plain PyTorch twin of ``causal_conv``."""
    channels, taps = weight.shape
    spans = _Spans(runs, 1 - taps)
    window = spans.gather(inputs, state.inputs, runs.state_rows)[..., :channels]
    window = window.float().where((spans.positions >= 0)[..., None], 0.0)
    total = torch.zeros_like(window[:, taps - 1 :])
    if bias is not None:
        total = total + bias.float()
    for tap in range(taps):
        end = tap + runs.max_query_len
        total = total + window[:, tap:end] * weight[:, tap].float()
    out = F.silu(total.to(inputs.dtype).float()).to(inputs.dtype)
    return _Spans(runs, 0).scatter(out, inputs.shape[0])


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
    groups, rows = config.num_groups, runs.state_rows
    # Before a run stand at most all kept tokens that are not folded yet.
    spans = _Spans(runs, -state.num_kept)
    tokens = spans.gather(activated, state.activated, rows).float()
    dt = spans.gather(inputs, state.inputs, rows)[..., -num_heads:].float()
    dt = F.softplus(dt + dt_bias.float()).clamp(config.dt_min, config.dt_max)  # [R, n, H]
    sizes = [num_heads * head_size, groups * state_size, groups * state_size]
    x, b, c = tokens.split(sizes, dim=2)
    x = x.unflatten(2, (num_heads, head_size))
    b, c = (
        each.unflatten(2, (groups, state_size)).repeat_interleave(num_heads // groups, dim=2)
        for each in (b, c)
    )
    decay = torch.exp(dt * -torch.exp(a_log.float()))

    old, old_folded = state.ssm[rows], state.folded[rows]
    is_new = spans.context <= 0
    begin = torch.where(is_new, spans.begin, old_folded[:, 0, 0] - spans.context)
    fold_to = torch.maximum(spans.begin, spans.end - config.run_length)
    current = old.where(~is_new[:, None, None, None], 0.0)
    folded, outputs = old, []
    for column, step in enumerate(range(-state.num_kept, runs.max_query_len)):
        runs_here = (step >= begin) & (step < spans.end)
        folds = (runs_here & (step == fold_to))[:, None, None, None]
        folded = current.where(folds, folded)
        update = (dt[:, column, :, None] * x[:, column])[..., None] * b[:, column, :, None]
        after = current * decay[:, column, :, None, None] + update
        current = after.where(runs_here[:, None, None, None], current)
        if step >= 0:
            y = (current * c[:, column, :, None]).sum(-1)
            outputs.append(y + skip.float()[:, None] * x[:, column])
    if not runs.tentative:
        has_run = (spans.end > spans.begin)[:, None, None]
        state.ssm[rows] = folded
        new_folded = (spans.context + fold_to).int()[:, None, None]
        state.folded[rows] = new_folded.where(has_run, old_folded)
    y = torch.stack(outputs, dim=1).flatten(2)
    return _Spans(runs, 0).scatter(y, inputs.shape[0])


def keep_run_reference(inputs: Tensor, activated: Tensor, state: LayerState, runs: Runs) -> None:
    """Plain PyTorch twin of ``keep_run``."""
    spans = _Spans(runs, 0)
    is_kept = spans.exists & (spans.steps >= spans.end[:, None] - state.num_kept)
    rows = runs.state_rows[:, None].where(is_kept, state.inputs.shape[0] - 1)
    places = (spans.positions % state.num_kept).where(is_kept, 0)
    for kept, values in ((state.inputs, inputs), (state.activated, activated)):
        own = values[spans.token_rows.clamp(0, values.shape[0] - 1)]
        # What is not kept goes to the row that nobody reads.
        kept[rows, places] = own.where(is_kept[..., None], 0)


def gated_rms_norm_reference(
    y: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int
) -> Tensor:
    """Plain PyTorch twin of ``gated_rms_norm``."""
    gated = (y * F.silu(gate.float())).unflatten(1, (num_groups, -1))
    inverse = torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * (gated * inverse).flatten(1)).to(gate.dtype)
