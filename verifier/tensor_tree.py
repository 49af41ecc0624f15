"""Walks over nested arguments and results: lists, tuples, NamedTuples, dicts and dataclasses.

Anything else that is not a tensor is a leaf and is left alone.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every leaf with its name as one would write it in Python, ``path`` being the root's."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for name, value in zip(tree._fields, tree, strict=True):
            yield from leaves(value, f"{path}.{name}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}[{index}]")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from leaves(getattr(tree, field.name), f"{path}.{field.name}")
    else:
        yield path, tree


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor in ``tree``, in order."""
    return [leaf for _, leaf in leaves(tree, "") if isinstance(leaf, Tensor)]


def map_tensors(tree: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """A copy of ``tree``'s containers with every tensor ``t`` replaced by ``fn(t)``."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, fn) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, fn) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(value, fn) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        twin = copy.copy(tree)
        for field in dataclasses.fields(tree):
            # Past the guard of a frozen dataclass: the twin is not shared yet.
            object.__setattr__(twin, field.name, map_tensors(getattr(tree, field.name), fn))
        return twin
    return tree
