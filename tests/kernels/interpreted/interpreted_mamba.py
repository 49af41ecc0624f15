"""The kernels of Mamba-2 layers: against float64, their twins, and their own bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specdec.kernels import mamba, mamba_triton

HEADS, SIZE, STATE, GROUPS, TAPS = 4, 9, 12, 2, 4
INNER = HEADS * SIZE
CHANNELS = INNER + 2 * GROUPS * STATE
RUN_LENGTH = 3
NUM_ROWS = 5
CONFIG = mamba.ScanConfig(num_groups=GROUPS, run_length=RUN_LENGTH, dt_min=0.0, dt_max=float("inf"))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS: dict[str, Any] = {
    "conv": randn(CHANNELS, TAPS, seed=1) / 2,
    "bias": randn(CHANNELS, seed=2) / 4,
    "a_log": randn(HEADS, seed=3) / 2 - 1,
    "skip": randn(HEADS, seed=4),
    "dt_bias": randn(HEADS, seed=5) - 1,
}


def poisoned_state() -> mamba.LayerState:
    """As an earlier owner may leave it, but NaN: what is read before it is written shows."""
    kept = RUN_LENGTH + TAPS - 1
    return mamba.LayerState(
        ssm=torch.full((NUM_ROWS, HEADS, SIZE, STATE), torch.nan),
        folded=torch.full((NUM_ROWS, HEADS, SIZE), 77, dtype=torch.int32),
        inputs=torch.full((NUM_ROWS, kept, CHANNELS + HEADS), torch.nan),
        activated=torch.full((NUM_ROWS, kept, CHANNELS), torch.nan),
    )


def runs(contexts, lengths, valid=None, rows=None, tentative=False) -> mamba.Runs:
    """``valid``: tokens of each run that exist, all by default; 0 is a row of padding."""
    valid = lengths if valid is None else valid
    ends = [c + n if n else 0 for c, n in zip(contexts, valid, strict=True)]
    loc = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return mamba.Runs(
        num_tokens=sum(lengths),
        query_start_loc=torch.tensor(loc, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        state_rows=torch.tensor(list(range(len(lengths))) if rows is None else rows),
        max_query_len=max(lengths),
        tentative=tentative,
    )


def layer(module, projected: torch.Tensor, state: mamba.LayerState, batch: mamba.Runs):
    """A layer between its projections. projected [T, INNER + CHANNELS + HEADS]."""
    suffix = "_reference" if module is mamba else ""
    conv, scan, keep, norm = (
        getattr(module, name + suffix)
        for name in ("causal_conv", "selective_scan", "keep_run", "gated_rms_norm")
    )
    gate, inputs = projected[:, :INNER], projected[:, INNER:]
    activated = conv(inputs, WEIGHTS["conv"], WEIGHTS["bias"], state, batch)
    weights = (WEIGHTS["a_log"], WEIGHTS["skip"], WEIGHTS["dt_bias"])
    y = scan(activated, inputs, *weights, state, batch, CONFIG)
    keep(inputs, activated, state, batch)
    return norm(y, gate, torch.ones(INNER), 1e-5, GROUPS)


def projections(length: int, seed: int) -> torch.Tensor:
    return randn(length, INNER + CHANNELS + HEADS, seed=10 + seed)


def exact(projected: torch.Tensor) -> torch.Tensor:
    """A whole text at once in float64, by the definition."""
    gate, inputs, dt = projected.double().split([INNER, CHANNELS, HEADS], dim=1)
    weights = {name: each.double() for name, each in WEIGHTS.items()}
    padded = F.pad(inputs.T, (TAPS - 1, 0))
    activated = F.silu(
        F.conv1d(padded[None], weights["conv"][:, None], weights["bias"], groups=CHANNELS)[0].T
    )
    x, b, c = activated.split([INNER, GROUPS * STATE, GROUPS * STATE], dim=1)
    dt = F.softplus(dt + weights["dt_bias"])
    h, out = torch.zeros(HEADS, SIZE, STATE, dtype=torch.float64), []
    for t in range(len(projected)):
        xt = x[t].view(HEADS, SIZE)
        bt, ct = (each[t].view(GROUPS, 1, STATE).expand(-1, 2, -1).flatten(0, 1) for each in (b, c))
        h = h * (-dt[t] * weights["a_log"].exp()).exp()[:, None, None]
        h = h + dt[t][:, None, None] * xt[..., None] * bt[:, None]
        out.append((h * ct[:, None]).sum(-1) + weights["skip"][:, None] * xt)
    y = (torch.stack(out).flatten(1) * F.silu(gate)).view(-1, GROUPS, INNER // GROUPS)
    return (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1)


MODULES = {"triton": mamba_triton, "twin": mamba}


@pytest.fixture(params=MODULES)
def module(request):
    return MODULES[request.param]


def test_texts_of_several_lengths(module) -> None:
    """Prompts of one batch, the last row of the state untouched by a row of padding."""
    lengths = [1, 13, 2, 2]
    texts = [projections(length, seed=i) for i, length in enumerate(lengths)]
    state = poisoned_state()
    batch = runs([0] * 4, lengths, valid=[1, 13, 2, 0], rows=[0, 1, 2, NUM_ROWS - 1])
    *outs, padding = layer(module, torch.cat(texts), state, batch).split(lengths)
    for text, own in zip(texts, outs, strict=False):
        torch.testing.assert_close(own.double(), exact(text), rtol=0, atol=2e-5)
    assert not padding.any()
    assert state.ssm[NUM_ROWS - 1].isnan().all()
    assert state.folded[:3, 0, 0].tolist() == [0, 10, 0]


@pytest.mark.parametrize("cuts", [[1] * 13, [3, 1, 4, 2, 3]], ids=str)
def test_bits_do_not_depend_on_chunks(module, cuts) -> None:
    text = projections(13, seed=1)
    whole = layer(module, text, poisoned_state(), runs([0], [13]))
    state, out, start = poisoned_state(), [], 0
    for length in cuts:
        batch = runs([start], [length])
        out.append(layer(module, text[start : start + length], state, batch))
        start += length
    if module is mamba:
        torch.testing.assert_close(torch.cat(out), whole)
    else:
        assert torch.equal(torch.cat(out), whole)


@pytest.mark.parametrize("accepted", [[0] * 3, [1, 0, 2, 2, 0]], ids=str)
def test_rejected_tokens_leave_no_trace(module, accepted) -> None:
    """Runs of three tokens of which some are wrong; each next run starts behind those that stay.

    Two requests side by side, the second with rows at its end that do not exist.
    """
    text, wrong = projections(20, seed=1), projections(20, seed=2)
    whole = layer(module, text, poisoned_state(), runs([0], [20]))
    state = poisoned_state()
    prompts = runs([0, 0], [7, 4], rows=[3, 1])
    layer(module, torch.cat([text[:7], text[:4]]), state, prompts)
    places = [7, 4]
    for kept in accepted:
        given, valid = [], [3, kept + 1]
        for at in places:
            given += [text[at : at + kept + 1], wrong[at + kept + 1 : at + 3]]
        batch = runs(places, [3, 3], valid, rows=[3, 1])
        out = layer(module, torch.cat(given), state, batch).view(2, 3, -1)
        for request, at in enumerate(places):
            torch.testing.assert_close(out[request, : kept + 1], whole[at : at + kept + 1])
            if module is mamba_triton:
                assert torch.equal(out[request, : kept + 1], whole[at : at + kept + 1])
        # Rows that do not exist give nothing, the next layers can read them.
        assert not out[1, kept + 1 :].any()
        places = [at + kept + 1 for at in places]


def test_a_run_again_gives_the_same(module) -> None:
    text = projections(12, seed=1)
    state = poisoned_state()
    layer(module, text[:6], state, runs([0], [6]))
    layer(module, text[6:9], state, runs([6], [3]))
    first = layer(module, text[7:10], state, runs([7], [3]))
    again = layer(module, text[7:10], state, runs([7], [3]))
    assert torch.equal(first, again)


def test_tentative_runs_fold_nothing(module) -> None:
    """Drafting: single tokens behind each other, then the same places with other tokens."""
    text, wrong = projections(12, seed=1), projections(12, seed=2)
    whole = layer(module, text, poisoned_state(), runs([0], [12]))
    state = poisoned_state()
    layer(module, text[:6], state, runs([0], [6]))
    layer(module, text[6:8], state, runs([6], [2]))
    before = state.ssm.clone(), state.folded.clone()
    layer(module, wrong[8:9], state, replace(runs([8], [1]), tentative=True))
    for now, then in zip((state.ssm, state.folded), before, strict=True):
        assert torch.equal(now.nan_to_num(9.0), then.nan_to_num(9.0))
    out = layer(module, text[7:10], state, runs([7], [3]))
    torch.testing.assert_close(out, whole[7:10])


def test_a_run_that_begins_before_its_text(module) -> None:
    """A draft's first pass may hold a row at position -1."""
    text = projections(3, seed=1)
    whole = layer(module, text, poisoned_state(), runs([0], [3]))
    state = poisoned_state()
    given = torch.cat([projections(1, seed=2), text[:1]])
    out = layer(module, given, state, runs([-1], [2]))
    assert not out[0].any()
    torch.testing.assert_close(out[1:], whole[:1])
    torch.testing.assert_close(layer(module, text[1:], state, runs([1], [2])), whole[1:])


def test_extreme_steps(module) -> None:
    """Softplus far out on both sides, and the limits of a step."""
    dt = torch.tensor([-90.0, -20.0, -1e-3, 3.0, 19.0, 25.0, 90.0])
    text = projections(len(dt), seed=1)
    text[:, -HEADS:] = dt[:, None] - WEIGHTS["dt_bias"]
    out = layer(module, text, poisoned_state(), runs([0], [len(dt)]))
    torch.testing.assert_close(out.double(), exact(text), rtol=0, atol=2e-5)
    state, batch = poisoned_state(), runs([0], [len(dt)])
    name = "selective_scan" + ("_reference" if module is mamba else "")
    scan, inputs = getattr(module, name), text[:, INNER:]
    weights = (WEIGHTS["a_log"], WEIGHTS["skip"], WEIGHTS["dt_bias"])
    limited = replace(CONFIG, dt_min=0.5, dt_max=2.0)
    wanted = inputs.clone()
    # What softplus takes to the limits.
    low, high = (torch.log(torch.expm1(torch.tensor(limit))) for limit in (0.5, 2.0))
    wanted[:, -HEADS:] = (wanted[:, -HEADS:] + WEIGHTS["dt_bias"]).clamp(low, high)
    wanted[:, -HEADS:] -= WEIGHTS["dt_bias"]
    args = (inputs[:, :CHANNELS].contiguous(),)
    torch.testing.assert_close(
        scan(*args, inputs, *weights, state, batch, limited),
        scan(*args, wanted, *weights, poisoned_state(), batch, CONFIG),
    )
