"""A recording refuses what a CUDA capture cannot hold, by name: one planted fault per item."""

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.verifier.capture import CaptureError
from specdec.verifier.recorder import RecorderBackend

HOST = "reads device values on the host"
SHAPE = "makes a tensor whose shape depends on values"
UPLOAD = "copies from pageable host memory"
RANDOM = "draws from a random generator"
MOVE = "changes the address"


def branch(x: Tensor) -> Tensor:
    if x[0] > 0:
        return x + 1
    return x - 1


# name: (function of x [4] float32, i [4] int64 and mask [4] bool; operator named; reason)
REFUSED = {
    "item": (lambda x, i, mask: x[0].item(), "Tensor.item", HOST),
    "tolist": (lambda x, i, mask: i.tolist(), "Tensor.tolist", HOST),
    "if": (lambda x, i, mask: branch(x), "Tensor.__bool__", HOST),
    "bool": (lambda x, i, mask: bool(mask.any()), "Tensor.__bool__", HOST),
    "int": (lambda x, i, mask: int(i[0]), "Tensor.__int__", HOST),
    "float": (lambda x, i, mask: float(x[0]), "Tensor.__float__", HOST),
    "index": (lambda x, i, mask: [1, 2, 3, 4, 5][i[0]], "Tensor.__index__", HOST),
    "slice by tensor": (lambda x, i, mask: x[: i[1]], "aten._local_scalar_dense", HOST),
    "scalar index": (lambda x, i, mask: x[i[0]], "aten._local_scalar_dense", HOST),
    "format": (lambda x, i, mask: f"{x[0]:.2f}", "Tensor.__format__", HOST),
    "print": (lambda x, i, mask: str(x), "Tensor.__repr__", HOST),
    "numpy": (lambda x, i, mask: x.numpy(), "Tensor.numpy", HOST),
    "np.asarray": (lambda x, i, mask: np.asarray(x), "Tensor.__array__", HOST),
    "dlpack": (lambda x, i, mask: np.from_dlpack(x), "Tensor.__dlpack__", HOST),
    "cpu": (lambda x, i, mask: x.cpu(), "Tensor.cpu", HOST),
    "to cpu": (lambda x, i, mask: x.to("cpu"), "Tensor.to", HOST),
    "to device=cpu": (lambda x, i, mask: x.to(device="cpu"), "Tensor.to", HOST),
    "equal": (lambda x, i, mask: torch.equal(x, x), "aten.equal", HOST),
    "allclose": (lambda x, i, mask: torch.allclose(x, x), "aten.allclose", HOST),
    "one_hot": (
        lambda x, i, mask: torch.nn.functional.one_hot(i),
        "aten._local_scalar_dense in aten.item in aten.one_hot",
        HOST,
    ),
    "nonzero": (lambda x, i, mask: x.nonzero(), "aten.nonzero", SHAPE),
    "where": (lambda x, i, mask: torch.where(mask), "aten.nonzero", SHAPE),
    "argwhere": (lambda x, i, mask: torch.argwhere(mask), "aten.nonzero", SHAPE),
    "mask read": (lambda x, i, mask: x[mask], "aten.index.Tensor", SHAPE),
    "mask write": (lambda x, i, mask: x.__setitem__(mask, 0.0), "aten.index_put_", SHAPE),
    "masked_select": (lambda x, i, mask: x.masked_select(mask), "aten.masked_select", SHAPE),
    "unique": (lambda x, i, mask: i.unique(), "aten._unique2", SHAPE),
    "unique_consecutive": (
        lambda x, i, mask: i.unique_consecutive(),
        "aten.unique_consecutive",
        SHAPE,
    ),
    "bincount": (lambda x, i, mask: i.bincount(), "aten.bincount", SHAPE),
    "repeat_interleave": (
        lambda x, i, mask: x.repeat_interleave(i),
        "aten.repeat_interleave.Tensor",
        SHAPE,
    ),
    "torch.tensor": (lambda x, i, mask: x + torch.tensor([1.0]), "torch.tensor", UPLOAD),
    "new_tensor": (lambda x, i, mask: x.new_tensor([1.0]), "Tensor.new_tensor", UPLOAD),
    "as_tensor": (lambda x, i, mask: torch.as_tensor([1.0]), "torch.as_tensor", UPLOAD),
    "asarray": (lambda x, i, mask: torch.asarray([1.0]), "torch.asarray", UPLOAD),
    "from_numpy": (lambda x, i, mask: torch.from_numpy(np.ones(4)), "aten.lift_fresh", UPLOAD),
    "list index": (lambda x, i, mask: x[[0, 2]], "Tensor.__getitem__", UPLOAD),
    "list index write": (
        lambda x, i, mask: x.__setitem__([0, 2], 0.0),
        "Tensor.__setitem__",
        UPLOAD,
    ),
    "rand": (lambda x, i, mask: torch.rand(3), "aten.rand", RANDOM),
    "randint": (lambda x, i, mask: torch.randint(5, (3,)), "aten.randint", RANDOM),
    "randn_like": (lambda x, i, mask: torch.randn_like(x), "aten.randn_like", RANDOM),
    "uniform_": (lambda x, i, mask: x.uniform_(), "aten.uniform_", RANDOM),
    "random_": (lambda x, i, mask: i.random_(), "aten.random_", RANDOM),
    "exponential_": (lambda x, i, mask: x.exponential_(), "aten.exponential_", RANDOM),
    "multinomial": (lambda x, i, mask: x.abs().multinomial(1), "aten.multinomial", RANDOM),
    "bernoulli": (lambda x, i, mask: torch.bernoulli(x.sigmoid()), "aten.bernoulli", RANDOM),
    "dropout": (lambda x, i, mask: torch.dropout(x, 0.5, True), "in aten.dropout", RANDOM),
    "own generator": (
        lambda x, i, mask: torch.rand(3, generator=torch.Generator()),
        "aten.rand.generator",
        RANDOM,
    ),
    "resize_": (lambda x, i, mask: x.resize_(8), "aten.resize_", MOVE),
    "set_": (lambda x, i, mask: x.set_(x.clone()), "aten.set_", MOVE),
}

ALLOWED = {
    "number write": lambda x, i, mask: x.clone().__setitem__(0, 5.0),
    "number fill of a slice": lambda x, i, mask: x.clone()[1:3].fill_(2.0),
    "index by tensor": lambda x, i, mask: x[i],
    "index write by tensor": lambda x, i, mask: x.clone().__setitem__(i, 0.0),
    "masked_fill": lambda x, i, mask: x.masked_fill(mask, 0.0),
    "where": lambda x, i, mask: torch.where(mask, x, -1.0),
    "repeat_interleave with a number": lambda x, i, mask: x.repeat_interleave(2),
    "repeat_interleave with its size": lambda x, i, mask: x.repeat_interleave(i, output_size=6),
    "one_hot with its size": lambda x, i, mask: i[:, None] == torch.arange(4),
    "factories": lambda x, i, mask: torch.zeros(4) + torch.full((4,), 2.0) + torch.arange(4),
    "as_tensor of a tensor": lambda x, i, mask: torch.as_tensor(x) + 1,
    "to a dtype": lambda x, i, mask: x.to(torch.float64),
    "to its own device": lambda x, i, mask: x.to(x.device) + 1,
    "dropout that is off": lambda x, i, mask: torch.dropout(x, 0.5, False),
    "attention": lambda x, i, mask: torch.nn.functional.scaled_dot_product_attention(
        *x.expand(3, 1, 1, 2, 4)
    ),
    "shapes": lambda x, i, mask: x.view(2, -1)[: x.shape[0] // 2, : len(x)],
    "detached data": lambda x, i, mask: (x + 1).data * 2,
}


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.tensor([1.0, -2.0, 0.5, 3.0])
    i = torch.tensor([0, 2, 1, 3])
    return x, i, x > 0


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, inputs):
    fn, operator, reason = REFUSED[name]
    before = [tensor.clone() for tensor in inputs]
    with pytest.raises(CaptureError) as refusal:
        RecorderBackend().capture(lambda: fn(*inputs))
    message = str(refusal.value)
    assert operator in message.split(" cannot be captured: it ")[0]
    assert reason in message
    for tensor, value in zip(inputs, before, strict=True):
        assert torch.equal(tensor, value)


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name, inputs):
    """What a graph can hold is recorded, and replayed on new values."""
    fn = ALLOWED[name]
    recording = RecorderBackend().capture(lambda: fn(*inputs))
    inputs[0].copy_(torch.tensor([-1.0, 2.0, 0.25, 7.0]))
    inputs[1].copy_(torch.tensor([3, 0, 2, 1]))
    inputs[2].copy_(inputs[0] > 0)
    recording.replay()
    expected = fn(*inputs)
    if isinstance(expected, Tensor):
        assert torch.equal(recording.outputs, expected)


def test_the_mode_ends_with_the_capture(inputs):
    """After a refusal the process works as before."""
    with pytest.raises(CaptureError):
        RecorderBackend().capture(lambda: inputs[0].item())
    assert inputs[0][0].item() == 1.0 and torch.rand(1).numel() == 1
