"""The kernels of sampled rows on a GPU: against their twins, row by row, and in graphs."""

import pytest
import torch
from sampling_rows import KINDS, row_of, sampling_rows

from specdec.kernels import accept_sampled_triton, sampler_triton
from specdec.kernels.sampler import kept_weights, log_probs, log_probs_reference, scaled_logits
from specdec.verifier import acceptance, passes, processors, sampling
from specdec.verifier.state import DecodeState, RowState

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_and_poisoned")]
VOCABS = [100, 49_152, 128_256]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_gpu(rows):
    fields = rows.__dataclass_fields__
    return type(rows)(**{name: getattr(rows, name).cuda() for name in fields})


def ids_of(choice: torch.Tensor) -> torch.Tensor:
    return 0x7FFFFFFF - (choice & 0xFFFFFFFF)


@pytest.mark.parametrize("scale", [0.3, 3.0], ids=["flat", "sharp"])
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_cuts_and_choices_are_those_of_the_twin(vocab_size, scale) -> None:
    """Cuts may differ by a token whose mass lies within the last bits of an exponential."""
    rows = sampling_rows(KINDS)
    logits = randn(len(KINDS), 2, vocab_size) * scale
    logits[:, 1, 5:50] = -torch.inf
    live = ~rows.greedy
    wanted = log_probs_reference(logits, rows)[live]
    result = log_probs(logits.cuda(), on_gpu(rows)).cpu()[live]
    both = result.isfinite() & wanted.isfinite()
    differing = (result.isfinite() != wanted.isfinite()).sum(-1)
    assert (differing <= 2 + wanted.isfinite().sum(-1) // 10_000).all(), differing
    torch.testing.assert_close(result[both], wanted[both], rtol=1e-5, atol=2e-5)
    drawn = sampler_triton.draw(logits.cuda(), on_gpu(rows), drafts=False)
    scaled = scaled_logits(logits, rows)
    scores = scaled.where(kept_weights(logits, scaled, rows) > 0, -torch.inf)
    tokens = sampling.coupled_tokens(scores, rows)
    tokens = torch.where(rows.greedy[:, None], logits.argmax(-1), tokens)
    assert torch.equal(ids_of(drawn.choice).view_as(tokens).cpu(), tokens)


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_bits_of_a_row_do_not_depend_on_the_others(vocab_size) -> None:
    """Alone, among 10 and among 320 rows, as one of one row or of five."""
    kinds = KINDS * 32
    rows, logits = on_gpu(sampling_rows(kinds)), randn(len(kinds), 1, vocab_size).cuda() * 2
    many = sampler_triton.draw(logits, rows, drafts=True)
    for count in (1, 10):
        few = on_gpu(sampling_rows(kinds[:count]))
        drawn = sampler_triton.draw(logits[:count], few, drafts=True)
        for one, other in zip(drawn, many, strict=True):
            assert torch.equal(one, other[:count])
    for row in (3, 8):
        alone = row_of(rows, row)
        wide = logits[row].expand(5, -1)[None].contiguous()
        first = alone.at(-2)
        drawn = sampler_triton.draw(wide, first, drafts=True)
        for one, other in zip(drawn, many, strict=True):
            assert torch.equal(one[2], other[row])


def test_ties_beyond_the_candidates_and_runs_repeat() -> None:
    """One value everywhere: ids alone decide. Ten runs gather in ten orders and agree."""
    rows = on_gpu(sampling_rows([(1.0, 7, 1.0, 0.0), (2.0, 0, 0.25, 0.0), (1.0, 5000, 0.5, 0.0)]))
    flat = torch.full((3, 1, 128_000), 0.7, device="cuda")
    kept = (log_probs(flat, rows) > -torch.inf)[:, 0]
    for row, count in enumerate((7, 32_000, 2500)):
        assert kept[row].nonzero()[:, 0].tolist() == list(range(count))
    rows, logits = on_gpu(sampling_rows(KINDS)), randn(len(KINDS), 1, 128_256).cuda()
    runs = [sampler_triton.draw(logits, rows, drafts=True) for _ in range(10)]
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("case", ["one-hot", "probabilities", "simulated", "not finite"])
def test_acceptance_is_that_of_the_twin(case) -> None:
    generator = torch.Generator().manual_seed(len(case))
    num_reqs, query_len, vocab_size = 64, 5, 1000
    kinds = [KINDS[(0, 1, 2, 3, 0, 9, 1, 0)[row % 8]] for row in range(num_reqs)]
    rows = sampling_rows(kinds, [row % 8 in (3, 5) for row in range(num_reqs)])
    logits = randn(num_reqs, query_len, vocab_size) * 3
    if case == "not finite":
        logits[0, 1, 3], logits[3, 0, 5], logits[6, 0, 7] = torch.nan, torch.nan, torch.inf
    proposal = torch.softmax(logits[:, :-1] + randn(num_reqs, 4, vocab_size, seed=1) * 0.3, -1)
    proposal = proposal.nan_to_num(0.001)
    drafts = torch.multinomial(proposal.view(-1, vocab_size), 1, generator=generator).view(-1, 4)
    probs = None if case == "one-hot" else proposal
    drafted = torch.randint(0, 5, (num_reqs,), generator=generator)
    simulated = torch.rand(num_reqs, 4, generator=generator) < 0.6 if case == "simulated" else None
    wanted = acceptance.accept(logits, drafts, drafted, probs, rows, simulated=simulated)
    cuda = [None if each is None else each.cuda() for each in (probs, simulated)]
    tokens, accepted, failed = accept_sampled_triton.accept(
        logits.cuda(), drafts.cuda(), drafted.cuda(), cuda[0], on_gpu(rows), cuda[1]
    )
    assert torch.equal(accepted.cpu(), wanted.num_accepted)
    assert torch.equal(failed.cpu(), wanted.failed)
    written = torch.arange(query_len) < (wanted.num_accepted + ~wanted.failed)[:, None]
    assert torch.equal(tokens.cpu()[written], wanted.tokens[written])


def make_rows(device: str) -> RowState:
    """Six requests with rules of every kind, and padding."""
    generator = torch.Generator().manual_seed(0)
    state = DecodeState(
        max_num_seqs=7, max_model_len=3000, block_size=4, vocab_size=5000, device=device
    )
    state.tokens.copy_(torch.randint(40, state.tokens.shape, generator=generator))
    for row, length in enumerate([1, 50, 2500, 700, 39, 1100]):
        text = state.tokens[row, :length].tolist()
        ints = {"end": 3000, "k": 4, "prompt_len": max(1, length // 2), "seed": row}
        ints |= {"coupled": row % 2, "logprobs": row != 1, "top_k": 10 * row}
        floats = {"temperature": 0.4 * row, "top_p": 0.95, "min_p": 0.0}
        state.write_row(row, text, ints, floats)
        state.write_rules(
            row,
            bias={3: 1.5, 99: -100.0} if row % 3 == 0 else {},
            penalties=[[0.0, 0, 0], [0.5, -0.3, 0.7], [0, 0, 0.2]][row % 3],
            min_tokens=[0, 5, 3000][row % 3],
            stop_ids=[1, 2, 99],
            bad_words=[[*text[-2:], 7], [9], [*text[-1:], 3, 5]] if row % 2 else [],
        )
    return RowState(state, torch.tensor([4, 2, 7, 0, 1, 3, 5], device=device), sampled=True)


def test_rules_rows_logprobs_and_commit() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, drafts = randn(7, 5, 5000) * 3, torch.randint(40, (7, 4), generator=generator)
    results = []
    for device in ("cuda", "cpu"):
        rows = make_rows(device)
        ruled = processors.apply_rules(logits.to(device), drafts.to(device), rows.rules)
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "coupled", "output_index")
        fields = [getattr(rows.sampling, name).cpu() for name in names]
        drafted = torch.full((7,), 4, device=device)
        accepted = acceptance.accept(
            logits.to(device), drafts.to(device), drafted, None, rows.sampling, rows.rules
        )
        logprobs = sampling.token_logprobs(
            logits.to(device), accepted.tokens, 20, rows.wants_logprobs
        )
        packed = passes.commit(rows, accepted, drafted, logprobs).packed.cpu()
        text = torch.arange(3001) < rows.state.seq_len[:, None].cpu()
        state = [rows.state.ints.cpu(), rows.state.tokens.cpu().where(text, 0)]
        asked = rows.wants_logprobs.cpu()
        tops = [each.cpu()[asked] for each in (logprobs.top, logprobs.top_ids, logprobs.chosen)]
        results.append((ruled.cpu(), tops, [*fields, packed, *state]))
    (ruled, tops, exact), (wanted, wanted_tops, wanted_exact) = results
    torch.testing.assert_close(ruled, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(tops[0], wanted_tops[0], rtol=1e-5, atol=2e-5)
    assert torch.equal(tops[1], wanted_tops[1])
    torch.testing.assert_close(tops[2], wanted_tops[2], rtol=1e-5, atol=2e-5)
    for one, other in zip(exact, wanted_exact, strict=True):
        assert torch.equal(one, other)


def test_one_graph_serves_every_parameter() -> None:
    """Replays with other parameters, logits and counters equal eager runs, bit for bit."""
    rows = on_gpu(sampling_rows(KINDS))
    logits = torch.zeros(len(KINDS), 1, 49_152, device="cuda")

    def step() -> sampler_triton.Drawn:
        return sampler_triton.draw(logits, rows, drafts=True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for turn in range(2 * len(KINDS)):
        kinds = [*KINDS[turn % len(KINDS) :], *KINDS[: turn % len(KINDS)]]
        values = on_gpu(sampling_rows(kinds, turn % 2 == 0, first_seed=turn))
        for name in values.__dataclass_fields__:
            getattr(rows, name).copy_(getattr(values, name))
        logits.copy_(randn(len(KINDS), 1, 49_152, seed=turn) * (0.2 + turn % 4))
        graph.replay()
        for one, other in zip(out, step(), strict=True):
            assert torch.equal(one, other), turn
