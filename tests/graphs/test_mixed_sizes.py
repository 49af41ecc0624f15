"""How large batches with prompts have graphs, and that the scheduler stays below."""

import pytest
from harness import PROMPTS, assert_no_leak, cpu_engine, greedy

from specdec.verifier.dispatcher import CudagraphDispatcher
from specdec.verifier.modes import CUDAGraphMode

FULL_AND_PIECEWISE = CUDAGraphMode.FULL_AND_PIECEWISE
FULL_DECODE_ONLY = CUDAGraphMode.FULL_DECODE_ONLY


def make(mode, max_num_seqs=8, **keys):
    dispatcher = CudagraphDispatcher(max_num_seqs=max_num_seqs)
    dispatcher.initialize_cudagraph_keys(mode, **keys)
    return dispatcher


@pytest.mark.parametrize(
    ("max_num_seqs", "query_len", "budget", "largest"),
    [
        (64, 5, 2048, 832),  # all decode rows, and 512 tokens of prompts
        (200, 5, 2048, 1512),
        (64, 5, 8192, 2368),  # a quarter of the budget is prompts'
        (256, 9, 2048, 2048),
        (8, 5, 100, 100),
        (64, 5, None, 832),
    ],
)
def test_default_mixed_sizes_have_room_for_prompts_beside_all_decode_rows(
    max_num_seqs, query_len, budget, largest
):
    dispatcher = make(
        FULL_AND_PIECEWISE,
        max_num_seqs,
        uniform_query_lens=(1, query_len),
        max_num_batched_tokens=budget,
    )
    assert dispatcher.largest_mixed == largest
    assert make(FULL_DECODE_ONLY).largest_mixed is None


LONG = [(29 * i + i * i) % 128 for i in range(60)]


@pytest.mark.parametrize(("largest", "most"), [(26, 26), (24, 40)])
def test_prompts_beside_decode_rows_stay_within_the_largest_graph(models, largest, most):
    """Where it leaves them their quarter of the budget, 10 of 40 tokens beside four rows of four.

    Chunks change no text. Prompts alone take the whole budget.
    """
    options = {"max_num_seqs": 5, "max_num_batched_tokens": 40, "uniform_request_counts": [5]}
    with cpu_engine(models["target"], None, cudagraph_mode="NONE") as engine:
        expected = [out.token_ids for out in engine.generate([*PROMPTS[:4], LONG], greedy(20))]
    with cpu_engine(
        models["target"], models["negated"], 3, cudagraph_capture_sizes=[5, 20, largest], **options
    ) as engine:
        groups = [engine.add_request(prompt, greedy(20)) for prompt in PROMPTS[:4]]
        while any(not group[0].output_ids for group in groups):
            engine.step()
        groups.append(engine.add_request(LONG, greedy(20)))
        while any(group[0].finish_reason is None for group in groups):
            engine.step()
        assert [group[0].output_ids for group in groups] == expected
        beside = [r for r in engine.recent_steps(1000) if "beside decode" in (r.reason or "")]
        assert max(r.num_tokens for r in beside) == most
        for record in beside:
            assert (record.mode == "PIECEWISE") == (record.num_tokens <= largest)
        if largest == 26:
            assert {r.mode for r in beside} == {"PIECEWISE"}
        engine.generate(LONG[::-1], greedy(1))
        alone = engine.recent_steps(2)[0]
        assert (alone.mode, alone.num_tokens) == ("NONE", 40)
        assert (
            f"40 tokens are more than the largest PIECEWISE graph holds, {largest}" in alone.reason
        )
        assert_no_leak(engine)
