"""The pieces of a model in their order, each place with PIECEWISE graphs of its own."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from specdec.verifier.attention.op import LayerAttention
from specdec.verifier.compile import PieceFunction
from specdec.verifier.graph import CUDAGraphWrapper, GraphPool, GraphRow
from specdec.verifier.modes import CUDAGraphMode
from specdec.verifier.split import OpCall, PieceCall, SplitModel
from specdec.verifier.tensor_tree import tensors


class Chain:
    """Runs a split model. What it is called with must lie at fixed addresses for its graphs."""

    def __init__(
        self,
        split: SplitModel,
        functions: Sequence[PieceFunction],
        pool: GraphPool,
        role: str,
        debug: bool,
        verify_state: list[Tensor] | None,
    ) -> None:
        self.split = split
        self._last_uses = _last_uses(split)
        self._wrappers: dict[int, CUDAGraphWrapper] = {}
        # What eager operators other than attention give, by place and number of tokens.
        self._op_results: dict[tuple[int, int], Any] = {}
        for place, call in enumerate(split.calls):
            if isinstance(call, PieceCall):
                self._wrappers[place] = CUDAGraphWrapper(
                    _with_weights(functions[call.piece], call.weights),
                    CUDAGraphMode.PIECEWISE,
                    role=role,
                    pool=pool,
                    debug=debug,
                    verify_state=verify_state,
                )

    @property
    def num_pieces(self) -> int:
        """Distinct pieces."""
        return len(self.split.pieces)

    def run(self, inputs: Sequence[Tensor], attend: LayerAttention | None) -> Tensor:
        """The model's output for the tensors that the traced method takes.

        ``attend`` None: the opaque operator, which reads the batch from the forward context.
        """
        values = dict(zip(self.split.inputs, inputs, strict=True))
        for place, call in enumerate(self.split.calls):
            if isinstance(call, PieceCall):
                results = self._wrappers[place](*[values[name] for name in call.inputs])
                values.update(zip(call.outputs, results, strict=True))
            else:
                self._call_op(place, call, values, attend)
            for name in self._last_uses[place]:
                values.pop(name, None)
        return values[self.split.output]

    def _call_op(
        self, place: int, call: OpCall, values: dict[str, Tensor], attend: LayerAttention | None
    ) -> None:
        args: list[Any] = [
            values[a] if isinstance(a, str) and a in call.names else a for a in call.args
        ]
        if call.is_attention and attend is not None:
            query, key, value, _, *rest = args
            # The name of the shared output stands for this layer's until the next attends.
            values[call.args[3]] = attend(query, key, value, *rest)
            return
        result = call.op(*args)
        if not call.is_attention and attend is None:
            # The next piece's graph reads it at a fixed address.
            num_tokens = values[self.split.inputs[0]].shape[0]
            static = self._op_results.setdefault((place, num_tokens), result)
            for target, made in zip(tensors(static), tensors(result), strict=True):
                target.copy_(made)
            result = static
        values[call.output] = result

    def table(self) -> list[GraphRow]:
        return summed_rows(self._wrappers.values())

    def forget_replays(self) -> None:
        for wrapper in self._wrappers.values():
            wrapper.forget_replays()

    def clear(self) -> None:
        for wrapper in self._wrappers.values():
            wrapper.clear()


def _with_weights(function: PieceFunction, weights: tuple[Tensor, ...]) -> PieceFunction:
    return lambda *activations: function(*activations, *weights)


def _last_uses(split: SplitModel) -> list[list[str]]:
    """Per call, the values that no later call reads."""
    # The ids are kept for their number.
    seen = {split.output, split.inputs[0]}
    last: list[list[str]] = []
    for call in reversed(split.calls):
        used = set(call.inputs) | set(call.outputs) if isinstance(call, PieceCall) else call.names
        last.append(sorted(used - seen))
        seen |= used
    return last[::-1]


def summed_rows(wrappers: Iterable[CUDAGraphWrapper]) -> list[GraphRow]:
    """One row per key for the graphs that several pieces have of it."""
    rows: dict[tuple, list[GraphRow]] = {}
    for wrapper in wrappers:
        for row in wrapper.table():
            rows.setdefault((row.descriptor, row.variant), []).append(row)
    return [_summed(group) for group in rows.values()]


def _summed(rows: list[GraphRow]) -> GraphRow:
    errors = [row.max_error for row in rows if row.max_error is not None]
    first = rows[0]
    return GraphRow(
        role=first.role,
        mode=first.mode,
        descriptor=first.descriptor,
        variant=first.variant,
        num_bytes=sum(row.num_bytes for row in rows),
        capture_seconds=sum(row.capture_seconds for row in rows),
        replays=first.replays,
        max_error=max(errors, default=None),
        rounds=first.rounds,
    )
