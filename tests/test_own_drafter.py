"""P1 and P7 with a user's own drafter: whatever it proposes, the text is the target's."""

import pytest
import torch
from harness import PROMPTS, assert_no_leak, chi_square_p_value, cpu_engine, greedy, histogram
from oracle import expect, speculate
from tiny import constant_model

from specdec import Drafter

ONE_RUNG = {"uniform_request_counts": [5]}


class Noise(Drafter):
    """Random ids: real ones, none (-1), and ids that no vocabulary has."""

    name = "noise"

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.generator = torch.Generator().manual_seed(0)

    def propose(self, state, k):
        shape = (len(state.seq_lens), k)
        return torch.randint(self.low, self.high, shape, generator=self.generator)


class Foresight(Drafter):
    """Knows the texts: proposes what the oracle says, -1 from the given place of a step on."""

    name = "foresight"

    def __init__(self, oracle, places: int) -> None:
        self.oracle, self.places = oracle, places

    def propose(self, state, k):
        ids = torch.full((len(state.seq_lens), k), -1)
        texts = zip(state.tokens.tolist(), state.seq_lens.tolist(), strict=True)
        for row, (text, length) in enumerate(texts):
            # A row of padding has no text.
            if length:
                future, _ = self.oracle.greedy(text[:length], min(k, self.places))
                ids[row, : len(future)] = torch.tensor(future)
        return ids


class Broken(Drafter):
    def __init__(self, proposal) -> None:
        self.proposal = proposal

    def propose(self, state, k):
        return self.proposal(len(state.seq_lens), k)


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("bounds", [(0, 128), (-1, 8), (-5, 10**6)], ids=str)
def test_random_proposals_are_lossless(models, oracles, bounds, mode):
    with cpu_engine(models["target"], Noise(*bounds), 4, cudagraph_mode=mode, **ONE_RUNG) as engine:
        for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(16)), strict=True):
            assert out.token_ids == oracles["target"].greedy(prompt, 16)[0]
            assert all(count <= 4 for count in out.stats.drafted_per_step)
        assert_no_leak(engine)


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("places", [0, 1, 3, 4])
def test_what_it_knows_is_accepted_and_what_it_leaves_out_is_not_counted(
    models, oracles, places, mode
):
    target = oracles["target"]
    with cpu_engine(
        models["target"], Foresight(target, places), 4, cudagraph_mode=mode, **ONE_RUNG
    ) as engine:
        for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(18)), strict=True):
            expect(out, speculate(target, target, prompt, k=places, max_new_tokens=18))


def test_its_sampled_texts_follow_the_target(tmp_path):
    """2,000 draws; a correct engine fails for one seed in a million."""
    probs = (0.5, 0.3, 0.15, 0.05)
    target = constant_model(tmp_path / "target", probs)
    with cpu_engine(
        str(target), Noise(0, 4), 3, acceptance="rejection", max_model_len=410, **ONE_RUNG
    ) as engine:
        params = [greedy(400, temperature=1.0, seed=seed) for seed in range(5)]
        outs = engine.generate([[0]] * 5, params)
    ids = [token for out in outs for token in out.token_ids]
    assert chi_square_p_value(histogram(ids, 4), probs) > 1e-6


@pytest.mark.parametrize(
    "proposal",
    [
        lambda rows, k: torch.zeros(rows, k + 1, dtype=torch.int64),
        lambda rows, k: torch.zeros(rows + 1, k, dtype=torch.int64),
        lambda rows, k: 1 // 0,
    ],
    ids=["wide", "long", "raises"],
)
def test_a_broken_drafter_stops_its_call_and_nothing_else(models, proposal):
    """The error reaches the caller; every block comes back."""
    with cpu_engine(models["target"], Broken(proposal), 4, cudagraph_mode="NONE") as engine:
        with pytest.raises((ValueError, ZeroDivisionError)):
            engine.generate(PROMPTS, greedy(9))
        assert_no_leak(engine)
        outs = engine.generate(PROMPTS[:2], greedy(9, k=0))
        assert [len(out.token_ids) for out in outs] == [9, 9]
