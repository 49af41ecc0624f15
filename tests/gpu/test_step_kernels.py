"""The kernels around a pass on a GPU, against their plain-PyTorch twins on the CPU."""

import pytest
import torch

from specdec.kernels.ngram import propose_ngram
from specdec.verifier import passes
from specdec.verifier.state import DecodeState, RowState

pytestmark = pytest.mark.gpu

SLOTS = [3, 0, 5, 1, 2, 6, 4, 8, 8]


def make_rows(device: str, has_lora: bool = False) -> RowState:
    """Seven requests of a state of nine rows and two of padding; the context is 40."""
    generator = torch.Generator().manual_seed(0)
    state = DecodeState(
        max_num_seqs=8, max_model_len=40, block_size=4, vocab_size=50, device=device
    )
    state.tokens.copy_(torch.randint(50, (9, 41), generator=generator))
    state.block_table.copy_(torch.randint(30, (9, 10), generator=generator))
    for row, length in enumerate([1, 5, 16, 33, 39, 40, 17]):
        fields = {"end": min(40, length + 4), "k": row % 6, "adapter": row % 3 - 1}
        fields["draft_len"] = max(0, length - row % 4)
        state.write_row(row, state.tokens[row, :length].tolist(), fields, {})
    return RowState(state, torch.tensor(SLOTS, device=device), has_lora=has_lora)


def assert_equal(one: object, other: object, name: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one.cpu(), other), name
    elif hasattr(one, "__dataclass_fields__"):
        for field in one.__dataclass_fields__:
            assert_equal(getattr(one, field), getattr(other, field), f"{name}.{field}")
    else:
        assert one == other, name


@pytest.mark.parametrize("k", [0, 1, 4, 7])
def test_verify_pass(k) -> None:
    drafts = torch.randint(-1, 12, (9, k), generator=torch.Generator().manual_seed(k))
    made = passes.verify_pass(make_rows("cuda", True), drafts.cuda(), 10)
    assert_equal(made, passes.verify_pass(make_rows("cpu", True), drafts, 10))


@pytest.mark.parametrize("needs_kv", [False, True])
@pytest.mark.parametrize(("query_len", "offset", "min_drafts"), [(2, -2, 0), (1, 2, 3)])
def test_draft_pass(query_len, offset, min_drafts, needs_kv) -> None:
    ids = None if query_len == 2 else torch.arange(9)[:, None] * 7
    options = {"offset": offset, "min_drafts": min_drafts, "needs_kv": needs_kv}
    options |= {"vocab_size": 45, "max_len": 38}
    given = None if ids is None else ids.cuda()
    made = passes.draft_pass(make_rows("cuda"), given, query_len, **options)
    assert_equal(made, passes.draft_pass(make_rows("cpu"), ids, query_len, **options))


@pytest.mark.parametrize("rates", [None, [0.8, 0.5, 0.9, 0.7, 0.6, 0.9, 0.8]])
@pytest.mark.parametrize("query_len", [1, 2, 5, 8])
def test_acceptance_and_advance(query_len, rates) -> None:
    generator = torch.Generator().manual_seed(query_len)
    targets = torch.randint(3, (9, query_len), generator=generator)
    drafts = torch.randint(3, (9, query_len - 1), generator=generator)
    drafts[:4] = targets[:4, :-1]
    finite = torch.rand(9, query_len, generator=generator) > 0.2
    results = []
    for device in ("cuda", "cpu"):
        rows = make_rows(device)
        made = passes.verify_pass(rows, drafts.to(device), 50)
        simulated = None if rates is None else torch.tensor(rates, device=device)
        choice = (targets.to(device), finite.to(device))
        result, accepted = passes.accept_and_commit(
            rows, *choice, made.draft_ids, made.num_drafted, simulated
        )
        passes.advance_draft_len(rows, accepted, 38)
        state = rows.state
        text = torch.arange(41) < state.seq_len[:, None].cpu()
        tokens = state.tokens.cpu().where(text, 0)
        results.append([result.packed.cpu(), accepted.cpu(), state.ints.cpu(), tokens])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_lookup() -> None:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, (64, 5001), generator=generator, dtype=torch.int32)
    lengths = torch.randint(0, 5000, (64, 2), generator=generator)[:, 0]
    slots = torch.arange(63, -1, -1)
    for max_n in (1, 3, 12):
        args = (tokens[:, :5000], lengths, slots)
        made = propose_ngram(*(each.cuda() for each in args), 5, max_n, 1)
        assert torch.equal(made.cpu(), propose_ngram(*args, 5, max_n, 1))
