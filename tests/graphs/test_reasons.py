"""Why a batch got no FULL graph, and why none at all: what ``explain`` says is so."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.verifier.dispatcher import CudagraphDispatcher
from specdec.verifier.modes import (
    AttentionCGSupport,
    BatchDescriptor,
    CUDAGraphMode,
    Downgrade,
    resolve_uniform_query_lens,
)

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
FULL_DECODE_ONLY = CUDAGraphMode.FULL_DECODE_ONLY
FULL_AND_PIECEWISE = CUDAGraphMode.FULL_AND_PIECEWISE


def uniform(num_reqs, query_len, has_lora=False):
    return BatchDescriptor(num_reqs * query_len, num_reqs, True, has_lora)


@st.composite
def dispatchers(draw):
    """Any mode and sizes, adapters or none, a downgrade perhaps, and some keys gone."""
    max_num_seqs = draw(st.integers(1, 12))
    query_lens = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True))
    keys = {"lora": draw(st.booleans())}
    if draw(st.booleans()):
        sizes = draw(st.lists(st.integers(1, 40), max_size=4))
        keys["capture_sizes"] = [*sizes, *(max_num_seqs * q for q in query_lens)]
    else:
        keys["max_num_batched_tokens"] = draw(st.integers(1, 100))
    asked = draw(st.sampled_from(CUDAGraphMode))
    rules = (asked, draw(st.sampled_from(AttentionCGSupport)), query_lens, draw(st.booleans()))
    mode, kept = resolve_uniform_query_lens(*rules)
    dispatcher = CudagraphDispatcher(max_num_seqs=max_num_seqs)
    dispatcher.initialize_cudagraph_keys(
        mode, uniform_query_lens=kept or query_lens, downgrade=Downgrade.of(*rules), **keys
    )
    gone = []
    for item in dispatcher.capture_list():
        if draw(st.integers(0, 3)) == 0:
            dispatcher.remove_key(*item, f"key {len(gone)} is gone")
            gone.append(item)
    return dispatcher, gone


@st.composite
def batches(draw):
    has_lora, num_reqs = draw(st.booleans()), draw(st.integers(1, 14))
    if draw(st.booleans()):
        return uniform(num_reqs, draw(st.integers(1, 6)), has_lora)
    return BatchDescriptor(num_reqs + draw(st.integers(0, 110)), num_reqs, False, has_lora)


def check_clause(clause, dispatcher, gone, batch, allow_full):
    """One part of a reason states a fact, and one that keeps the batch from that mode's graphs."""
    mode, listed = dispatcher.mode, dispatcher.capture_list()
    adapted = " with adapters" if batch.has_lora else ""

    def keys(of, is_uniform):
        return [
            key
            for each, key in listed
            if each is of and key.uniform == is_uniform and key.has_lora == batch.has_lora
        ]

    if clause == "rows share a prefix":
        assert not allow_full and dispatcher.dispatch(batch)[0] is FULL
        return FULL
    if found := re.fullmatch(r"key (\d+) is gone", clause):
        of, key = gone[int(found[1])]
        dispatcher.restore_key(of, key)
        restored = dispatcher.dispatch(batch, allow_full=allow_full or of is FULL)[0]
        dispatcher.remove_key(of, key, clause)
        assert restored is of or restored is FULL
        return of
    if found := re.fullmatch(
        r"cudagraph_mode is (\w+)( where (\w+) was asked for \(.+\))?", clause
    ):
        assert found[1] == mode.name and not mode.has_full_cudagraphs()
        assert found[3] != mode.name
        return FULL
    if clause.startswith(f"cudagraph_mode {mode} has FULL graphs of uniform batches only"):
        assert not batch.uniform and mode.mixed_mode() is not FULL
        return FULL
    if clause == f"{batch.num_reqs} requests are more than max_num_seqs {dispatcher.max_num_seqs}":
        assert batch.num_reqs > dispatcher.max_num_seqs
        return FULL
    if batch.uniform and clause.startswith(
        f"no FULL graph{adapted} has query length {batch.query_len}"
    ):
        assert not [key for key in keys(FULL, True) if key.query_len == batch.query_len]
        return FULL
    if found := re.fullmatch(rf"there is no (\w+) graph{adapted}", clause):
        assert not keys(CUDAGraphMode[found[1]], False)
        return CUDAGraphMode[found[1]]
    found = re.fullmatch(
        rf"(\d+) tokens are more than the largest (\w+) graph{adapted} holds, (\d+)", clause
    )
    assert found, clause
    of, largest = CUDAGraphMode[found[2]], int(found[3])
    assert largest == max(key.num_tokens for key in keys(of, False))
    assert int(found[1]) == batch.num_tokens > largest
    return of


@given(dispatchers(), batches(), st.booleans())
@settings(max_examples=600, deadline=None)
def test_a_reason_is_true_and_complete(made, batch, allow_full):
    """Over modes, adapters, sizes, downgrades and lost keys: it names what is in the way of FULL,
    and for a batch without any graph under a mode with PIECEWISE, what is in the way of that.
    """
    dispatcher, gone = made
    served, _ = dispatcher.dispatch(batch, allow_full=allow_full)
    reason = dispatcher.explain(batch, allow_full=allow_full, forbidden="rows share a prefix")
    if served is FULL:
        assert reason is None
        return
    assert reason
    told = [
        check_clause(clause, dispatcher, gone, batch, allow_full) for clause in reason.split("; ")
    ]
    of_piecewise = served is NONE and dispatcher.mode.has_piecewise_cudagraphs()
    assert told[0] is FULL
    assert (told[-1] is PIECEWISE) == of_piecewise
    assert len(set(told)) == 1 + of_piecewise


@pytest.mark.parametrize(
    ("mode", "batch", "served", "reason"),
    [
        (PIECEWISE, uniform(3, 5), PIECEWISE, "cudagraph_mode is PIECEWISE"),
        (PIECEWISE, uniform(3, 5, True), PIECEWISE, "cudagraph_mode is PIECEWISE"),
        (NONE, uniform(3, 5), NONE, "cudagraph_mode is NONE"),
        (
            PIECEWISE,
            BatchDescriptor(65, 3, has_lora=True),
            NONE,
            "cudagraph_mode is PIECEWISE; "
            "65 tokens are more than the largest PIECEWISE graph with adapters holds, 64",
        ),
        (
            FULL_AND_PIECEWISE,
            BatchDescriptor(20, 3),
            PIECEWISE,
            "cudagraph_mode FULL_AND_PIECEWISE has FULL graphs of uniform batches only",
        ),
        (
            FULL_AND_PIECEWISE,
            BatchDescriptor(100, 3),
            NONE,
            "cudagraph_mode FULL_AND_PIECEWISE has FULL graphs of uniform batches only; "
            "100 tokens are more than the largest PIECEWISE graph holds, 64",
        ),
        (
            FULL_DECODE_ONLY,
            BatchDescriptor(20, 3, has_lora=True),
            NONE,
            "cudagraph_mode FULL_DECODE_ONLY has FULL graphs of uniform batches only",
        ),
        (
            FULL,
            BatchDescriptor(65, 3, has_lora=True),
            NONE,
            "65 tokens are more than the largest FULL graph with adapters holds, 64",
        ),
    ],
)
def test_reasons_in_words(mode, batch, served, reason):
    dispatcher = CudagraphDispatcher(max_num_seqs=8)
    dispatcher.initialize_cudagraph_keys(
        mode, uniform_query_lens=(1, 5), lora=True, max_num_batched_tokens=64
    )
    assert dispatcher.dispatch(batch)[0] is served
    assert dispatcher.explain(batch) == reason


def test_a_downgrade_is_part_of_the_reason():
    """What was asked for, what is served and why: by the mode, or for one query length alone."""
    rules = (FULL, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, (1, 5), True)
    mode, kept = resolve_uniform_query_lens(*rules)
    assert (mode, kept) == (FULL_AND_PIECEWISE, (1,))
    dispatcher = CudagraphDispatcher(max_num_seqs=8)
    dispatcher.initialize_cudagraph_keys(
        mode, uniform_query_lens=kept, downgrade=Downgrade.of(*rules)
    )
    assert dispatcher.dispatch(uniform(3, 1))[0] is FULL
    needs = "needs attention support"
    assert dispatcher.explain(uniform(3, 5)) == (
        f"no FULL graph has query length 5 (FULL for mixed batches {needs} ALWAYS, not "
        f"UNIFORM_SINGLE_TOKEN_DECODE, FULL for query length 5 {needs} UNIFORM_BATCH, not "
        "UNIFORM_SINGLE_TOKEN_DECODE)"
    )
    mixed = dispatcher.explain(BatchDescriptor(20, 3))
    assert mixed.startswith(
        "cudagraph_mode FULL_AND_PIECEWISE has FULL graphs of uniform batches only where FULL was "
        f"asked for (FULL for mixed batches {needs} ALWAYS"
    )


def test_the_reason_names_a_query_length_without_graphs():
    dispatcher = CudagraphDispatcher(max_num_seqs=8)
    dispatcher.initialize_cudagraph_keys(FULL_AND_PIECEWISE, uniform_query_lens=(1, 5))
    assert dispatcher.dispatch(uniform(3, 4))[0] is PIECEWISE
    assert dispatcher.explain(uniform(3, 4)) == "no FULL graph has query length 4"
    reason = dispatcher.explain(BatchDescriptor(12, 3))
    assert reason == "cudagraph_mode FULL_AND_PIECEWISE has FULL graphs of uniform batches only"
