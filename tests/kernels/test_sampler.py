"""The sampler in PyTorch: its cuts against the definition, ties, and what it draws."""

import pytest
import torch
from harness import chi_square_p_value
from sampling_rows import KINDS, row_of, sampling_rows

from specdec.kernels.sampler import ONE, kept_weights, log_probs, probabilities, scaled_logits
from specdec.verifier.sampling import coupled_tokens, draft_tokens

# The chance that a sound sampler fails one chi-square comparison.
ALARM = 1e-6


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(logits: torch.Tensor, rows) -> torch.Tensor:
    return kept_weights(logits, scaled_logits(logits, rows), rows)


def plain(logits: torch.Tensor, temperature, top_k, top_p, min_p) -> torch.Tensor:
    """The processed distribution of one row in float64, token by token. logits [V]."""
    probs = (logits.double() / temperature).softmax(-1)
    order = sorted(range(len(probs)), key=lambda token: (-logits[token].item(), token))
    if top_k:
        order = order[:top_k]
    mass, before, kept = probs[order].sum(), 0.0, []
    for token in order:
        if before < top_p * mass and probs[token] >= min_p * probs[order[0]]:
            kept.append(token)
        before += probs[token]
    result = torch.zeros_like(probs)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_cuts_are_those_of_the_definition(scale) -> None:
    logits = randn(len(KINDS), 2, 500) * scale
    logits[:, 1, 7:40] = -torch.inf
    rows = sampling_rows(KINDS)
    probs = probabilities(weights_of(logits, rows))
    logp = log_probs(logits, rows)
    for row, kind in enumerate(KINDS):
        if kind[0] > 0:
            for step in range(2):
                wanted = plain(logits[row, step], *kind)
                # What weighs less than the resolution is cut.
                assert ((probs[row, step] > 0) == (wanted > wanted.max() * 0.5 / ONE)).all()
                torch.testing.assert_close(probs[row, step].double(), wanted, rtol=1e-5, atol=1e-9)
                torch.testing.assert_close(logp[row, step].exp(), probs[row, step])


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ((1.0, 3, 1.0, 0.0), [1, 2, 4]),
        ((1.0, 4, 0.5, 0.0), [1, 2]),
        ((1.0, 0, 0.25, 0.0), [1]),
        ((1.0, 0, 0.2500001, 0.0), [1, 2]),
        ((1.0, 0, 1.0, 1.0), [1, 2, 4, 5]),
        ((0.7, 5, 1.0, 0.0), [1, 2, 4, 5]),
    ],
)
def test_equal_logits_at_a_border_keep_the_lower_ids(kind, kept) -> None:
    """Four equal logits above all others, which weigh nothing; minus zero equals zero."""
    logits = torch.full((1, 1, 8), -1e9)
    logits[..., [1, 2, 4, 5]] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    assert weights_of(logits, sampling_rows([kind])).nonzero()[:, 2].tolist() == kept


def test_a_row_depends_on_itself_alone() -> None:
    logits, rows = randn(len(KINDS), 1, 300) * 2, sampling_rows(KINDS)
    together = weights_of(logits, rows)
    for row in range(len(KINDS)):
        alone = weights_of(logits[row : row + 1], row_of(rows, row))
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("coupled", [True, False])
def test_tokens_follow_the_processed_distribution(coupled) -> None:
    """20,000 draws of each row, by counters that follow each other."""
    kinds = [(0.8, 20, 0.9, 0.0), (1.0, 0, 1.0, 0.05), (2.0, 7, 1.0, 0.0)]
    logits = randn(3, 40) * 2
    for row, kind in enumerate(kinds):
        wanted = plain(logits[row], *kind)
        rows = sampling_rows([kind] * 20_000, coupled).at(0)
        many = logits[row].expand(20_000, -1)
        tokens, probs = draft_tokens(many, rows)
        counts = torch.bincount(tokens, minlength=40).tolist()
        assert chi_square_p_value(counts, wanted.tolist()) > ALARM
        assert probs is not None
        torch.testing.assert_close(probs[0].double(), wanted, rtol=1e-5, atol=1e-9)
        if coupled:
            assert torch.equal(tokens, coupled_tokens(log_probs(many[:, None], rows), rows)[:, 0])
