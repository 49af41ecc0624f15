"""The wrapper obeys the forward context; the recorder stands in for CUDA here."""

import gc
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specdec.verifier.capture import CaptureError
from specdec.verifier.context import set_forward_context
from specdec.verifier.dispatcher import CudagraphDispatcher
from specdec.verifier.graph import CUDAGraphWrapper, GraphPool, capture_all
from specdec.verifier.modes import BatchDescriptor, CUDAGraphMode, GraphKey

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
FOUR, EIGHT = BatchDescriptor(4, 4, True), BatchDescriptor(8, 8, True)


def under(mode, descriptor=FOUR, **context):
    return set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=descriptor, **context)


def captured(wrapper, *args, descriptor=FOUR, mode=FULL, **context):
    with wrapper.capture_window(), under(mode, descriptor, **context):
        return wrapper(*args)


class Counted:
    """Doubles its argument, and counts how often its Python code runs."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


@pytest.fixture
def pool() -> GraphPool:
    return GraphPool("cpu")


def test_capture_then_replay(pool):
    fn, x = Counted(), torch.ones(4)
    wrapper = CUDAGraphWrapper(fn, FULL, pool=pool)
    out = captured(wrapper, x)
    assert out.isnan().all(), "a capture runs nothing"
    for value in (3.0, 5.0):
        x.fill_(value)
        with under(FULL):
            assert wrapper(x) is out
        assert out.tolist() == [2 * value] * 4
    assert fn.calls == 1


@pytest.mark.parametrize(("mine", "live"), [(FULL, NONE), (FULL, PIECEWISE), (PIECEWISE, FULL)])
def test_another_mode_calls_straight_through(pool, mine, live):
    fn = Counted()
    wrapper = CUDAGraphWrapper(fn, mine, pool=pool)
    with pool.capture_window(), under(live):
        assert wrapper(torch.ones(1)).item() == 2.0
    assert fn.calls == 1 and wrapper.table() == []


def test_without_a_context_the_call_is_an_error(pool):
    with pytest.raises(RuntimeError, match="set_forward_context"):
        CUDAGraphWrapper(Counted(), FULL, pool=pool)(torch.ones(1))


def test_a_missing_key_outside_a_window_is_an_error_naming_it(pool):
    """The dispatcher is the source of truth: nothing is captured in the middle of traffic."""
    fn = Counted()
    wrapper = CUDAGraphWrapper(fn, FULL, pool=pool)
    key = GraphKey("step", FOUR, "sampled", 2)
    missing = pytest.raises(RuntimeError, match="no capture window")
    with missing as error, under(FULL, variant="sampled", rounds=2):
        wrapper(torch.ones(1))
    assert str(key) in str(error.value) and fn.calls == 0
    assert not pool.window_is_open


def test_keys_differ_in_shape_lora_variant_rounds_and_role(pool):
    """C42 and more: no two of these may share a graph."""
    keys = [
        (FOUR, {}),
        (BatchDescriptor(4, 2, True), {}),
        (BatchDescriptor(4, 4, False), {}),
        (BatchDescriptor(4, 4, True, True), {}),
        (FOUR, {"variant": "sampled"}),
        (FOUR, {"rounds": 2}),
    ]
    for role in ("step", "draft_decode"):
        wrapper = CUDAGraphWrapper(Counted(), FULL, role=role, pool=pool)
        outputs = [captured(wrapper, torch.ones(4), descriptor=d, **more) for d, more in keys]
        assert len({out.data_ptr() for out in outputs}) == len(keys)
        rows = wrapper.table()
        assert [row.descriptor for row in rows] == [descriptor for descriptor, _ in keys]
        assert {row.role for row in rows} == {role} and {row.mode for row in rows} == {"FULL"}
        assert rows[4].variant == "sampled" and rows[5].rounds == 2
        assert wrapper.has_graph(GraphKey(role, FOUR))


def test_a_piecewise_key_is_relaxed_to_tokens_and_lora(pool):
    wrapper = CUDAGraphWrapper(Counted(), PIECEWISE, pool=pool)
    out = captured(wrapper, torch.ones(8), mode=PIECEWISE, descriptor=BatchDescriptor(8, 3))
    with under(PIECEWISE, BatchDescriptor(8, 5)):
        assert wrapper(torch.ones(8)) is out
    assert [row.descriptor for row in wrapper.table()] == [BatchDescriptor(8, 0)]


def test_full_outside_and_piecewise_inside_never_fire_together(pool):
    """The inner wrappers are part of the outer graph, and silent at its replay."""
    first, second = Counted(), Counted()
    pieces = [CUDAGraphWrapper(fn, PIECEWISE, pool=pool) for fn in (first, second)]
    x, between = torch.ones(4), torch.zeros(4)

    def model(x):
        # What runs between two pieces, as attention does, writes to a static tensor.
        torch.add(pieces[0](x), 1, out=between)
        return pieces[1](between)

    whole = CUDAGraphWrapper(model, FULL, pool=pool)
    captured(whole, x)
    captured(whole, x, mode=PIECEWISE)
    assert len(whole.table()) == 1 and [len(piece.table()) for piece in pieces] == [1, 1]
    for mode, replays in ((FULL, [1, 0, 0]), (PIECEWISE, [1, 1, 1]), (NONE, [1, 1, 1])):
        x.fill_(mode.value)
        with under(mode):
            assert whole(x).tolist() == [(mode.value * 2 + 1) * 2] * 4
        assert [w.table()[0].replays for w in (whole, *pieces)] == replays
    assert (first.calls, second.calls) == (3, 3)  # two captures and the eager call


def test_a_full_wrapper_inside_a_full_capture_is_part_of_it(pool):
    """A drafter's own wrapper inside the step that holds the whole round."""
    inner = CUDAGraphWrapper(Counted(), FULL, role="draft_decode", pool=pool)
    outer = CUDAGraphWrapper(lambda x: inner(x) + 1, FULL, pool=pool)
    x = torch.ones(4)
    captured(outer, x)
    with under(FULL):
        assert outer(x).tolist() == [3.0] * 4
    assert inner.table() == []


def test_one_function_for_several_shapes_on_shared_state(pool):
    """The state advances whichever graph is replayed, padding rows included in none of it."""
    state = torch.zeros(8)
    wrapper = CUDAGraphWrapper(lambda n: state[:n].add_(1).sum(), FULL, pool=pool)
    for descriptor in (EIGHT, FOUR):
        captured(wrapper, descriptor.num_reqs, descriptor=descriptor)
    assert not state.any()
    sums = []
    for descriptor in (FOUR, EIGHT, FOUR):
        with under(FULL, descriptor):
            sums.append(wrapper(descriptor.num_reqs).item())
    assert sums == [4.0, 12.0, 12.0]
    assert state.tolist() == [3.0] * 4 + [1.0] * 4
    assert {row.descriptor: row.replays for row in wrapper.table()} == {FOUR: 2, EIGHT: 1}


# -- capture windows --------------------------------------------------------------------------


def test_garbage_collection_rests_in_a_window_and_windows_nest(pool):
    assert gc.isenabled()
    with pool.capture_window():
        with pool.capture_window():
            assert not gc.isenabled()
        assert not gc.isenabled() and pool.window_is_open
    assert gc.isenabled() and not pool.window_is_open
    with pytest.raises(ZeroDivisionError), pool.capture_window():
        raise ZeroDivisionError
    assert gc.isenabled() and not pool.window_is_open


def test_a_failing_capture_names_key_and_cause_and_changes_nothing(pool):
    """C31: state is as before, the key is not there, other graphs go on."""
    state = torch.zeros(2)

    def fn(host_read):
        state.add_(1)
        return state.sum().item() if host_read else state.sum()

    wrapper = CUDAGraphWrapper(fn, FULL, pool=pool)
    captured(wrapper, False, descriptor=EIGHT)
    with pytest.raises(CaptureError) as error:
        captured(wrapper, True)
    assert str(GraphKey("step", FOUR)) in str(error.value)
    assert "Tensor.item cannot be captured" in str(error.value)
    assert isinstance(error.value.__cause__, CaptureError)
    assert not state.any() and not wrapper.has_graph(GraphKey("step", FOUR))
    with under(FULL, EIGHT):
        assert wrapper(False).item() == 2.0


def test_capture_all_warms_up_and_captures_in_the_dispatchers_order(pool):
    dispatcher = CudagraphDispatcher(max_num_seqs=4)
    dispatcher.initialize_cudagraph_keys(
        CUDAGraphMode.FULL_AND_PIECEWISE, capture_sizes=[2, 4], uniform_query_lens=(1,)
    )
    fn, x = Counted(), torch.ones(4)
    wrappers = {mode: CUDAGraphWrapper(fn, mode, pool=pool) for mode in (FULL, PIECEWISE)}
    runs = []

    def run(mode, descriptor):
        runs.append((mode, descriptor))
        with under(mode, descriptor):
            wrappers[FULL if descriptor.uniform else PIECEWISE](x[: descriptor.num_reqs])

    capture_all(pool, dispatcher.capture_list(), run)
    assert runs == [
        (mode, descriptor)
        for wanted, descriptor in dispatcher.capture_list()
        for mode in (NONE, wanted)
    ]
    assert [row.descriptor.num_tokens for row in wrappers[FULL].table()] == [4, 2]
    assert [row.descriptor.num_tokens for row in wrappers[PIECEWISE].table()] == [4, 2]


def test_capture_all_hands_failures_on_and_captures_the_rest(pool):
    dispatcher = CudagraphDispatcher(max_num_seqs=4)
    dispatcher.initialize_cudagraph_keys(
        CUDAGraphMode.FULL_DECODE_ONLY, uniform_request_counts=[2, 4]
    )
    x = torch.ones(4)
    wrapper = CUDAGraphWrapper(
        lambda n: x[:n].sum().item() if n == 2 else x[:n] + 1, FULL, pool=pool
    )

    def run(mode, descriptor):
        with under(mode, descriptor):
            wrapper(descriptor.num_reqs)

    capture_all(
        pool,
        dispatcher.capture_list(),
        run,
        on_error=lambda mode, key, error: dispatcher.remove_key(mode, key, str(error)),
    )
    assert dispatcher.dispatch(BatchDescriptor(1, 1, True)) == (FULL, FOUR)
    assert len(wrapper.table()) == 1
    with pytest.raises(CaptureError, match=r"Tensor\.item"):
        capture_all(pool, [(FULL, BatchDescriptor(2, 2, True))], run)


def test_clear_drops_the_graphs(pool):
    wrapper = CUDAGraphWrapper(Counted(), FULL, pool=pool)
    captured(wrapper, torch.ones(4))
    wrapper.clear()
    assert wrapper.table() == []
    captured(wrapper, torch.ones(4))


def test_the_table_tells_what_a_capture_took(pool):
    wrapper = CUDAGraphWrapper(Counted(), FULL, pool=pool)
    captured(wrapper, torch.ones(4))
    (row,) = wrapper.table()
    assert row.num_bytes == 16 and row.capture_seconds > 0 and row.replays == 0
    assert row.max_error is None


# -- debug and verification -------------------------------------------------------------------


class Lengths(NamedTuple):
    seq_lens: Tensor
    longest: int


@dataclass(frozen=True)
class Metadata:
    lengths: Lengths
    tables: list[Tensor]


def metadata(longest=5):
    return Metadata(Lengths(torch.zeros(4), longest), [torch.zeros(2), torch.zeros(3)])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda x, m: (x.clone(), m), "argument 0 of"),
        (lambda x, m: (x[:2], m), "argument 0 of"),
        (lambda x, m: (x.view(2, 2), m), "argument 0 of"),
        (lambda x, m: (x.view(torch.int32), m), "argument 0 of"),
        (
            lambda x, m: (x, Metadata(m.lengths._replace(seq_lens=torch.zeros(4)), m.tables)),
            "metadata.lengths.seq_lens of",
        ),
        (lambda x, m: (x, Metadata(m.lengths._replace(longest=6), m.tables)), "longest of"),
        (
            lambda x, m: (x, Metadata(m.lengths, [m.tables[0], torch.zeros(3)])),
            "metadata.tables[1] of",
        ),
        (lambda x, m: (x, Metadata(m.lengths, m.tables[:1])), "metadata.tables[1] of"),
    ],
)
def test_debug_names_the_argument_that_is_not_the_captured_one(pool, change, named):
    """C35: nested tensors by address and layout, plain values by equality."""
    wrapper = CUDAGraphWrapper(
        lambda x, metadata: x + metadata.lengths.seq_lens, FULL, pool=pool, debug=True
    )
    x, meta = torch.zeros(4), metadata()
    with pool.capture_window(), under(FULL):
        wrapper(x, metadata=meta)
    with under(FULL):
        wrapper(x, metadata=Metadata(meta.lengths, list(meta.tables)))
        other, other_meta = change(x, meta)
        with pytest.raises(RuntimeError, match="not what it was captured with") as error:
            wrapper(other, metadata=other_meta)
    assert named in str(error.value)


def test_without_debug_the_captured_tensors_are_read(pool):
    """As on a GPU: the arguments of a replay are not looked at."""
    wrapper = CUDAGraphWrapper(Counted(), FULL, pool=pool)
    captured(wrapper, torch.ones(4))
    with under(FULL):
        assert wrapper(torch.full((4,), 9.0)).tolist() == [2.0] * 4


def test_a_first_replay_is_verified_against_eager(pool):
    """Once per graph; the state advances once, and the error is in the table."""
    state, calls = torch.zeros(4), []

    def fn():
        calls.append(None)
        return state.add_(1) * 2

    wrapper = CUDAGraphWrapper(fn, FULL, pool=pool, verify_state=[state])
    captured(wrapper)
    for replay in (1, 2, 3):
        with under(FULL):
            assert wrapper().tolist() == [2.0 * replay] * 4
    assert len(calls) == 2 and state.tolist() == [3.0] * 4
    assert wrapper.table()[0].max_error == 0.0


@pytest.mark.parametrize("faulty", ["output", "state", "nan"])
def test_verification_sees_a_stale_value(pool, faulty):
    state, frozen = torch.zeros(4), {"value": 1.0}

    def fn():
        if faulty == "state":
            state.add_(frozen["value"])
            return torch.zeros(4)
        return state + frozen["value"]

    wrapper = CUDAGraphWrapper(fn, FULL, pool=pool, verify_state=[state])
    captured(wrapper)
    frozen["value"] = float("nan") if faulty == "nan" else 3.5
    with under(FULL):
        wrapper()
    assert wrapper.table()[0].max_error == (float("inf") if faulty == "nan" else 2.5)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("mode", {"mode": NONE}),
        ("mode", {"mode": CUDAGraphMode.FULL_AND_PIECEWISE}),
        ("role", {"mode": FULL, "role": "decode"}),
    ],
)
def test_bad_settings_are_refused_by_name(field, settings, pool):
    with pytest.raises(ValueError, match=f"^{field} must be"):
        CUDAGraphWrapper(Counted(), pool=pool, **settings)
