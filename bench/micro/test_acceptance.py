"""Acceptance and n-gram lookup, in PyTorch on the CPU."""

from typing import Any

import pytest
import torch

from specdec.drafters.ngram import NgramDrafter
from specdec.kernels.sampler import SamplingRows
from specdec.verifier.acceptance import accept, accept_greedy
from specdec.verifier.state import DecodeState, RowState

NUM_REQS, K, VOCAB = 8, 4, 8192


def rows_of(num_reqs: int, *, coupled: bool) -> SamplingRows:
    return SamplingRows(
        temperature=torch.full((num_reqs,), 0.8),
        top_k=torch.full((num_reqs,), 50),
        top_p=torch.full((num_reqs,), 0.95),
        min_p=torch.zeros(num_reqs),
        seed=torch.arange(num_reqs),
        coupled=torch.full((num_reqs,), coupled),
        output_index=torch.arange(num_reqs),
    )


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NUM_REQS, 1 + K, VOCAB, generator=generator) * 3


def test_greedy_acceptance(benchmark: Any) -> None:
    targets = torch.randint(50, (64, 1 + K), generator=torch.Generator().manual_seed(1))
    finite = torch.ones(64, 1 + K, dtype=torch.bool)
    drafts, drafted = targets[:, :-1].clone(), torch.full((64,), K)
    drafts[::2, 2] += 1
    accepted = benchmark(accept_greedy, targets, finite, drafts, drafted)
    assert accepted.num_accepted.tolist()[:2] == [2, K]


@pytest.mark.parametrize("coupled", [True, False], ids=["coupled", "rejection"])
def test_sampled_acceptance(benchmark: Any, logits: torch.Tensor, coupled: bool) -> None:
    drafts = logits[:, :-1].argmax(-1)
    drafted = torch.full((NUM_REQS,), K)
    rows = rows_of(NUM_REQS, coupled=coupled)
    accepted = benchmark(accept, logits, drafts, drafted, None, rows)
    assert 0 < int(accepted.num_accepted.sum()) < NUM_REQS * K


@pytest.mark.parametrize("length", [500, 4000])
def test_ngram_lookup(benchmark: Any, length: int) -> None:
    state = DecodeState(
        max_num_seqs=NUM_REQS,
        max_model_len=length + 16,
        block_size=16,
        vocab_size=512,
        device="cpu",
    )
    generator = torch.Generator().manual_seed(2)
    for row in range(NUM_REQS):
        ids = torch.randint(400, (length,), generator=generator).tolist()
        state.write_row(row, ids, {"end": length + 16, "k": K}, {})
    rows = RowState(state, torch.arange(NUM_REQS))
    draft = benchmark(NgramDrafter().propose, rows, K)
    assert draft.ids.shape == (NUM_REQS, K)
