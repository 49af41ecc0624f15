"""A whole model compiled by Inductor, which cuts it into partitions at the splitting operators.

The other way to split: Inductor sees all layers at once, so that it may plan memory across them,
and compiles each partition for itself. A PIECEWISE wrapper stands around every partition; what lies
between two is called as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._inductor import CompiledArtifact
from torch._inductor.utils import set_customized_partition_wrappers

from specdec.verifier.attention.base import AttentionMetadata
from specdec.verifier.attention.op import LayerAttention, PagedAttention
from specdec.verifier.chain import summed_rows
from specdec.verifier.compile import CompilationConfig
from specdec.verifier.context import set_forward_context
from specdec.verifier.graph import CUDAGraphWrapper, GraphPool, GraphRow
from specdec.verifier.inductor import compile_whole
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.modes import CUDAGraphMode
from specdec.verifier.split import PieceCall, split, trace_model

Partition = Callable[[list[Any]], tuple[Any, ...]]


class PartitionedModel:
    """Stands in for a ``Chain``, over partitions that Inductor made."""

    def __init__(
        self,
        model: CausalLM,
        config: CompilationConfig,
        has_lora: bool,
        kv_cache: KVCache,
        pool: GraphPool,
        role: str,
        debug: bool,
        verify_state: list[Tensor] | None,
    ) -> None:
        """Compiles the model for any number of tokens, and for each of ``compile_sizes``."""
        whole = split(trace_model(model, has_lora), model, frozenset())
        (call,) = whole.calls
        assert isinstance(call, PieceCall)
        self.model = model
        self.kv_cache = kv_cache
        self._inputs = whole.inputs
        self._call = call
        # By the size it was compiled for (0: any) and its place.
        self._wrappers: dict[tuple[int, int], CUDAGraphWrapper] = {}
        self._artifacts: dict[int, CompiledArtifact] = {}

        for size in (0, *config.compile_sizes):

            def wrap(run: Partition, metadata: Any, size: int = size) -> Partition:
                wrapper = CUDAGraphWrapper(
                    _Opaque(run),
                    CUDAGraphMode.PIECEWISE,
                    role=role,
                    pool=pool,
                    debug=debug,
                    verify_state=verify_state,
                )
                # Inductor wraps anew what it loads from a folder.
                self._wrappers[size, metadata.partition_index] = wrapper
                return lambda arguments: wrapper(*arguments)

            with _partition_wrappers(wrap):
                self._artifacts[size] = compile_whole(model, whole, config, size or None)
            if not any(of_size == size for of_size, _ in self._wrappers):
                raise NotImplementedError(
                    "use_inductor_graph_partition: Inductor made no partition that a graph can "
                    f"hold, torch {torch.__version__} on {model.device.type}"
                )
        self._handle = _handle_of(self)

    @property
    def num_pieces(self) -> int:
        """Partitions of the pass over any number of tokens."""
        return sum(size == 0 for size, _ in self._wrappers)

    def run(self, inputs: Sequence[Tensor], attend: LayerAttention | None) -> Tensor:
        """See ``Chain.run``."""
        if attend is None:
            return self.call(inputs)
        assert isinstance(attend, PagedAttention) and attend.kv_cache is self.kv_cache
        batch = attend.metadata
        ids, positions, out, *adapters = inputs
        out = out.new_empty(ids.shape[0], *out.shape[1:])
        return torch.ops.specdec.partitioned_model(
            self._handle,
            [ids, positions, out, *adapters],
            self.kv_cache.data,
            [
                *(batch.query_start_loc, batch.context_lens, batch.seq_lens),
                *(batch.block_table, batch.slot_mapping),
            ],
            batch.max_query_len,
            batch.uniform,
        )

    def call(self, inputs: Sequence[Tensor]) -> Tensor:
        """The model's output; attention reads the batch from the forward context."""
        named = dict(zip(self._inputs, inputs, strict=True))
        artifact = self._artifacts.get(inputs[0].shape[0], self._artifacts[0])
        (hidden,) = artifact(*(named[name] for name in self._call.inputs), *self._call.weights)
        return hidden

    def table(self) -> list[GraphRow]:
        return summed_rows(self._wrappers.values())

    def forget_replays(self) -> None:
        for wrapper in self._wrappers.values():
            wrapper.forget_replays()

    def clear(self) -> None:
        for wrapper in self._wrappers.values():
            wrapper.clear()


@contextmanager
def _partition_wrappers(wrap: Callable[[Partition, Any], Partition]) -> Iterator[None]:
    """Inductor hands each partition that it makes or loads meanwhile to ``wrap``."""
    set_customized_partition_wrappers(wrap)
    try:
        yield
    finally:
        set_customized_partition_wrappers(None)  # type: ignore[arg-type]


class _Opaque:
    """A partition as one operator. Sizes among its arguments are plain numbers."""

    def __init__(self, run: Partition) -> None:
        self.run = run
        # Results that are arguments, as attention's shared output is: an operator may return none.
        self.passed_through: dict[int, int] = {}
        self._handle = _handle_of(self)

    def __call__(self, *arguments: Tensor | int) -> list[Tensor]:
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        places = [i for i, each in enumerate(arguments) if not isinstance(each, Tensor)]
        sizes = [int(arguments[place]) for place in places]
        results = torch.ops.specdec.compiled_partition(self._handle, tensors, sizes, places)
        for place, argument in self.passed_through.items():
            results[place] = tensors[argument]
        return results

    def called(self, tensors: Sequence[Tensor], arguments: list[Any]) -> list[Tensor]:
        """The operator's side: results, with a stand-in for those that are arguments."""
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        results = list(self.run(arguments))
        self.passed_through = {
            place: numbers[id(result)]
            for place, result in enumerate(results)
            if id(result) in numbers
        }
        for place in self.passed_through:
            results[place] = results[place].new_empty(0)
        return results


# Operators take tensors and numbers alone, so an object goes by a number while it lives.
_numbers = count()
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()


def _handle_of(value: Any) -> int:
    handle = next(_numbers)
    _objects[handle] = value
    return handle


def _run_partition(
    handle: int, tensors: Sequence[Tensor], sizes: Sequence[int], places: Sequence[int]
) -> list[Tensor]:
    arguments: list[Any] = list(tensors)
    for place, size in zip(places, sizes, strict=True):
        arguments.insert(place, size)
    return _objects[handle].called(tensors, arguments)


def _run_model(
    handle: int,
    inputs: Sequence[Tensor],
    kv_cache: Tensor,
    batch: Sequence[Tensor],
    max_query_len: int,
    uniform: bool,
) -> Tensor:
    """Every value of the step is a tensor argument, so that a graph may hold this operator."""
    whole = _objects[handle]
    query_start_loc, context_lens, seq_lens, block_table, slot_mapping = batch
    metadata = AttentionMetadata(
        query_start_loc=query_start_loc,
        context_lens=context_lens,
        seq_lens=seq_lens,
        block_table=block_table,
        slot_mapping=slot_mapping,
        max_query_len=max_query_len,
        uniform=uniform,
    )
    with set_forward_context(
        attn_metadata=metadata,
        kv_cache=whole.kv_cache,
        attn_backend=whole.model.attention_backend,
    ):
        return whole.call(inputs)


_library = torch.library.Library("specdec", "FRAGMENT")
for _schema, _run in (
    (
        "compiled_partition(int handle, Tensor[] tensors, int[] sizes, int[] places) -> Tensor[]",
        _run_partition,
    ),
    (
        "partitioned_model(int handle, Tensor[] inputs, Tensor(a!) kv_cache, Tensor[] batch, "
        "int max_query_len, bool uniform) -> Tensor",
        _run_model,
    ),
):
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _run, "CompositeExplicitAutograd")
