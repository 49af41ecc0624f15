"""The wrapper on a real GPU: what the recorder stands in for elsewhere."""

import gc
import warnings

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from specdec.verifier.capture import CaptureError
from specdec.verifier.context import set_forward_context
from specdec.verifier.graph import CUDAGraphWrapper, GraphPool, capture_all
from specdec.verifier.modes import BatchDescriptor, CUDAGraphMode, GraphKey

pytestmark = pytest.mark.gpu
NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
FOUR, EIGHT = BatchDescriptor(4, 4, True), BatchDescriptor(8, 8, True)


def under(mode, descriptor=FOUR):
    return set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=descriptor)


def captured(wrapper, *args, descriptor=FOUR, mode=FULL):
    """Warm-up and capture, as ``capture_all`` does them."""
    result = []

    def run(mode, descriptor):
        with under(mode, descriptor):
            result.append(wrapper(*args))

    capture_all(wrapper.pool, [(mode, descriptor)], run)
    return result[-1]


def replayed(wrapper, *args, descriptor=FOUR, mode=FULL):
    with under(mode, descriptor):
        return wrapper(*args)


def assert_cuda_works():
    """Allocation, a default generator, a matmul, the allocator's cache and another capture."""
    x = torch.rand(64, 64, device="cuda")
    assert torch.isfinite(x @ x).all()
    pinned = torch.empty(64, pin_memory=True).copy_(x[0], non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(pinned, x[0].cpu())
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    graph.replay()
    assert torch.equal(y, x + 1)


@pytest.fixture(scope="module")
def pool():
    return GraphPool("cuda")


def test_capture_and_replay_on_new_values(pool):
    weight = torch.randn(16, 16, device="cuda")
    x = torch.randn(4, 16, device="cuda")
    wrapper = CUDAGraphWrapper(lambda x: torch.relu(x @ weight) + 1, FULL, pool=pool)
    captured(wrapper, x)
    address = None
    for _ in range(3):
        x.normal_()
        out = replayed(wrapper, x)
        assert torch.equal(out, torch.relu(x @ weight) + 1)
        assert address in (None, out.data_ptr())
        address = out.data_ptr()
    (row,) = wrapper.table()
    assert row.replays == 3 and row.num_bytes >= 0 and row.capture_seconds > 0


def test_a_capture_has_no_effect_and_state_advances_in_place(pool):
    tokens = torch.zeros(3, 40, dtype=torch.int64, device="cuda")
    length = torch.zeros(3, dtype=torch.int64, device="cuda")
    rows = torch.arange(3, device="cuda")

    def step():
        last = tokens.gather(1, (length - 1).clamp(min=0)[:, None])[:, 0]
        tokens[rows, length] = 2 * last + 1 + rows
        length.add_(1)
        return last

    wrapper = CUDAGraphWrapper(step, FULL, pool=pool)
    captured(wrapper)
    assert length.tolist() == [1] * 3, "the warm-up ran, the capture did not"
    tokens.zero_(), length.zero_()
    expected = [[], [], []]
    for _ in range(20):
        replayed(wrapper)
        for row in range(3):
            expected[row].append(2 * (expected[row] or [0])[-1] + 1 + row)
    assert length.tolist() == [20] * 3
    assert tokens[:, :20].tolist() == expected


def test_several_keys_alternate_on_shared_state_in_one_pool(pool):
    state = torch.zeros(8, device="cuda")
    wrapper = CUDAGraphWrapper(lambda n: state[:n].add_(1).sum(), FULL, pool=pool)
    for descriptor in (EIGHT, FOUR):
        captured(wrapper, descriptor.num_reqs, descriptor=descriptor)
    state.zero_()
    sums = [
        replayed(wrapper, descriptor.num_reqs, descriptor=descriptor).item()
        for descriptor in (FOUR, EIGHT, FOUR, EIGHT)
    ]
    assert sums == [4.0, 12.0, 12.0, 24.0]
    assert {row.descriptor: row.replays for row in wrapper.table()} == {EIGHT: 2, FOUR: 2}


def test_a_smaller_shape_takes_the_memory_of_the_larger_one():
    """One pool, outputs held weakly: later captures need no memory of their own."""
    pool = GraphPool("cuda")
    x = torch.ones(32, 1 << 20, device="cuda")
    wrapper = CUDAGraphWrapper(lambda n: (x[:n] * 2).exp() + 1, FULL, pool=pool)
    for n in (32, 16, 8, 4):
        captured(wrapper, n, descriptor=BatchDescriptor(n, n, True))
    largest, *others = [row.num_bytes for row in wrapper.table()]
    assert largest >= 2 * x.nbytes
    assert sum(others) < x.nbytes // 4
    for n in (4, 32, 16, 8):
        x.fill_(n / 32)
        out = replayed(wrapper, n, descriptor=BatchDescriptor(n, n, True))
        assert torch.equal(out, (x[:n] * 2).exp() + 1)


def test_outputs_outlive_the_wrapper():
    """A weak output keeps the graph's pool: its memory is not given back under it."""
    wrapper = CUDAGraphWrapper(lambda x: x + 1, FULL, pool=GraphPool("cuda"))
    x = torch.ones(1 << 20, device="cuda")
    captured(wrapper, x)
    out = replayed(wrapper, x)
    del wrapper
    gc.collect()
    torch.cuda.empty_cache()
    other = torch.full((1 << 22,), 9.0, device="cuda")
    assert (out == 2).all() and (other == 9).all()


def test_outputs_have_the_dtype_and_layout_of_the_function(pool):
    x = torch.arange(24.0, device="cuda").view(4, 6)
    wrapper = CUDAGraphWrapper(
        lambda x: {
            "bfloat16": x.bfloat16() * 2,
            "transposed": (x + 1).t(),
            "every other": (x * 3)[:, ::2],
            "bool": x > 3,
            "int64": x.long(),
            "scalar": x.sum(),
            "empty": x[:0] + 1,
            "static": x[1:3],
        },
        FULL,
        pool=pool,
    )
    captured(wrapper, x)
    expected, got = wrapper.runnable(x), replayed(wrapper, x)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].stride() == tensor.stride(), name
        assert torch.equal(got[name], tensor), name
    assert got["static"].data_ptr() == x[1:3].data_ptr()


def test_pieces_feed_each_other_and_only_the_matching_wrapper_fires(pool):
    """The pieces of one pass do not share memory that is still read."""
    weights = [torch.randn(64, 64, device="cuda") / 8 for _ in range(5)]
    between = torch.zeros(8, 64, device="cuda")
    pieces = [
        CUDAGraphWrapper(lambda x, w=w: torch.relu(x @ w), PIECEWISE, pool=pool) for w in weights
    ]

    def model(x):
        *first, last = pieces
        for piece in first:
            x = piece(x)
        # What runs between two pieces without a graph writes to a static tensor.
        torch.add(x, 1, out=between)
        return last(between)

    whole = CUDAGraphWrapper(lambda x: model(x).clone(), FULL, pool=pool)
    x = torch.randn(8, 64, device="cuda")
    for mode in (PIECEWISE, FULL):
        captured(whole, x, mode=mode, descriptor=EIGHT)
    for _ in range(2):
        x.normal_()
        results = [
            replayed(whole, x, mode=m, descriptor=EIGHT).clone() for m in (NONE, PIECEWISE, FULL)
        ]
        torch.testing.assert_close(results[1], results[0])
        torch.testing.assert_close(results[2], results[0])
    assert [piece.table()[0].replays for piece in pieces] == [2] * 5
    assert whole.table()[0].replays == 2


@pytest.mark.parametrize("kind", ["item", "nonzero", "torch.tensor", "to cpu", "raises"])
def test_a_refused_capture_names_key_and_cause_and_leaves_cuda_usable(kind, pool):
    """C31: refused before it reaches CUDA, so that the capture ends in order."""
    x = torch.ones(4, device="cuda")
    faults = {
        "item": (lambda: x.sum().item(), r"Tensor\.item"),
        "nonzero": (lambda: x.nonzero(), r"aten\.nonzero"),
        "torch.tensor": (lambda: torch.tensor([1.0], device="cuda"), r"torch\.tensor"),
        "to cpu": (lambda: x.to(torch.device("cpu")), r"aten\._to_copy"),
        "raises": (lambda: 1 // 0, "division"),
    }
    fault, named = faults[kind]
    good = CUDAGraphWrapper(lambda: x * 3, FULL, pool=pool)
    captured(good)
    bad = CUDAGraphWrapper(lambda: (x + 1, fault()), FULL, pool=pool)
    with pytest.raises(CaptureError, match=named) as error, pool.capture_window(), under(FULL):
        bad()
    assert str(GraphKey("step", FOUR)) in str(error.value)
    assert_cuda_works()
    assert replayed(good).tolist() == [3.0] * 4
    captured(CUDAGraphWrapper(lambda: x * 5, FULL, pool=pool))


@pytest.mark.parametrize("kind", ["synchronize", "unjoined stream"])
def test_a_broken_capture_leaves_cuda_usable(kind):
    """C31: what no rule can see breaks the capture itself; allocator and generators recover."""
    pool = GraphPool("cuda")
    x = torch.ones(4, device="cuda")
    side = torch.cuda.Stream()

    def unjoined():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(0)

    fault = {"synchronize": torch.cuda.synchronize, "unjoined stream": unjoined}[kind]
    good = CUDAGraphWrapper(lambda: x * 3, FULL, pool=pool)
    captured(good)
    bad = CUDAGraphWrapper(lambda: (x + 1, fault(), x.sin()), FULL, pool=pool)
    failure = pytest.raises(CaptureError, match="capture of the FULL graph")
    with failure, pool.capture_window(), under(FULL):
        bad()
    assert_cuda_works()
    assert replayed(good).tolist() == [3.0] * 4
    again = CUDAGraphWrapper(lambda: x * 5, FULL, pool=pool)
    captured(again)
    assert replayed(again).tolist() == [5.0] * 4


def test_many_broken_captures_do_not_keep_memory():
    pool = GraphPool("cuda")
    x = torch.ones(1 << 22, device="cuda")
    bad = CUDAGraphWrapper(lambda: (x + 1, torch.cuda.synchronize()), FULL, pool=pool)
    used = []
    for _ in range(6):
        with pytest.raises(CaptureError), pool.capture_window(), under(FULL):
            bad()
        gc.collect()
        torch.cuda.empty_cache()
        used.append(torch.cuda.memory_reserved())
    assert used[-1] - used[1] <= x.nbytes


def test_a_second_pool_and_wrapper_in_the_process(pool):
    """C31: a second engine of the process captures and replays beside the first."""
    x = torch.ones(4, device="cuda")
    first = CUDAGraphWrapper(lambda: x + 1, FULL, pool=pool)
    second = CUDAGraphWrapper(lambda: x + 2, FULL, pool=GraphPool("cuda"))
    captured(first), captured(second)
    assert replayed(first).tolist() == [2.0] * 4
    assert replayed(second).tolist() == [3.0] * 4
    assert replayed(first).tolist() == [2.0] * 4


def test_a_pool_can_be_used_again_after_all_its_graphs_are_gone():
    pool = GraphPool("cuda")
    x = torch.ones(1 << 20, device="cuda")
    wrapper = CUDAGraphWrapper(lambda: x + 1, FULL, pool=pool)
    for _ in range(3):
        captured(wrapper)
        assert (replayed(wrapper) == 2).all()
        wrapper.clear()
        gc.collect()
        torch.cuda.empty_cache()


def test_a_copy_to_pinned_memory_is_captured(pool):
    """The output ring: a device-to-host copy into pinned memory is part of the graph."""
    ring = torch.zeros(4, pin_memory=True)
    x = torch.ones(4, device="cuda")

    def step():
        ring.copy_(x * 2, non_blocking=True)

    wrapper = CUDAGraphWrapper(step, FULL, pool=pool)
    captured(wrapper)
    x.fill_(7)
    replayed(wrapper)
    torch.cuda.synchronize()
    assert ring.tolist() == [14.0] * 4


def test_debug_sees_a_moved_tensor(pool):
    """C35 on the device."""
    wrapper = CUDAGraphWrapper(lambda x: x + 1, FULL, pool=pool, debug=True)
    x = torch.ones(4, device="cuda")
    captured(wrapper, x)
    replayed(wrapper, x)
    with pytest.raises(RuntimeError, match="argument 0 of the graph"):
        replayed(wrapper, x.clone())


def test_a_first_replay_is_verified(pool):
    state = torch.zeros(4, device="cuda")
    wrapper = CUDAGraphWrapper(lambda: state.add_(1) * 2, FULL, pool=pool, verify_state=[state])
    captured(wrapper)
    state.zero_()
    for replay in (1, 2):
        assert replayed(wrapper).tolist() == [2.0 * replay] * 4
    assert wrapper.table()[0].max_error == 0.0


def test_nothing_warns(pool):
    x = torch.ones(4, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured(CUDAGraphWrapper(lambda: x + 1, FULL, pool=GraphPool("cuda")))
