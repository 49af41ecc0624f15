"""The loss against plain autograd, and which positions it counts."""

from itertools import pairwise

import pytest
import torch
from made import documents

from specdec.train import loss as loss_file
from specdec.train.loss import drafted_positions, next_tokens, soft_cross_entropy, step_weights
from specdec.train.rows import PackedRows


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("trains_head", [False, True], ids=["shared", "own"])
def test_soft_cross_entropy_and_its_gradients(
    trains_head: bool, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of five positions, of which the last is not full."""
    monkeypatch.setattr(loss_file, "MAX_ROWS", 5)
    torch.manual_seed(0)
    hidden = torch.randn(3, 7, 6, requires_grad=True)
    weight = torch.randn(11, 6, requires_grad=trains_head)
    target_logits, counted = 2 * torch.randn(3, 7, 11), torch.rand(3, 7 - ahead) < 0.6
    assert counted.sum() % 5 and counted.sum() > 6
    loss, agreed = soft_cross_entropy(hidden, weight, target_logits, counted, ahead)
    (3 * loss).backward()
    found = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    logits = (hidden @ weight.T)[:, : 7 - ahead][counted]
    wanted = target_logits[:, ahead:][counted]
    expected = torch.nn.functional.cross_entropy(logits, wanted.softmax(-1))
    (3 * expected).backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    hits = logits.argmax(-1) == wanted.argmax(-1)
    assert torch.allclose(agreed, hits.float().mean(), rtol=1e-5)
    assert torch.allclose(found[0], hidden.grad, atol=1e-5)
    assert (found[1] is not None) == trains_head
    if trains_head:
        assert torch.allclose(found[1], weight.grad, atol=1e-5)


def test_a_batch_without_an_answer_has_no_loss() -> None:
    hidden = torch.randn(1, 4, 6, requires_grad=True)
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    loss, agreed = soft_cross_entropy(hidden, torch.randn(5, 6), torch.randn(1, 4, 5), nothing)
    loss.backward()
    assert float(loss) == float(agreed) == 0.0
    assert not hidden.grad.any()


def test_a_position_counts_where_the_token_it_drafts_is_of_its_own_answer() -> None:
    rows = PackedRows(documents([9, 12, 6], 50, prompt=4), 32, "cpu")
    batch = rows.batch([0])
    (row,) = rows.rows
    for step in range(4):
        expected = set()
        for document, start in row.places:
            first, end = document.spans[0]
            for drafted in range(first, end):
                at = drafted - 2 - step
                if at >= 0:
                    expected.add(start + at)
        found = drafted_positions(batch, step)[0].nonzero().flatten().tolist()
        assert set(found) == expected


def test_next_tokens() -> None:
    assert next_tokens(torch.tensor([[1, 2, 3, 4]]), 2).tolist() == [[3, 4, 0, 0]]


def test_step_weights_add_up_and_decay() -> None:
    weights = step_weights(4, 0.5)
    assert sum(weights) == pytest.approx(1)
    assert [a / b for a, b in pairwise(weights)] == pytest.approx([2] * 3)
