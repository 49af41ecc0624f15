"""Cuts, choices and acceptance of sampled rows against their plain-PyTorch twins."""

import pytest
import torch
from sampling_rows import KINDS, row_of, sampling_rows

from specdec.kernels import accept_sampled_triton, sampler_triton
from specdec.kernels.sampler import kept_weights, log_probs_reference, scaled_logits
from specdec.verifier import acceptance, sampling

NAN, INF = float("nan"), float("inf")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids_of(choice: torch.Tensor) -> torch.Tensor:
    return 0x7FFFFFFF - (choice & 0xFFFFFFFF)


def assert_drawn(logits: torch.Tensor, rows) -> sampler_triton.Drawn:
    """Cuts and choices as the twin's; masses up to the last bits of the exponentials."""
    drawn = sampler_triton.draw(logits, rows, drafts=False)
    scaled = scaled_logits(logits, rows)
    weights = kept_weights(logits, scaled, rows)
    scores = scaled.where(weights > 0, -torch.inf)
    wanted = sampling.coupled_tokens(scores, rows)
    wanted = torch.where(rows.greedy[:, None], logits.argmax(-1), wanted)
    assert torch.equal(ids_of(drawn.choice).view_as(wanted), wanted)
    live = ~rows.greedy
    mass = drawn.mass.view_as(wanted)[live].double()
    torch.testing.assert_close(mass, weights.sum(-1)[live].double(), rtol=1e-6, atol=0)
    return drawn


@pytest.mark.parametrize(
    ("vocab_size", "scale", "step"), [(100, 3.0, 0), (3000, 3.0, 0), (3000, 0.3, 0.125)]
)
def test_log_probs(vocab_size, scale, step) -> None:
    """Kept tokens are the same, over a buffer that holds all, and over one that does not."""
    rows = sampling_rows(KINDS)
    logits = randn(len(KINDS), 1, vocab_size) * scale
    if step:
        logits = (logits / step).round() * step
    logits[::2, :, 5:9] = -INF
    wanted = log_probs_reference(logits, rows)[~rows.greedy]
    result = sampler_triton.log_probs(logits, rows)[~rows.greedy]
    assert torch.equal(result.isinf(), wanted.isinf())
    torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)


def test_a_whole_vocabulary(monkeypatch) -> None:
    """A sharp row among few candidates, a flat one that the row itself is searched for, and one
    without a cut."""
    monkeypatch.setattr(sampler_triton, "CHUNK", 32768)
    rows = sampling_rows([(0.8, 50, 0.95, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.0)])
    logits = randn(3, 1, 128_256) * torch.tensor([3.0, 1.0, 2.0])[:, None, None]
    assert_drawn(logits, rows)


@pytest.mark.parametrize(
    ("kind", "count"),
    [((1.0, 3, 1.0, 0.0), 3), ((2.0, 0, 0.25, 0.0), 600), ((1.0, 1500, 0.5, 0.0), 750)],
)
def test_equal_logits_at_a_border_keep_the_lower_ids(kind, count) -> None:
    """More equal logits than candidates fit, so that ids alone decide."""
    rows, logits = sampling_rows([kind]), torch.full((1, 1, 2500), 0.7)
    logits[..., 2400:] = -200.0
    result = sampler_triton.log_probs(logits, rows)
    assert (result > -INF).nonzero()[:, 2].tolist() == list(range(count))


def test_a_row_depends_on_itself_alone(monkeypatch) -> None:
    """All bits: among others and alone, in one part or in several, in wider rows or in none."""
    rows = sampling_rows(KINDS)
    wide = randn(len(KINDS), 1, 2500) * 2
    logits = wide[..., :2100]
    together = sampler_triton.draw(sampler_triton.flat_rows(logits), rows, drafts=True)
    monkeypatch.setattr(sampler_triton, "CHUNK", 512)
    for row in range(0, len(KINDS), 3):
        alone = logits[row : row + 1].contiguous()
        drawn = sampler_triton.draw(alone, row_of(rows, row), drafts=True)
        for one, other in zip(drawn, together, strict=True):
            assert torch.equal(one[0], other[row])


def test_rows_that_are_not_finite_stay_alone() -> None:
    logits = randn(5, 1, 100)
    logits[0, 0, 3], logits[2, 0, 99], logits[3] = NAN, INF, -INF
    rows = sampling_rows([(0.8, 5, 0.9, 0.0)] * 5, coupled=False)
    drawn = sampler_triton.draw(logits, rows, drafts=True)
    assert drawn.peak.isfinite().tolist() == [False, True, False, False, True]
    tokens, probs = sampler_triton.draft_tokens(logits[:, 0], rows)
    assert ((tokens >= 0) & (tokens < 100)).all()
    wanted, wanted_probs = sampling.draft_tokens(logits[:, 0], rows)
    assert torch.equal(tokens[[1, 4]], wanted[[1, 4]])
    torch.testing.assert_close(probs[[1, 4]], wanted_probs[[1, 4]])


def test_drafts_by_rejection_have_noise_and_probabilities_of_their_own() -> None:
    rows = sampling_rows(KINDS, [row % 2 == 0 for row in range(len(KINDS))])
    logits = randn(len(KINDS), 200, seed=3) * 2
    tokens, probs = sampler_triton.draft_tokens(logits, rows)
    wanted, wanted_probs = sampling.draft_tokens(logits, rows)
    assert torch.equal(tokens, wanted)
    asked = ~rows.greedy & ~rows.coupled
    torch.testing.assert_close(probs[asked], wanted_probs[asked])
    assert (probs[~asked] == 0).all()


@pytest.mark.parametrize("case", ["one-hot", "probabilities", "simulated", "equal", "not finite"])
def test_acceptance(case) -> None:
    """Greedy, coupled and rejection rows side by side."""
    generator = torch.Generator().manual_seed(len(case))
    num_reqs, query_len, vocab_size = 8, 4, 100
    kinds = [KINDS[row] for row in (0, 1, 2, 3, 0, 9, 1, 0)]
    rows = sampling_rows(kinds, [row in (3, 5) for row in range(8)], first_seed=len(case))
    logits = randn(num_reqs, query_len, vocab_size, seed=len(case)) * 3
    if case == "not finite":
        logits[0, 1, 3], logits[3, 0, 5], logits[6, 0, 7], logits[7, 0] = NAN, NAN, INF, -INF
    proposal = torch.softmax(logits[:, :-1] + randn(num_reqs, query_len - 1, vocab_size) * 0.3, -1)
    proposal = proposal.nan_to_num(0.01)
    if case == "equal":
        # Nothing of p - q is left, or rounding alone.
        proposal = log_probs_reference(logits[:, :-1], rows).exp()
        proposal[0, 0] *= 2.0
    drafts = torch.multinomial(proposal.view(-1, vocab_size), 1, generator=generator).view(8, 3)
    probs = None if case == "one-hot" else proposal
    drafted = torch.tensor([3, 3, 2, 3, 3, 3, 1, 0])
    simulated = torch.rand(8, 3, generator=generator) < 0.6 if case == "simulated" else None
    wanted = acceptance.accept(logits, drafts, drafted, probs, rows, simulated=simulated)
    tokens, accepted, failed = accept_sampled_triton.accept(
        logits, drafts, drafted, probs, rows, simulated
    )
    assert torch.equal(accepted, wanted.num_accepted)
    assert torch.equal(failed, wanted.failed)
    written = torch.arange(query_len) < (accepted + ~failed)[:, None]
    assert torch.equal(tokens[written], wanted.tokens[written])
    assert torch.equal(tokens < 0, wanted.tokens < 0)
    assert (tokens < vocab_size).all()
    assert accepted.unique().numel() > 1 and failed.any() == (case == "not finite")
