"""A model's forward pass as a chain of pieces with opaque operators between them.

The pass is traced once (``trace_model``) and cut at the splitting operators (``split``). Weights
are inputs of a piece, so the layers of a homogeneous stack share one piece: with attention as the
splitting operator there are three, the first, the middle and the last.
"""

from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from specdec.verifier.attention.op import OPAQUE_ATTENTION
from specdec.verifier.kernel_ops import KERNEL_OPS
from specdec.verifier.models.llama import CausalLM

# Where the trace keeps a weight that is no attribute of the model.
_TENSOR = "specdec_tensor"


@dataclass(frozen=True, slots=True)
class Piece:
    """A traced function of activations, then weights. It returns a tuple of tensors."""

    module: fx.GraphModule
    text: str  # what it computes, names and weights aside: equal pieces have equal texts
    num_activations: int


@dataclass(frozen=True, slots=True)
class PieceCall:
    """One place in the chain where a piece stands."""

    piece: int  # index into ``SplitModel.pieces``
    inputs: tuple[str, ...]  # names of values made before
    weights: tuple[Tensor, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OpCall:
    """A splitting operator. Strings among ``args`` that are in ``names`` are values made before."""

    op: Any
    is_attention: bool
    args: tuple[Any, ...]
    names: frozenset[str]
    output: str


@dataclass(frozen=True, slots=True)
class SplitModel:
    """The whole pass: calls in order, from ``inputs`` to ``output``."""

    inputs: tuple[str, ...]
    pieces: tuple[Piece, ...]
    calls: tuple[PieceCall | OpCall, ...]
    output: str


class _Tracer(fx.Tracer):
    """Follows the model's Python code down to kernels and PyTorch functions."""

    proxy_buffer_attributes = True

    def __init__(self, traced_func_name: str) -> None:
        super().__init__(autowrap_functions=tuple(KERNEL_OPS))
        self.traced_func_name = traced_func_name

    def is_leaf_module(self, module: torch.nn.Module, module_qualified_name: str) -> bool:
        return False

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not isinstance(a, torch.nn.Parameter):
            # The adapters' weights of a layer, which are no part of the module.
            node = self.create_node("get_attr", "adapters", (), {})
            node.meta[_TENSOR] = a
            return node
        return super().create_arg(a)


def trace_model(model: CausalLM, has_lora: bool = False) -> fx.Graph:
    """The graph of ``model.opaque_forward``, or ``opaque_lora_forward``. It holds no size."""
    return _Tracer("opaque_lora_forward" if has_lora else "opaque_forward").trace(model)


def op_name(node: fx.Node) -> str | None:
    """The operator that a node calls, "namespace::name"; a kernel counts as its operator."""
    if node.op != "call_function":
        return None
    target: Any = node.target
    target = KERNEL_OPS.get(target, target)
    schema = getattr(target, "_schema", None)
    return schema.name if schema is not None else getattr(target, "_qualified_op_name", None)


def split(graph: fx.Graph, root: torch.nn.Module, splitting_ops: Collection[str]) -> SplitModel:
    """Cut ``graph``, a trace of ``root``, before and after each operator."""
    inputs = tuple(node.name for node in graph.nodes if node.op == "placeholder")
    (result,) = next(node for node in graph.nodes if node.op == "output").args
    pieces: dict[str, tuple[int, Piece]] = {}
    calls: list[PieceCall | OpCall] = []
    segment: list[fx.Node] = []

    def close() -> None:
        if not segment:
            return
        call, piece = _make_piece(segment, root, result)
        index, _ = pieces.setdefault(piece.text, (len(pieces), piece))
        calls.append(PieceCall(index, call.inputs, call.weights, call.outputs))
        segment.clear()

    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if op_name(node) not in splitting_ops:
            segment.append(node)
            continue
        close()
        if node.kwargs:
            raise ValueError(f"splitting_ops: {op_name(node)} is called with keyword arguments")
        args = fx.node.map_arg(node.args, lambda arg: _value(arg, root))
        names = frozenset(arg.name for arg in node.all_input_nodes if arg.op != "get_attr")
        is_attention = op_name(node) == OPAQUE_ATTENTION
        calls.append(OpCall(node.target, is_attention, args, names, node.name))
    close()
    ordered = tuple(piece for _, piece in pieces.values())
    return SplitModel(inputs, ordered, tuple(calls), result.name)


def _make_piece(
    segment: list[fx.Node], root: torch.nn.Module, result: fx.Node
) -> tuple[PieceCall, Piece]:
    inside = set(segment)
    used = list(dict.fromkeys(arg for node in segment for arg in node.all_input_nodes))
    activations = [arg for arg in used if arg not in inside and arg.op != "get_attr"]
    weights = [arg for arg in used if arg.op == "get_attr"]
    outputs = [
        node
        for node in segment
        if node is result or any(user not in inside and user.op != "output" for user in node.users)
    ]

    piece = fx.Graph()
    copies = {node: piece.placeholder(f"x{i}") for i, node in enumerate(activations)}
    copies |= {node: piece.placeholder(f"w{i}") for i, node in enumerate(weights)}
    for i, node in enumerate(segment):
        copies[node] = piece.node_copy(node, copies.__getitem__)
        copies[node].name = f"v{i}"
        # Else the code of the piece would ask every later trace to stop at this function too.
        copies[node].meta.pop("is_wrapped", None)
    piece.output(tuple(copies[node] for node in outputs))
    call = PieceCall(
        -1,
        tuple(node.name for node in activations),
        tuple(_weight(node, root) for node in weights),
        tuple(node.name for node in outputs),
    )
    module = fx.GraphModule(torch.nn.Module(), piece)
    shapes = [f"{tuple(w.shape)} {w.dtype}" for w in call.weights]
    return call, Piece(module, f"{piece}\nweights: {', '.join(shapes)}", len(activations))


def _value(node: fx.Node, root: torch.nn.Module) -> Any:
    """A splitting operator's argument: a weight itself, or the name of a value."""
    return _weight(node, root) if node.op == "get_attr" else node.name


def _weight(node: fx.Node, root: torch.nn.Module) -> Tensor:
    return node.meta[_TENSOR] if _TENSOR in node.meta else attrgetter(str(node.target))(root)
