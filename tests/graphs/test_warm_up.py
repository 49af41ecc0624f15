"""Warm-up runs every kind of batch on padding alone: it leaves no trace."""

import pytest
import torch
from harness import PROMPTS, cpu_engine, greedy


@pytest.mark.parametrize("draft", ["blend.1", "ngram", "suffix", "layer_skip:1", None])
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE", "NONE"])
def test_warm_up_leaves_no_trace(models, draft, mode):
    with cpu_engine(
        models["target"], models.get(draft, draft), 4, cudagraph_mode=mode, max_num_seqs=3
    ) as engine:
        before = engine.generate(PROMPTS[0], greedy(12)).token_ids
        state = engine._runner.state
        live = [state.tokens[:-1].clone(), state.ints.clone(), state.block_table.clone()]
        engine._runner.warm_up()
        replays = sum(row.replays for row in engine.graph_table())
        engine._runner.warm_up_pieces()
        assert (sum(row.replays for row in engine.graph_table()) > replays) == (mode == "PIECEWISE")
        engine._runner.forget_replays()
        assert not any(row.replays for row in engine.graph_table())
        now = [state.tokens[:-1], state.ints, state.block_table]
        assert all(torch.equal(old, new) for old, new in zip(live, now, strict=True))
        assert engine.generate(PROMPTS[0], greedy(12)).token_ids == before
        engine.check_integrity()
