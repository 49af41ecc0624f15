"""Collectives as operators, so that graphs and traces hold them like any other step of a model.

A group of ranks goes by a name, since an operator takes no object. Shape letters: N ranks.
"""

import torch
from torch import Tensor

from specdec.verifier.parallel.communicator import Communicator

_communicators: dict[str, Communicator] = {}


def join_group(name: str, communicator: Communicator) -> None:
    """Make ``name`` stand for these ranks in this process."""
    assert name and name not in _communicators
    _communicators[name] = communicator


def leave_group(name: str) -> None:
    """Forget a group; its communicator is closed."""
    communicator = _communicators.pop(name, None)
    if communicator is not None:
        communicator.close()


def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of every rank's ``x``, a new tensor, the same bits on each: see ``sum_ranks``."""
    result: Tensor = torch.ops.specdec.all_reduce(x, group)
    return result


def all_gather(x: Tensor, group: str) -> Tensor:
    """Every rank's ``x`` in the order of the ranks, [N, ...]."""
    result: Tensor = torch.ops.specdec.all_gather(x, group)
    return result


def _size_of(group: str) -> int:
    return _communicators[group].size


_TAGS = (torch.Tag.needs_exact_strides,)
_KEY = "CompositeExplicitAutograd"
_library = torch.library.Library("specdec", "FRAGMENT")
_library.define("all_reduce(Tensor x, str group) -> Tensor", tags=_TAGS)
_library.impl("all_reduce", lambda x, group: _communicators[group].all_reduce(x), _KEY)
_library.impl("all_reduce", lambda x, group: x.new_empty(x.shape), "Meta")
_library.define("all_gather(Tensor x, str group) -> Tensor", tags=_TAGS)
_library.impl("all_gather", lambda x, group: _communicators[group].all_gather(x), _KEY)
_library.impl("all_gather", lambda x, group: x.new_empty((_size_of(group), *x.shape)), "Meta")
