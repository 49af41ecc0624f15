"""A recording replays what eager code computes, on the contents of its static tensors alone."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.verifier.capture import CaptureError
from specdec.verifier.context import get_forward_context, set_forward_context
from specdec.verifier.recorder import RecorderBackend


def capture(fn):
    return RecorderBackend().capture(fn)


# -- custom ops -------------------------------------------------------------------------------


@torch.library.custom_op("specdec_test::scaled_by_context", mutates_args=())
def scaled_by_context(x: Tensor) -> Tensor:
    """An opaque op that reads the forward context, as a compiled model's attention does."""
    return x * get_forward_context().attn_metadata["scale"]


@torch.library.custom_op("specdec_test::write_rows", mutates_args={"cache"})
def write_rows(cache: Tensor, rows: Tensor) -> None:
    cache[: rows.shape[0]] = rows


@torch.library.custom_op("specdec_test::branches_inside", mutates_args=())
def branches_inside(x: Tensor) -> Tensor:
    """Reads a value on the host: invisible from outside, as for any opaque op."""
    return x + 1 if x.sum().item() > 0 else x - 1


ALIVE: list[bool] = []
REFERENCES: list[weakref.ref] = []


@torch.library.custom_op("specdec_test::watched", mutates_args=())
def watched(x: Tensor) -> Tensor:
    result = x + 1
    REFERENCES.append(weakref.ref(result.untyped_storage()))
    return result


# -- equal to eager ---------------------------------------------------------------------------

UNARY = {
    "relu_": lambda t: t.relu_(),
    "add": lambda t: t + 1.5,
    "matmul": lambda t: t @ t.transpose(0, 1) @ t,
    "softmax": lambda t: t.softmax(-1),
    "view": lambda t: t.view(2, -1).t().reshape(4, 4),
    "flip": lambda t: t.flip(0),
    "sort": lambda t: t.sort(-1).values,
    "topk": lambda t: torch.cat(list(t.topk(2, -1)), -1).float(),
    "split": lambda t: torch.cat(t.split(1, 0)[::-1]),
    "chunk": lambda t: sum(t.chunk(2, 1)).repeat(1, 2),
    "rows": lambda t: t[torch.arange(4).flip(0)],
    "row write": lambda t: t.index_copy(0, torch.arange(2), t[2:]),
    "view write": lambda t: t[1:3, :2].mul_(2).sum() + t,
    "number write": lambda t: t.clone().index_fill_(0, torch.arange(1), 3.0),
    "cumsum": lambda t: t.cumsum(0),
    "where": lambda t: torch.where(t > 0, t, -t),
    "argmax": lambda t: t + t.argmax(-1, keepdim=True),
    "linear": lambda t: torch.nn.functional.linear(t, t, t[0]),
    "cast": lambda t: t.to(torch.float64).sum(0, keepdim=True).float() + t,
    "out": lambda t: torch.add(t, 1, out=torch.empty(4, 4)),
    "foreach": lambda t: torch.stack(torch._foreach_add([t, t], 1.0)).sum(0),
    "norm": lambda t: torch.nn.functional.layer_norm(t, (4,)),
}
BINARY = {
    "add_": lambda a, b: a.add_(b),
    "mm": lambda a, b: a @ b,
    "copy_": lambda a, b: a.copy_(b),
    "cat": lambda a, b: torch.cat([a, b], 1)[:, ::2],
    "gather": lambda a, b: a.gather(1, b.argsort(-1)),
    "index_put": lambda a, b: a.index_put_((b.argmax(-1),), b, accumulate=True),
    "scatter": lambda a, b: a.scatter(1, b.argsort(-1), b),
    "set": lambda a, b: a[1:].copy_(b[:-1]).sum() + b,
}


@st.composite
def programs(draw):
    """Steps over a growing list of values, of which the first three are static tensors."""
    steps = []
    for position in range(3, 3 + draw(st.integers(1, 12))):
        if draw(st.booleans()):
            steps.append((draw(st.sampled_from(list(UNARY))), [draw(st.integers(0, position - 1))]))
        else:
            operands = [draw(st.integers(0, position - 1)) for _ in range(2)]
            steps.append((draw(st.sampled_from(list(BINARY))), operands))
    return steps, draw(st.integers(0, 2**31))


def run(steps, static):
    values = list(static)
    for name, operands in steps:
        first, *rest = (values[i] for i in operands)
        result = BINARY[name](first, rest[0] + 0) if rest else UNARY[name](first)
        values.append(result if result.shape == (4, 4) else result.expand(4, 4) + 0)
    return values[-1], values[len(values) // 2], values[0]


def same(a, b):
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


@given(programs())
@settings(max_examples=150, deadline=None)
def test_random_functions_replay_as_eager(program):
    """P4 on random functions that write to static tensors: same outputs, same state, 3 replays."""
    steps, seed = program
    torch.manual_seed(seed)
    static = [torch.randn(4, 4) for _ in range(3)]
    before = [tensor.clone() for tensor in static]
    with torch.inference_mode():
        recording = capture(lambda: run(steps, static))
        for tensor, value in zip(static, before, strict=True):
            assert torch.equal(tensor, value)
        twin = [tensor.clone() for tensor in static]
        for _ in range(3):
            expected = run(steps, twin)
            recording.replay()
            for got, wanted in zip((*recording.outputs, *static), (*expected, *twin), strict=True):
                assert same(got, wanted)


@pytest.mark.parametrize("inference", [True, False])
def test_it_works_in_and_out_of_inference_mode(inference):
    with torch.inference_mode(inference):
        counter = torch.zeros(2)
        weight = torch.nn.Parameter(torch.ones(2), requires_grad=not inference)
        recording = capture(lambda: counter.add_(weight))
        recording.replay()
    assert counter.tolist() == [1.0, 1.0]


def test_state_advances_in_place_over_20_replays():
    """A step that reads what the last one wrote, through views and an index."""
    tokens, length = torch.zeros(3, 40, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    rows = torch.arange(3)

    def step():
        last = tokens.gather(1, (length - 1).clamp(min=0)[:, None])[:, 0]
        tokens[rows, length] = 2 * last + 1 + rows
        length.add_(1)
        return last

    recording = capture(step)
    assert not tokens.any() and not length.any()
    expected = [[], [], []]
    for _ in range(20):
        recording.replay()
        for row in range(3):
            expected[row].append(2 * (expected[row] or [0])[-1] + 1 + row)
        assert recording.outputs.tolist() == [(row[-2:-1] or [0])[0] for row in expected]
    assert length.tolist() == [20] * 3
    assert tokens[:, :20].tolist() == expected


def test_two_recordings_share_static_tensors():
    """Graphs of several shapes advance one state, alternating."""
    state = torch.zeros(8)
    small = capture(lambda: state[:2].add_(1).clone())
    large = capture(lambda: state.mul_(2).clone())
    state.fill_(1)
    for graph in (small, large, small, small, large):
        graph.replay()
    assert state.tolist() == [(((1 + 1) * 2 + 1) + 1) * 2] * 2 + [4.0] * 6
    assert small.outputs.tolist() == [6.0, 6.0]
    assert large.outputs.tolist() == state.tolist()


# -- a capture has no effect ------------------------------------------------------------------

WRITES = {
    "add_": lambda t: t.add_(1),
    "twice": lambda t: t.add_(1).mul_(3),
    "view": lambda t: t[1:, 2].fill_(9),
    "view of a view": lambda t: t.t()[1:][:, 1:].zero_(),
    "reshaped": lambda t: t.view(-1)[3:7].copy_(torch.arange(4.0)),
    "overlapping views": lambda t: (t[:3].add_(1), t[1:].mul_(2), t.view(2, 8)[0].zero_()),
    "index_put_": lambda t: t.index_put_((torch.arange(2),), torch.zeros(2, 4)),
    "index_put_ repeated": lambda t: t.index_put_(
        (torch.zeros(3, dtype=torch.int64),), torch.ones(4), accumulate=True
    ),
    "assignment": lambda t: t.__setitem__((slice(None), torch.arange(2)), 5.0),
    "index_copy_": lambda t: t.index_copy_(1, torch.arange(2), torch.ones(4, 2)),
    "moving index": lambda t: [
        (t.index_copy_(0, rows, torch.ones(1, 4)), rows.add_(1))
        for rows in [torch.zeros(1, dtype=torch.int64)]
        for _ in range(2)
    ],
    "scatter_": lambda t: t.scatter_(1, torch.zeros(4, 1, dtype=torch.int64), 8.0),
    "out": lambda t: torch.mul(t, 2, out=t),
    "foreach": lambda t: torch._foreach_mul_([t[0], t[1]], 3.0),
    "transposed": lambda t: t.t_().add_(1).t_(),
    "custom op": lambda t: write_rows(t, torch.ones(2, 4)),
    "custom op on a view": lambda t: write_rows(t[2:], torch.ones(2, 4)),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_leaves_static_tensors_as_they_were(name, fails):
    """Also where it fails after the write. The replay then does write."""
    target = torch.arange(16.0).view(4, 4)
    before = target.clone()

    def fn():
        WRITES[name](target)
        return target.sum().item() if fails else target.sum()

    if fails:
        with pytest.raises(CaptureError):
            capture(fn)
        assert torch.equal(target, before)
        return
    recording = capture(fn)
    assert torch.equal(target, before)
    recording.replay()
    expected = before.clone()
    WRITES[name](expected)
    assert torch.equal(target, expected) and not torch.equal(target, before)


def test_only_the_written_rows_of_a_large_tensor_are_saved():
    """A KV cache is written in a few rows: a capture must not copy all of it."""
    cache = torch.zeros(1 << 12, 1 << 8)
    saved = []
    clone = Tensor.clone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "clone", lambda t: saved.append(t.numel()) or clone(t))
        capture(lambda: cache.index_put_((torch.arange(3),), torch.ones(3, 1 << 8)))
    assert max(saved) < 1 << 10


# -- outputs ----------------------------------------------------------------------------------


def test_outputs_are_the_same_tensors_at_every_replay_and_undefined_before():
    x = torch.ones(3)
    recording = capture(lambda: {"sum": [x + 1], "ids": x.long()})
    (out,) = recording.outputs["sum"]
    assert out.isnan().all()
    recording.replay()
    x.fill_(5)
    recording.replay()
    assert recording.outputs["sum"][0] is out and out.tolist() == [6.0] * 3
    assert recording.outputs["ids"].tolist() == [5, 5, 5]
    assert recording.num_bytes == 3 * 4 + 3 * 8


def test_outputs_in_static_memory_are_that_memory():
    x = torch.zeros(4)
    recording = capture(lambda: (x.add_(1), x[1:3], x.view(2, 2)))
    whole, part, square = recording.outputs
    assert whole is x and part.data_ptr() == x[1:].data_ptr() and square.shape == (2, 2)
    recording.replay()
    assert part.tolist() == [1.0, 1.0] and recording.num_bytes == 0


def test_views_of_static_tensors_cost_no_step():
    weight = torch.randn(4, 8)
    x = torch.randn(2, 8)
    recording = capture(lambda: x.view(2, 8) @ weight.t())
    assert str(recording) == "aten.matmul.default: [] -> [0]"


def test_intermediate_results_are_dropped_after_their_last_use():
    x = torch.zeros(2)

    def fn():
        return probe(watched(x) * 2)

    @torch.library.custom_op("specdec_test::probe", mutates_args=())
    def probe(y: Tensor) -> Tensor:
        ALIVE.append(any(reference() is not None for reference in REFERENCES))
        return y + 1

    recording = capture(fn)
    ALIVE.clear()
    REFERENCES.clear()
    recording.replay()
    assert recording.outputs.tolist() == [3.0, 3.0]
    assert ALIVE == [False]


# -- planted faults are seen ------------------------------------------------------------------


def test_a_stale_python_value_shows():
    """A step that takes its length from a Python value replays the value of the capture."""
    state = {"length": 1}
    x = torch.zeros(4)
    recording = capture(lambda: x + state["length"])
    state["length"] = 2
    recording.replay()
    assert recording.outputs.tolist() == [1.0] * 4


def test_a_new_tensor_in_the_place_of_a_static_one_shows():
    """C35: a buffer that is allocated anew after the capture is not read by the replay."""
    holder = {"weights": torch.ones(2)}
    recording = capture(lambda: holder["weights"] * 3)
    holder["weights"] = torch.full((2,), 7.0)
    recording.replay()
    assert recording.outputs.tolist() == [3.0, 3.0]


def test_a_plan_made_on_the_host_shows():
    """C30: a plan computed from lengths at capture, here a row order, is not made anew."""
    lengths = torch.tensor([1, 2, 3])
    plan = {"order": lengths.argsort(descending=True)}
    recording = capture(lambda: lengths[plan["order"]].clone())
    lengths.copy_(torch.tensor([9, 1, 5]))
    plan["order"] = lengths.argsort(descending=True)
    recording.replay()
    assert recording.outputs.tolist() != [9, 5, 1]


def test_a_padding_row_that_writes_shows():
    """C26: slot -1 used as an index writes the last slot, which a live row owns."""
    cache, slots, rows = torch.zeros(6), torch.tensor([0, 5]), torch.tensor([1.0, 2.0])
    recording = capture(lambda: cache.index_put_((slots,), rows))
    recording.replay()
    assert cache.tolist() == [1.0, 0, 0, 0, 0, 2.0]
    slots.copy_(torch.tensor([0, -1]))
    rows.fill_(8.0)
    recording.replay()
    assert cache[5] == 8.0


def test_a_context_that_is_read_live_shows():
    """An opaque op sees the context of the capture, not of the replay, however it was changed."""
    metadata = {"scale": 2.0}
    x = torch.ones(2)
    with set_forward_context(attn_metadata=metadata):
        recording = capture(lambda: scaled_by_context(x))
        metadata["scale"] = 3.0
    with set_forward_context(attn_metadata={"scale": 5.0}):
        recording.replay()
        assert get_forward_context().attn_metadata == {"scale": 5.0}
    assert recording.outputs.tolist() == [2.0, 2.0]


def test_a_tensor_kept_from_an_earlier_capture_is_refused():
    """A mask cached inside a captured function lies in that graph's memory."""
    cached = {}

    def fn(size: int) -> Tensor:
        if "mask" not in cached:
            cached["mask"] = torch.arange(4) < 2
        return torch.zeros(4)[:size].masked_fill(cached["mask"][:size], 1.0)

    capture(lambda: fn(4))
    with pytest.raises(CaptureError, match="an earlier capture made"):
        capture(lambda: fn(3))


def test_an_opaque_op_is_one_call_and_its_inside_is_its_own():
    x = torch.ones(2)
    recording = capture(lambda: branches_inside(x) * 2)
    assert str(recording).splitlines()[0] == "specdec_test.branches_inside.default: [] -> [0]"
    x.fill_(-3)
    recording.replay()
    assert recording.outputs.tolist() == [-8.0, -8.0]


def test_what_the_function_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        capture(lambda: 1 // 0)


def test_an_error_at_replay_is_raised_and_the_next_replay_works():
    index, values = torch.tensor([0]), torch.arange(3.0)
    recording = capture(lambda: values[index] + 1)
    index.fill_(7)
    with pytest.raises(IndexError):
        recording.replay()
    index.fill_(2)
    recording.replay()
    assert recording.outputs.tolist() == [3.0]
