"""The forward context: set in one place, nested, given back."""

import threading
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch

from specdec.verifier.context import (
    frozen_forward_context,
    get_forward_context,
    set_forward_context,
)
from specdec.verifier.modes import BatchDescriptor, CUDAGraphMode

FULL = CUDAGraphMode.FULL
DESCRIPTOR = BatchDescriptor(20, 4, True)


def test_it_holds_what_it_was_given_and_nests():
    with set_forward_context(
        cudagraph_runtime_mode=FULL, batch_descriptor=DESCRIPTOR, variant="sampled", rounds=2
    ) as outer:
        assert get_forward_context() is outer
        with set_forward_context() as inner:
            assert get_forward_context() is inner
            assert inner.cudagraph_runtime_mode is CUDAGraphMode.NONE
        assert get_forward_context() is outer
    assert (outer.batch_descriptor, outer.variant, outer.rounds) == (DESCRIPTOR, "sampled", 2)


def test_it_is_given_back_after_an_error():
    with set_forward_context() as outer:
        with pytest.raises(ZeroDivisionError), set_forward_context():
            raise ZeroDivisionError
        assert get_forward_context() is outer


def test_there_is_none_outside():
    with pytest.raises(RuntimeError, match="set_forward_context"):
        get_forward_context()
    assert frozen_forward_context() is None


def test_other_threads_do_not_see_it():
    seen = []
    with set_forward_context():
        thread = threading.Thread(target=lambda: seen.append(frozen_forward_context()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_a_step_runs_as_one_runtime_mode(mode):
    context = set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=DESCRIPTOR)
    with pytest.raises(ValueError, match="cudagraph_runtime_mode"), context:
        pass


def test_a_graph_needs_a_descriptor():
    context = set_forward_context(cudagraph_runtime_mode=FULL)
    with pytest.raises(ValueError, match="batch_descriptor"), context:
        pass


def test_it_cannot_be_changed():
    with set_forward_context() as context, pytest.raises(FrozenInstanceError):
        context.rounds = 3


@dataclass
class Metadata:
    lengths: torch.Tensor
    max_len: int


def test_a_frozen_copy_keeps_tensors_and_detaches_plain_values():
    metadata = {"layer": [Metadata(torch.zeros(3), 5)]}
    with set_forward_context(attn_metadata=metadata):
        frozen = frozen_forward_context()
        metadata["layer"][0].max_len = 9
        metadata["other"] = []
    (copy,) = frozen.attn_metadata["layer"]
    assert copy.max_len == 5
    assert copy.lengths is metadata["layer"][0].lengths
    assert list(frozen.attn_metadata) == ["layer"]
