"""How the pieces of a model run: as they were traced, or compiled by Inductor.

Kernels stay opaque (``kernel_ops.py``), so both give the same bits. ``inductor.py`` holds what
needs Inductor and is imported where a piece is compiled.
"""

import importlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from specdec.verifier.attention.op import OPAQUE_ATTENTION, OPAQUE_RECURRENCE
from specdec.verifier.kernel_ops import KERNEL_OPS
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.split import SplitModel, split, trace_model

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "eager", "inductor")
# What Inductor has where it lets others say where to cut, and wrap what it has cut.
_PARTITION_API = (
    "torch._inductor.config.graph_partition",
    "torch._inductor.config.custom_should_partition_ops",
    "torch._inductor.utils.set_customized_partition_wrappers",
)
PieceFunction = Callable[..., tuple[Tensor, ...]]

NO_COMPILATION, STOCK_TORCH_COMPILE, DYNAMO_TRACE_ONCE, PIECEWISE_COMPILE = range(4)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilationConfig:
    """The compilation settings in vLLM's form. A bad value raises ValueError naming it.

    Attributes:
        mode: 0 compiles nothing: the pieces of a PIECEWISE graph run as they were traced. 3
            compiles each distinct piece. 1 and 2 compile the same and keep no PIECEWISE graphs,
            as in vLLM. Default: 3 where another field asks for compilation, else 0.
        backend: "inductor", "eager" (the traced pieces themselves), or "auto": inductor on a GPU.
        splitting_ops: operators that stand between the pieces of PIECEWISE graphs. A list without
            "specdec::attention" has none of them.
        compile_sizes: numbers of tokens that get a piece of static shape, tuned.
        use_inductor_graph_partition: Inductor compiles the whole model and cuts it at splitting_ops
            itself, instead of compiling the pieces of a model that was cut. On a GPU.
        cache_dir: where compiled pieces are kept. Default: SPECDEC_CACHE_DIR, or
            ~/.cache/specdec/compile. The folder may be copied to another machine.
    """

    mode: int | None = None
    backend: str = "auto"
    splitting_ops: Sequence[str] | None = None
    compile_sizes: Sequence[int] = ()
    use_inductor_graph_partition: bool = False
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.mode is not None and (type(self.mode) is not int or self.mode not in range(4)):
            raise ValueError(f"compilation_config: mode must be 0, 1, 2 or 3, not {self.mode!r}")
        if self.backend not in BACKENDS:
            raise ValueError(
                f"compilation_config: backend must be one of {', '.join(BACKENDS)}, "
                f"not {self.backend!r}"
            )
        sizes, ops = self.compile_sizes, self.splitting_ops
        if not _is_list_of(int, sizes) or any(size < 1 for size in sizes):
            raise ValueError(
                f"compilation_config: compile_sizes must be positive integers, not {sizes!r}"
            )
        if ops is not None and not _is_list_of(str, ops):
            raise ValueError(
                f"compilation_config: splitting_ops must be a list of names, not {ops!r}"
            )
        if self.mode == NO_COMPILATION and self._asks_for_compilation:
            raise ValueError(
                "compilation_config: mode 0 compiles nothing, but backend, compile_sizes or "
                "use_inductor_graph_partition asks for it; use mode 3"
            )
        known = {op._schema.name for op in KERNEL_OPS.values()}
        known |= {OPAQUE_ATTENTION, OPAQUE_RECURRENCE}
        unknown = sorted(set(self.split_at) - known)
        if unknown:
            raise ValueError(
                f"compilation_config: splitting_ops {', '.join(unknown)} not known; "
                f"the model's operators are {', '.join(sorted(known))}"
            )
        if type(self.use_inductor_graph_partition) is not bool:
            raise ValueError(
                "compilation_config: use_inductor_graph_partition must be true or false, "
                f"not {self.use_inductor_graph_partition!r}"
            )
        if self.use_inductor_graph_partition:
            self._check_partition()

    def _check_partition(self) -> None:
        name = "compilation_config: use_inductor_graph_partition"
        if self.level != PIECEWISE_COMPILE or self.backend == "eager":
            raise ValueError(
                f"{name} needs mode 3 and backend inductor, not mode {self.level} and backend "
                f"{self.backend}"
            )
        missing = [each for each in _PARTITION_API if not _exists(each)]
        if missing:
            raise ValueError(
                f"{name} needs {' and '.join(missing)}, which torch {torch.__version__} lacks"
            )

    def unsupported_on(self, device: torch.device) -> str | None:
        """What these settings ask that the device cannot give, or None."""
        if self.use_inductor_graph_partition and device.type != "cuda":
            return (
                "use_inductor_graph_partition: Inductor makes partitions of code for GPUs only, "
                f"and the device is {device.type}"
            )
        return None

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "CompilationConfig":
        """The config of these keys, all of which must be fields."""
        return cls(**values)

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @property
    def _asks_for_compilation(self) -> bool:
        asked = self.use_inductor_graph_partition or bool(self.compile_sizes)
        return self.backend != "auto" or asked

    @property
    def level(self) -> int:
        """``mode``, decided."""
        if self.mode is not None:
            return self.mode
        return PIECEWISE_COMPILE if self._asks_for_compilation else NO_COMPILATION

    @property
    def is_compiled(self) -> bool:
        """Every batch goes through the pieces, not those of PIECEWISE graphs alone."""
        return self.level != NO_COMPILATION

    @property
    def split_at(self) -> frozenset[str]:
        """Where the model is cut, "namespace::name". Pieces never hold attention or recurrence."""
        listed = frozenset(name.replace(".", "::") for name in self.splitting_ops or ())
        return listed | {OPAQUE_ATTENTION, OPAQUE_RECURRENCE}

    @property
    def no_piecewise(self) -> str | None:
        """Why there are no PIECEWISE graphs under these settings, or None where there are."""
        if self.level in (STOCK_TORCH_COMPILE, DYNAMO_TRACE_ONCE):
            return f"compilation mode {self.level} keeps no graphs of pieces"
        names = {OPAQUE_ATTENTION, OPAQUE_ATTENTION.replace("::", ".")}
        if self.splitting_ops is not None and names.isdisjoint(self.splitting_ops):
            return f"splitting_ops do not hold {OPAQUE_ATTENTION}"
        return None

    def backend_on(self, device: torch.device) -> str:
        if self.level == NO_COMPILATION:
            return "eager"
        if self.backend != "auto":
            return self.backend
        return "inductor" if device.type == "cuda" else "eager"


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute)


def compile_pieces(
    model: CausalLM, config: CompilationConfig, has_lora: bool = False
) -> tuple[SplitModel, list[PieceFunction]]:
    """The model's pass as a chain, and the function that runs each of its distinct pieces.

    ``has_lora``: of the pass over rows with adapters, whose slots the model has.
    """
    chain = split(trace_model(model, has_lora), model, config.split_at)
    if config.backend_on(model.device) == "eager":
        if config.compile_sizes:
            logger.warning("compile_sizes are not used: backend eager compiles nothing")
        return chain, [piece.module for piece in chain.pieces]
    from specdec.verifier.inductor import compile_chain

    return chain, compile_chain(model, chain, config)


def _is_list_of(kind: type, values: object) -> bool:
    if not isinstance(values, Collection) or isinstance(values, str | bytes | Mapping):
        return False
    return all(type(value) is kind for value in values)
