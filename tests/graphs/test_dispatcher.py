"""Which graph a batch takes. Tested without a device: the dispatcher is pure Python."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.verifier.dispatcher import CudagraphDispatcher, capture_ladder, round_counts
from specdec.verifier.modes import BatchDescriptor, CUDAGraphMode

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
FULL_DECODE_ONLY = CUDAGraphMode.FULL_DECODE_ONLY
FULL_AND_PIECEWISE = CUDAGraphMode.FULL_AND_PIECEWISE


def make(mode, max_num_seqs=8, **keys):
    dispatcher = CudagraphDispatcher(max_num_seqs=max_num_seqs)
    dispatcher.initialize_cudagraph_keys(mode, **keys)
    return dispatcher


def uniform(num_reqs, query_len, has_lora=False):
    return BatchDescriptor(num_reqs * query_len, num_reqs, True, has_lora)


# -- properties -------------------------------------------------------------------------------


@st.composite
def dispatchers(draw):
    """A dispatcher with any mode and grid that it accepts, and what it was made with."""
    max_num_seqs = draw(st.integers(1, 70))
    query_lens = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True))
    keys = {"uniform_query_lens": query_lens, "lora": draw(st.booleans())}
    keys["rounds"] = draw(st.lists(st.integers(2, 8), max_size=2, unique=True))
    sizes = st.lists(st.integers(1, 80), max_size=8)
    if draw(st.booleans()):
        widest = [max_num_seqs * query_len for query_len in query_lens]
        keys["capture_sizes"] = draw(st.permutations(draw(sizes) + widest))
    if draw(st.booleans()):
        counts = [count for count in draw(sizes) if count < max_num_seqs]
        keys["uniform_request_counts"] = [*counts, max_num_seqs]
    mode = draw(st.sampled_from(CUDAGraphMode))
    return make(mode, max_num_seqs, **keys), keys


@st.composite
def batches(draw):
    has_lora = draw(st.booleans())
    num_reqs = draw(st.integers(1, 80))
    if draw(st.booleans()):
        return uniform(num_reqs, draw(st.integers(1, 10)), has_lora)
    return BatchDescriptor(num_reqs + draw(st.integers(0, 600)), num_reqs, False, has_lora)


@given(dispatchers())
@settings(max_examples=60, deadline=None)
def test_every_uniform_batch_has_a_full_graph(made):
    """C28: every batch up to max_num_seqs, for every allowed k, under a FULL decode mode."""
    dispatcher, keys = made
    if dispatcher.mode.decode_mode() is not FULL:
        return
    for query_len in keys["uniform_query_lens"]:
        for num_reqs in range(1, dispatcher.max_num_seqs + 1):
            for has_lora in {False, keys["lora"]}:
                batch = uniform(num_reqs, query_len, has_lora)
                mode, key = dispatcher.dispatch(batch)
                assert mode is FULL and key.uniform
                assert key.query_len == query_len and key.num_reqs >= num_reqs
                assert dispatcher.explain(batch) is None


@given(dispatchers(), batches(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_dispatch_obeys_the_capture_list(made, batch, allow_full):
    """The answer is in the list, fits, is the strongest mode and the least padding in the list."""
    dispatcher, _ = made
    listed = dispatcher.capture_list()
    mode, key = dispatcher.dispatch(batch, allow_full=allow_full)

    def fits(candidate_mode, candidate):
        if candidate.has_lora != batch.has_lora or candidate.num_tokens < batch.num_tokens:
            return False
        if candidate_mode is PIECEWISE:
            return True
        if candidate.uniform and not (batch.uniform and candidate.query_len == batch.query_len):
            return False
        return allow_full and candidate.num_reqs >= batch.num_reqs

    fitting = [item for item in listed if fits(*item)]
    if not fitting:
        assert (mode, key) == (NONE, batch)
        return
    assert mode is max((item[0] for item in fitting), key=lambda each: each.value)
    same_mode = [item[1] for item in fitting if item[0] is mode]
    if any(candidate.uniform for candidate in same_mode):
        same_mode = [candidate for candidate in same_mode if candidate.uniform]
    assert key.num_tokens == min(candidate.num_tokens for candidate in same_mode)
    if mode is FULL:
        assert (mode, key) in listed
    else:
        assert key.num_reqs == batch.num_reqs and not key.uniform
        assert key.relaxed() in [candidate.relaxed() for candidate in same_mode]


@given(dispatchers(), batches())
@settings(max_examples=300, deadline=None)
def test_what_a_key_never_is(made, batch):
    """A mixed batch takes no uniform key, however alike its shape; LoRA and base share no key."""
    dispatcher, _ = made
    mode, key = dispatcher.dispatch(batch)
    assert key.has_lora == batch.has_lora
    assert key.num_reqs >= batch.num_reqs and key.num_tokens >= batch.num_tokens
    if not batch.uniform:
        assert not key.uniform
    if mode is FULL and key.uniform:
        assert key.query_len == batch.query_len
    if mode is not FULL:
        assert dispatcher.explain(batch)


@given(dispatchers())
@settings(max_examples=100, deadline=None)
def test_capture_list_order(made):
    """Each key once, PIECEWISE before FULL, largest first, and no more requests than there are."""
    dispatcher, _ = made
    listed = dispatcher.capture_list()
    assert len(set(listed)) == len(listed)
    modes = [mode for mode, _ in listed]
    assert modes == sorted(modes, key=lambda mode: mode.value)
    for wanted in (PIECEWISE, FULL):
        tokens = [key.num_tokens for mode, key in listed if mode is wanted]
        assert tokens == sorted(tokens, reverse=True)
    for _, key in listed:
        assert key.num_reqs <= dispatcher.max_num_seqs
        if not key.uniform:
            assert key.num_reqs == min(key.num_tokens, dispatcher.max_num_seqs)


@given(dispatchers(), batches(), st.integers(2, 8), st.booleans())
@settings(max_examples=300, deadline=None)
def test_rounds_stand_beside_the_graphs_of_one_round(made, batch, rounds, allow_full):
    """Graphs of several rounds are uniform, FULL, in their list and never wider than the grid.

    Whatever becomes of them, the answer for one round is the same.
    """
    dispatcher, keys = made
    one = dispatcher.dispatch(batch, allow_full=allow_full)
    listed = dispatcher.capture_list(rounds)
    assert {mode for mode, _ in listed} <= {FULL} and all(key.uniform for _, key in listed)
    assert set(listed) <= set(dispatcher.capture_list())
    mode, key = dispatcher.dispatch(batch, allow_full=allow_full, rounds=rounds)
    full = dispatcher.mode.decode_mode() is FULL and allow_full and batch.uniform
    known = full and rounds in keys["rounds"] and batch.query_len in keys["uniform_query_lens"]
    known = known and (keys["lora"] or not batch.has_lora)
    if known and batch.num_reqs <= dispatcher.max_num_seqs:
        assert mode is FULL and (mode, key) in listed
        assert (key.query_len, key.has_lora) == (batch.query_len, batch.has_lora)
        assert batch.num_reqs <= key.num_reqs
        assert key.num_reqs >= one[1].num_reqs
    else:
        assert (mode, key) == (NONE, batch)
        assert dispatcher.explain(batch, allow_full=allow_full, rounds=rounds)
    for mode, key in listed:
        dispatcher.remove_key(mode, key, "no room", rounds)
    assert dispatcher.capture_list(rounds) == []
    assert dispatcher.dispatch(batch, allow_full=allow_full, rounds=rounds) == (NONE, batch)
    assert dispatcher.dispatch(batch, allow_full=allow_full) == one
    for mode, key in listed:
        dispatcher.restore_key(mode, key, rounds)
    assert dispatcher.capture_list(rounds) == listed


@given(st.lists(st.integers(1, 300), min_size=1, unique=True).map(sorted))
def test_rounds_have_graphs_at_about_each_power_of_two(counts):
    kept = round_counts(counts)
    assert kept == sorted(set(kept)) and set(kept) <= set(counts)
    assert kept[-1] == counts[-1]
    for power in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        if power <= counts[-1]:
            assert next(c for c in kept if c >= power) == next(c for c in counts if c >= power)


@given(st.integers(1, 2000))
def test_the_default_grid_has_bounded_padding(limit):
    sizes = capture_ladder(limit)
    assert sizes[0] == 1 and sizes[-1] == limit
    assert sizes == sorted(set(sizes))
    for smaller, larger in pairwise(sizes):
        least = smaller + 1
        padding = larger - least
        assert padding <= 3 or padding <= least // 2
        assert least < 32 or padding <= least // 4
    if limit <= 64:
        assert len(sizes) <= 12


# -- examples ---------------------------------------------------------------------------------


def test_priority_a_padded_full_beats_an_exact_piecewise():
    dispatcher = make(
        FULL_AND_PIECEWISE,
        capture_sizes=[5, 15, 40],
        uniform_query_lens=(5,),
    )
    assert dispatcher.dispatch(uniform(2, 5)) == (FULL, uniform(3, 5))
    assert dispatcher.dispatch(BatchDescriptor(15, 3)) == (PIECEWISE, BatchDescriptor(15, 3))


def test_a_prompt_of_exactly_1_plus_k_tokens_is_not_a_verify_row():
    """C25: the shape of a verify batch does not make one; the caller says what is uniform."""
    dispatcher = make(FULL_AND_PIECEWISE, uniform_query_lens=(1, 5))
    for num_reqs in (1, 3, 4):
        mode, key = dispatcher.dispatch(BatchDescriptor(5 * num_reqs, num_reqs, uniform=False))
        assert mode is PIECEWISE and not key.uniform


@pytest.mark.parametrize("max_num_seqs", [9, 6, 100])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 7])
def test_odd_limits_are_covered(max_num_seqs, k):
    """C28: sizes that are no multiples of 1+k, a largest size that is no rung of the ladder."""
    dispatcher = make(FULL_AND_PIECEWISE, max_num_seqs, uniform_query_lens=(1, 1 + k))
    rungs = capture_ladder(max_num_seqs)
    for num_reqs in range(1, max_num_seqs + 1):
        mode, key = dispatcher.dispatch(uniform(num_reqs, 1 + k))
        assert mode is FULL
        assert key.num_reqs == min(rung for rung in rungs if rung >= num_reqs)


def test_more_requests_than_the_limit_run_without_a_graph_and_say_so():
    """C28: 9 over a limit of 8."""
    dispatcher = make(FULL_DECODE_ONLY, 8, uniform_query_lens=(5,))
    assert dispatcher.dispatch(uniform(9, 5)) == (NONE, uniform(9, 5))
    assert dispatcher.explain(uniform(9, 5)) == "9 requests are more than max_num_seqs 8"


def test_sizes_in_tokens_are_rounded_up_to_the_query_length():
    dispatcher = make(
        FULL_DECODE_ONLY, 9, capture_sizes=[1, 2, 4, 8, 9, 16, 45], uniform_query_lens=(1, 5)
    )
    counts = {1: [], 5: []}
    for _, key in dispatcher.capture_list():
        counts[key.query_len].append(key.num_reqs)
    # For k=4: 1, 2 and 4 round up to one request, 8 and 9 to two, 16 to four.
    assert counts == {1: [9, 8, 4, 2, 1], 5: [9, 4, 2, 1]}


@pytest.mark.parametrize(
    ("sizes", "query_lens", "usable"),
    [
        ([1, 2, 4, 8], (1,), [1, 2, 4, 8, 9]),
        ([1, 2, 4, 8], (1, 5), [1, 2, 4, 8, 9, 45]),
        ([8, 9], (5, 3), [8, 9, 27, 45]),
        ([512, 9], (5, 1), [9, 45, 512]),
        ([40, 48], (5,), [40, 45, 48]),
    ],
)
def test_a_list_without_the_widest_batch_is_refused_with_the_one_to_use(sizes, query_lens, usable):
    with pytest.raises(ValueError, match="cudagraph_capture_sizes") as refusal:
        make(FULL_AND_PIECEWISE, 9, capture_sizes=sizes, uniform_query_lens=query_lens)
    assert str(refusal.value).endswith(f"use {usable}")
    make(FULL_AND_PIECEWISE, 9, capture_sizes=usable, uniform_query_lens=query_lens)


@pytest.mark.parametrize(("counts", "usable"), [([1, 4], [1, 4, 9]), ([4, 16], [4, 9])])
def test_request_counts_must_end_at_the_limit(counts, usable):
    with pytest.raises(ValueError, match="uniform_request_counts") as refusal:
        make(FULL_DECODE_ONLY, 9, uniform_request_counts=counts)
    assert str(refusal.value).endswith(f"use {usable}")
    make(FULL_DECODE_ONLY, 9, uniform_request_counts=usable)


@pytest.mark.parametrize(
    ("field", "keys"),
    [
        ("cudagraph_capture_sizes", {"capture_sizes": [0, 8]}),
        ("cudagraph_capture_sizes", {"capture_sizes": []}),
        ("cudagraph_capture_sizes", {"capture_sizes": [1.5, 8]}),
        ("cudagraph_capture_sizes", {"capture_sizes": [True, 8]}),
        ("uniform_request_counts", {"uniform_request_counts": [-1, 8]}),
        ("uniform_query_lens", {"uniform_query_lens": [0]}),
        ("max_num_batched_tokens", {"max_num_batched_tokens": 0}),
        ("rounds", {"rounds": [1, 4]}),
        ("rounds", {"rounds": [0]}),
    ],
)
def test_bad_settings_are_refused_by_name(field, keys):
    with pytest.raises(ValueError, match=field):
        make(FULL_AND_PIECEWISE, **keys)


def test_a_refused_list_leaves_the_keys_as_they_were():
    dispatcher = make(FULL_DECODE_ONLY, 8)
    before = dispatcher.capture_list()
    with pytest.raises(ValueError, match="cudagraph_capture_sizes"):
        dispatcher.initialize_cudagraph_keys(FULL_AND_PIECEWISE, capture_sizes=[4])
    assert (dispatcher.mode, dispatcher.capture_list()) == (FULL_DECODE_ONLY, before)


def test_max_num_seqs_must_be_positive():
    with pytest.raises(ValueError, match="max_num_seqs"):
        CudagraphDispatcher(max_num_seqs=0)


@pytest.mark.parametrize(
    "batch",
    [BatchDescriptor(7, 2, True), BatchDescriptor(0, 0), BatchDescriptor(2, 3)],
)
def test_an_impossible_batch_is_refused(batch):
    with pytest.raises(ValueError, match="batch"):
        make(FULL_AND_PIECEWISE).dispatch(batch)


def test_plain_full_captures_mixed_batches_with_room_for_their_requests():
    dispatcher = make(FULL, 8, uniform_query_lens=(1, 5), max_num_batched_tokens=64)
    assert dispatcher.dispatch(BatchDescriptor(3, 2)) == (FULL, BatchDescriptor(4, 4))
    assert dispatcher.dispatch(BatchDescriptor(50, 2)) == (FULL, BatchDescriptor(56, 8))
    assert dispatcher.dispatch(uniform(3, 5)) == (FULL, uniform(4, 5))
    # A query length without keys of its own rides in a mixed graph, which does not claim it.
    assert dispatcher.dispatch(uniform(3, 2)) == (FULL, BatchDescriptor(8, 8))
    assert dispatcher.dispatch(BatchDescriptor(65, 2)) == (NONE, BatchDescriptor(65, 2))
    assert "65 tokens are more" in dispatcher.explain(BatchDescriptor(65, 2))


def test_piecewise_serves_uniform_batches_by_their_tokens():
    dispatcher = make(PIECEWISE, capture_sizes=[16], uniform_query_lens=(5,))
    assert dispatcher.dispatch(uniform(3, 5)) == (PIECEWISE, BatchDescriptor(16, 3))
    assert dispatcher.explain(uniform(3, 5)) == "cudagraph_mode is PIECEWISE"


def test_none_has_no_keys():
    dispatcher = make(NONE, uniform_query_lens=(1, 5), lora=True)
    assert dispatcher.capture_list() == []
    assert dispatcher.dispatch(uniform(3, 5)) == (NONE, uniform(3, 5))


@pytest.mark.parametrize(("mode", "left"), [(FULL_AND_PIECEWISE, PIECEWISE), (FULL, NONE)])
def test_a_batch_that_forbids_full_takes_what_is_left(mode, left):
    """The cascade rule: attention that cannot lie in a graph drops to PIECEWISE, or NONE."""
    dispatcher = make(mode, uniform_query_lens=(5,))
    assert dispatcher.dispatch(uniform(3, 5), allow_full=False)[0] is left
    assert "forbids FULL" in dispatcher.explain(uniform(3, 5), allow_full=False)


def test_lora_keys_may_come_later():
    """Every key gets a twin, those of several rounds and of batches with prompts too."""
    for mode in CUDAGraphMode:
        at_once = make(mode, uniform_query_lens=(1, 5), lora=True, rounds=[4])
        later = make(mode, uniform_query_lens=(1, 5), rounds=[4])
        later.add_lora_keys()
        later.add_lora_keys()
        for rounds in (1, 4):
            listed = later.capture_list(rounds)
            assert listed == at_once.capture_list(rounds)
            assert bool(listed) == any(key.has_lora for _, key in listed)
    both = make(FULL_AND_PIECEWISE, uniform_query_lens=(1, 5))
    both.add_lora_keys()
    assert both.dispatch(uniform(3, 5, True)) == (FULL, uniform(4, 5, True))
    mixed = BatchDescriptor(9, 3, False, True)
    assert both.dispatch(mixed) == (PIECEWISE, mixed._replace(num_tokens=12))


def test_lora_batches_have_keys_of_their_own():
    with_lora = make(FULL_DECODE_ONLY, lora=True)
    without = make(FULL_DECODE_ONLY)
    assert with_lora.dispatch(uniform(3, 1, True)) == (FULL, uniform(4, 1, True))
    assert with_lora.dispatch(uniform(3, 1)) == (FULL, uniform(4, 1))
    assert without.dispatch(uniform(3, 1, True)) == (NONE, uniform(3, 1, True))
    assert without.explain(uniform(3, 1, True)) == "no FULL graph with adapters has query length 1"
    assert len(with_lora.capture_list()) == 2 * len(without.capture_list())


def test_a_removed_key_is_not_dispatched_and_the_reason_is_kept():
    """C31: a capture that failed leaves its batches to the next key that fits, then to none."""
    dispatcher = make(FULL_DECODE_ONLY, 4, uniform_request_counts=[2, 4])
    dispatcher.remove_key(FULL, uniform(2, 1), "out of memory")
    assert dispatcher.dispatch(uniform(1, 1)) == (FULL, uniform(4, 1))
    dispatcher.remove_key(FULL, uniform(4, 1), "out of memory at 4 requests")
    assert dispatcher.dispatch(uniform(3, 1)) == (NONE, uniform(3, 1))
    assert dispatcher.explain(uniform(3, 1)) == "out of memory at 4 requests"
    with pytest.raises(KeyError, match="no FULL graph"):
        dispatcher.remove_key(FULL, uniform(4, 1), "again")
    dispatcher.restore_key(FULL, uniform(4, 1))
    assert dispatcher.dispatch(uniform(3, 1)) == (FULL, uniform(4, 1))


def test_a_removed_mixed_key_can_be_restored():
    dispatcher = make(PIECEWISE, capture_sizes=[8, 16])
    dispatcher.remove_key(PIECEWISE, BatchDescriptor(8, 8), "no")
    assert dispatcher.dispatch(BatchDescriptor(5, 1)) == (PIECEWISE, BatchDescriptor(16, 1))
    dispatcher.restore_key(PIECEWISE, BatchDescriptor(8, 8))
    assert dispatcher.dispatch(BatchDescriptor(5, 1)) == (PIECEWISE, BatchDescriptor(8, 1))
