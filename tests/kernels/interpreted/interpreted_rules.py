"""Rules on logits, log-probabilities and the rows' parameters against their twins."""

import pytest
import torch

from specdec.kernels import logprobs_triton, rules_triton, sampling_rows_triton
from specdec.verifier import processors, sampling
from specdec.verifier.state import DecodeState, RowState

VOCAB = 100
NAN, INF = float("nan"), float("inf")
LENGTHS = [1, 5, 150, 70, 39, 100, 170]
PENALTIES = [[0.0, 0, 0], [0.5, 0, 0], [0, 0.3, 0], [0, 0, 0.2], [0.5, -0.3, 0.7]]


def make_state() -> DecodeState:
    """Seven requests with rules of every kind, some with none; ids below 20 in their texts."""
    generator = torch.Generator().manual_seed(0)
    state = DecodeState(
        max_num_seqs=8, max_model_len=200, block_size=4, vocab_size=VOCAB, device="cpu"
    )
    state.tokens.copy_(torch.randint(20, state.tokens.shape, generator=generator))
    for row, length in enumerate(LENGTHS):
        text = state.tokens[row, :length].tolist()
        fields = {"end": 200, "prompt_len": max(1, length - 3 * row), "seed": row - 3}
        fields |= {"top_k": row, "coupled": row % 2, "logprobs": row % 3 == 0}
        floats = {"temperature": row / 2, "top_p": 0.9, "min_p": row / 10}
        state.write_row(row, text, fields, floats)
        words = [[*text[-2:], 7], [9], [*text[-1:], 3, 5], [50]]
        state.write_rules(
            row,
            bias={3: 1.5, 99: -100.0} if row % 3 == 0 else {},
            penalties=PENALTIES[row % 5],
            min_tokens=[0, 5, 3 * row + 2][row % 3],
            stop_ids=[1, 2, 99] if row != 4 else [],
            bad_words=[] if row % 2 else [*words, [*text[-6:], 4, 6]][: row + 1],
        )
    return state


def rows_of(state: DecodeState) -> RowState:
    return RowState(state, torch.tensor([0, 1, 2, 3, 4, 5, 6, 8]), sampled=True)


@pytest.mark.parametrize("query_len", [1, 4])
def test_rules(query_len, monkeypatch) -> None:
    monkeypatch.setattr(rules_triton, "_CHUNK", 64)
    generator = torch.Generator().manual_seed(1)
    rows = rows_of(make_state()).rules
    logits = torch.randn(8, query_len, VOCAB, generator=generator) * 3
    # Bans must not hide these: 9 is a bad word of request 2, 1 a stop that comes too early.
    logits[2, 0, 9], logits[5, 0, 1], logits[1, 0] = INF, NAN, -INF
    drafts = torch.randint(20, (8, query_len - 1), generator=generator)
    if query_len > 1:
        drafts[2, :2], drafts[6, 0] = torch.tensor([3, 5]), 4
    wanted = processors.apply_rules(logits, drafts, rows)
    result = rules_triton.apply_rules(logits, drafts, rows.tensors)
    torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
    changed = (wanted != logits).any(-1).any(-1)
    assert changed[[0, 2, 3, 4, 5, 6]].all() and not changed[7]
    assert result[2, 0, 9].isnan()


def test_sampling_fields() -> None:
    state = make_state()
    rows = RowState(state, torch.tensor([3, 0, 8, 8, 5]), sampled=True)
    made = sampling_rows_triton.sampling_fields(rows.slots, state.sampling_columns)
    wanted = rows.sampling
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "coupled", "output_index"):
        one, other = getattr(made, name), getattr(wanted, name)
        assert torch.equal(one, other) and one.dtype == other.dtype, name
    assert torch.equal(made.prompt_len, rows.rules.prompt_lens)
    assert torch.equal(made.wants_logprobs, rows.wants_logprobs)
    assert made.wants_logprobs.tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("vocab_size", [7, 100, 3000])
def test_logprobs(vocab_size) -> None:
    """A row where fewer than 20 weigh anything and, of 3000, one with more ties than fit."""
    logits = torch.randn(4, 1, vocab_size, generator=torch.Generator().manual_seed(2)) * 3
    logits[1, 0, 1:] -= 100.0
    logits[2] = logits[2].round()
    tokens = torch.tensor([[1], [-1], [2], [3]])
    wanted = torch.tensor([True, True, True, False])
    result = logprobs_triton.token_logprobs(logits, tokens, 20, wanted)
    twin = sampling.token_logprobs(logits, tokens, 20)
    pairs = ((result[0], twin.chosen), (result[2], twin.top))
    for one, other in pairs:
        torch.testing.assert_close(one[:3], other[:3], rtol=1e-5, atol=1e-5)
        assert (one[3] == 0).all()
    assert torch.equal(result[1][:2], twin.top_ids[:2])
    # Equal ones come in the order of their ids.
    order = logits[2, 0].sort(descending=True, stable=True).indices[:20]
    assert result[1][2, 0].tolist() == order.tolist()
    flat = torch.zeros(1, 1, vocab_size)
    _, ids, top = logprobs_triton.token_logprobs(flat, tokens[:1], 20, wanted[:1])
    assert ids[0, 0].tolist() == list(range(min(20, vocab_size)))
    torch.testing.assert_close(top, torch.full_like(top, 1 / vocab_size).log())
