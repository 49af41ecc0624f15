"""The suffix lookup's kernels against their plain-PyTorch twin."""

import pytest
import torch
from suffix_oracle import RULES, Cases

from specdec.kernels import suffix, suffix_triton


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_suffix(rule) -> None:
    for seed, k in ((0, 1), (1, 5)):
        cases = Cases(seed, rule)
        ids = suffix_triton.propose_suffix(*cases.arguments(k))
        assert torch.equal(ids, suffix.propose_suffix_reference(*cases.arguments(k)))
        assert (ids >= 0).any()


def test_an_order_that_needs_several_rounds() -> None:
    """A group of 1,900 places among 3,000; the search splits it in 33 parts at a time."""
    cases = Cases(0, suffix.SuffixRule(max_match=6), history=6000, texts=120)
    assert cases.arrays.order.shape[0] > 33**2
    ids = suffix_triton.propose_suffix(*cases.arguments(4))
    assert torch.equal(ids, suffix.propose_suffix_reference(*cases.arguments(4)))
    assert (ids >= 0).any()
