"""The kernels around a pass against their plain-PyTorch twins: inputs, acceptance, lookup."""

import pytest
import torch

from specdec.kernels import accept_triton, ngram, ngram_triton, pass_triton
from specdec.verifier import passes
from specdec.verifier.acceptance import Acceptance
from specdec.verifier.state import DecodeState, RowState

LENGTHS = [1, 5, 16, 33, 39, 40, 17, 0]


def make_state(seed: int = 0) -> DecodeState:
    """Seven requests in rows of a state of nine; the context is 40, the last row is padding."""
    generator = torch.Generator().manual_seed(seed)

    def randint(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    state = DecodeState(max_num_seqs=8, max_model_len=40, block_size=4, vocab_size=50, device="cpu")
    state.tokens.copy_(randint(50, 9, 41))
    state.block_table.copy_(randint(30, 9, 10))
    for row, length in enumerate(LENGTHS):
        fields = {
            "end": min(40, length + 4) if row else 1,
            "k": row % 6,
            "draft_len": max(0, length - row % 4),
            "adapter": row % 3 - 1,
            "seed": 2**63 + row // 2,
        }
        state.write_row(row, state.tokens[row, :length].tolist(), fields, {})
    state.write_row(7, [], {}, {})
    return state


def rows_of(state: DecodeState, has_lora: bool = False) -> RowState:
    slots = torch.tensor([3, 0, 5, 1, 2, 6, 4, 8, 8])
    return RowState(state, slots, has_lora=has_lora)


def assert_same_pass(made: pass_triton.PassTensors, wanted) -> None:
    assert torch.equal(made.input_ids, wanted.input_ids)
    assert torch.equal(made.positions, wanted.positions)
    for name in ("slot_mapping", "query_start_loc", "context_lens", "seq_lens", "block_table"):
        assert torch.equal(getattr(made, name), getattr(wanted.metadata, name)), name
    if made.adapter_slots is not None:
        assert torch.equal(made.adapter_slots, wanted.metadata.adapter_slots)


@pytest.mark.parametrize("has_lora", [False, True])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_verify_inputs(k, has_lora) -> None:
    rows = rows_of(make_state(), has_lora)
    drafts = torch.randint(-1, 12, (9, k), generator=torch.Generator().manual_seed(k))
    made = pass_triton.verify_inputs(
        rows.tensors, drafts, vocab_size=10, max_len=40, has_lora=has_lora, block_table=None
    )
    wanted = passes.verify_pass(rows, drafts, 10)
    assert_same_pass(made, wanted)
    assert torch.equal(made.draft_ids, wanted.draft_ids)
    assert torch.equal(made.rows[0], rows.seq_lens)
    assert torch.equal(made.rows[1], rows.remaining)
    assert torch.equal(made.rows[2], rows.max_drafts)
    assert torch.equal(made.rows[3], wanted.num_drafted)
    if k:
        assert wanted.num_drafted.unique().numel() > 1


@pytest.mark.parametrize(("kv_lag", "id_shift"), [(1, 0), (3, 1)])
@pytest.mark.parametrize("needs_kv", [False, True])
@pytest.mark.parametrize(
    ("ids", "query_len", "offset", "min_drafts"),
    [(None, 2, -2, 0), (None, 5, -6, 0), (1, 1, -1, 1), (1, 1, 2, 3)],
)
def test_draft_inputs(ids, query_len, offset, min_drafts, needs_kv, kv_lag, id_shift) -> None:
    rows = rows_of(make_state())
    given = ids if ids is None else torch.arange(9)[:, None] * 7
    options = {
        "offset": offset,
        "min_drafts": min_drafts,
        "needs_kv": needs_kv,
        "max_len": 38,
        "kv_lag": kv_lag,
        "id_shift": id_shift,
    }
    made = pass_triton.draft_inputs(
        rows.tensors, given, query_len, id_limit=45, has_lora=False, block_table=None, **options
    )
    wanted = passes.draft_pass(rows, given, query_len, vocab_size=45, **options)
    assert_same_pass(made, wanted)
    assert torch.equal(made.rows[3], wanted.ready)
    assert wanted.ready.unique().tolist() == [0, 1]


@pytest.mark.parametrize("options", [{}, {"kv_lag": 3, "keeps_drafts": False}], ids=str)
@pytest.mark.parametrize("rates", [None, [0.8, 0.5, 0.9, 0.7]])
@pytest.mark.parametrize("query_len", [1, 5])
def test_acceptance_commits_and_advances(query_len, rates, options) -> None:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(3, (9, query_len), generator=generator)
    drafts = torch.randint(3, (9, query_len - 1), generator=generator)
    drafts[:4] = targets[:4, :-1]
    finite = torch.rand(9, query_len, generator=generator) > 0.2
    drafted = torch.randint(query_len, (9,), generator=generator)
    ours, theirs = make_state(), make_state()
    for state in (ours, theirs):
        # Every third row ends at token 1; entries of -1 must not match the -1 past a run.
        state.rules.stop_ids[::3, 5] = 1
    rows, twin = rows_of(ours), rows_of(theirs)
    lengths = (rows.seq_lens, rows.remaining, rows.max_drafts)
    simulated = None if rates is None else torch.tensor(rates)
    ends = ours.column("end").clone()
    packed, accepted = accept_triton.accept_and_commit(
        rows.tensors, targets, finite, drafts, drafted, simulated
    )
    result, wanted = passes.accept_and_commit(twin, targets, finite, drafts, drafted, simulated)
    assert torch.equal(accepted, wanted)
    assert torch.equal(packed, result.packed)
    accept_triton.advance_draft_len(rows.slots, *lengths, accepted, ours.draft_len, 38, **options)
    before = rows_of(make_state())
    passes.advance_draft_len(before, wanted, 38, **options)
    assert not torch.equal(ours.draft_len, make_state().draft_len)
    assert torch.equal(ours.draft_len, before.state.draft_len)
    assert torch.equal(ours.seq_len, theirs.seq_len)
    assert torch.equal(ours.column("end"), theirs.column("end"))
    has_ended = ours.column("end") != ends
    assert has_ended.any() and torch.equal(ours.column("end")[has_ended], ours.seq_len[has_ended])
    assert torch.equal(ours.tokens[:, :-1], theirs.tokens[:, :-1])
    assert result.packed[:, query_len].unique().numel() > 1


@pytest.mark.parametrize("query_len", [1, 5])
def test_commit(query_len) -> None:
    generator = torch.Generator().manual_seed(3)
    accepted = torch.randint(query_len, (9,), generator=generator)
    tokens = torch.randint(3, (9, query_len), generator=generator)
    tokens = tokens.where(torch.arange(query_len) <= accepted[:, None], -1)
    failed = torch.rand(9, generator=generator) < 0.3
    drafted = torch.full((9,), query_len - 1)
    ours, theirs = make_state(), make_state()
    for state in (ours, theirs):
        state.rules.stop_ids[::3, 5] = 1
    packed = accept_triton.commit(rows_of(ours).tensors, tokens, accepted, failed, drafted)
    chosen = Acceptance(tokens=tokens, num_accepted=accepted, failed=failed)
    wanted = passes.commit(rows_of(theirs), chosen, drafted, None)
    assert torch.equal(packed, wanted.packed)
    assert torch.equal(ours.ints, theirs.ints)
    assert torch.equal(ours.tokens[:, :-1], theirs.tokens[:, :-1])
    assert packed[:, query_len].unique().numel() > 1 and packed[:, -1].any()


@pytest.mark.parametrize(("max_n", "min_n"), [(3, 1), (2, 2), (1, 1)])
def test_lookup(max_n, min_n) -> None:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, (20, 75), generator=generator, dtype=torch.int32)
    tokens[5] = torch.arange(75)
    tokens[6, :6] = torch.tensor([1, 2, 1, 2, 1, 2])
    lengths = torch.randint(1, 75, (20, 2), generator=generator)[:, 0]
    lengths[:7] = torch.tensor([0, 1, 2, 3, 74, 60, 6])
    slots = torch.tensor([0, 6, 5, 4, 3, 2, 1, 19, 18, 7, 8])
    args = (tokens[:, :74], lengths, slots, 5, max_n, min_n)
    ids = ngram_triton.propose_ngram(*args)
    assert torch.equal(ids, ngram.propose_ngram_reference(*args))
    assert (ids < 0).any() and (ids >= 0).any()
