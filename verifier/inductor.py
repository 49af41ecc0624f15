"""Compiles the pieces of a model with Inductor, and keeps the results in a folder.

A piece is compiled for any number of tokens, and once more for each static size that was asked for.
What is kept is named after everything it depends on: the piece's text, the shapes and types of its
inputs, the settings, and the versions of torch, Triton and the device. So the folder never needs
to be emptied, and can be copied to another machine of the same kind.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import CompiledArtifact, standalone_compile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from specdec.verifier.compile import CompilationConfig, PieceFunction
from specdec.verifier.kernel_ops import KERNEL_OPS
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.split import Piece, PieceCall, SplitModel

logger = logging.getLogger(__name__)

# Pieces "compiled" and pieces "loaded" by this process, for tests and for the start-up line.
counts: Counter[str] = Counter()

# A number of tokens that no width of a model is likely to equal, so that only tokens are symbolic.
_HINT = 61
_TILES_HINT = 107

_OPTIONS: dict[str, Any] = {
    # Inductor would keep a chain of operations in float32; the model rounds after each.
    "emulate_precision_casts": True,
}
_TUNED_OPTIONS = {**_OPTIONS, "coordinate_descent_tuning": True}


class CompiledPiece:
    """A piece compiled for any number of tokens, and for some numbers in particular."""

    def __init__(self, general: CompiledArtifact, static: dict[int, CompiledArtifact]) -> None:
        self._general = _handle_of(general)
        self._static = {size: _handle_of(artifact) for size, artifact in static.items()}

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        handle = self._static.get(tensors[0].shape[0], self._general)
        return tuple(torch.ops.specdec.compiled_piece(handle, tensors))


def compile_chain(
    model: CausalLM, chain: SplitModel, config: CompilationConfig
) -> list[PieceFunction]:
    """The function of each distinct piece. Compiles what the folder does not hold."""
    cache = CompileCache.of(config, model.device)
    general = _compile_all(model, chain, cache, None, {})
    static = {size: _compile_all(model, chain, cache, size, {}) for size in config.compile_sizes}
    return [
        CompiledPiece(artifact, {size: all_[i] for size, all_ in static.items()})
        for i, artifact in enumerate(general)
    ]


def compile_whole(
    model: CausalLM, whole: SplitModel, config: CompilationConfig, size: int | None
) -> CompiledArtifact:
    """A pass that was split nowhere; Inductor makes partitions of it at the splitting operators.

    ``size``: the number of tokens that it is for, or None for any.
    """
    options = {"graph_partition": True, "custom_should_partition_ops": sorted(config.split_at)}
    (artifact,) = _compile_all(model, whole, CompileCache.of(config, model.device), size, options)
    return artifact


class CompileCache:
    """Compiled pieces by content, in a folder; ``folder`` None keeps nothing."""

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        self.folder = folder
        self._environment = _environment(device)

    @classmethod
    def of(cls, config: CompilationConfig, device: torch.device) -> "CompileCache":
        if os.environ.get("SPECDEC_DISABLE_COMPILE_CACHE", "0") not in ("", "0"):
            return cls(None, device)
        default = os.environ.get("SPECDEC_CACHE_DIR") or Path.home() / ".cache/specdec/compile"
        return cls(Path(config.cache_dir or default), device)

    def compiled(
        self,
        piece: Piece,
        module: fx.GraphModule,
        inputs: list[Tensor],
        size: int | None,
        more_options: dict[str, Any],
    ) -> CompiledArtifact:
        """The piece for these (fake) inputs: from the folder, or compiled and put there.

        ``module`` is the piece over operators, its nodes annotated with what they give.
        """
        options = (_OPTIONS if size is None else _TUNED_OPTIONS) | more_options
        shapes = [f"{tuple(map(str, x.shape))} {x.stride()} {x.dtype} {x.device}" for x in inputs]
        content = [piece.text, shapes, options, size, self._environment]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
        path = None if self.folder is None else self.folder / key
        if path is not None and path.exists():
            try:
                artifact = _load(path, more_options)
                counts["loaded"] += 1
                return artifact
            except Exception as error:  # a damaged file, written by whoever copied it
                logger.warning("compile cache: %s cannot be used, compiling again: %s", path, error)
        artifact = standalone_compile(
            module,
            [*inputs],
            dynamic_shapes="from_graph",
            options={"config_patches": options},
        )
        counts["compiled"] += 1
        if path is not None and self._save(artifact, path):
            # The folder gets what only a load builds, as the libraries of C++ kernels.
            return _load(path, more_options)
        return artifact

    def _save(self, artifact: CompiledArtifact, path: Path) -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            artifact.save(path=str(part), format="unpacked")
            part.rename(path)
            return True
        except (OSError, RuntimeError, AssertionError) as error:
            logger.warning("compile cache: a piece could not be kept in %s: %s", path, error)
            return False


def _load(path: Path, options: dict[str, Any]) -> CompiledArtifact:
    with torch._inductor.config.patch(options):
        return CompiledArtifact.load(path=str(path), format="unpacked")


def _compile_all(
    model: CausalLM,
    chain: SplitModel,
    cache: CompileCache,
    size: int | None,
    more_options: dict[str, Any],
) -> list[CompiledArtifact]:
    """Every distinct piece, by walking the chain on tensors that have shapes only."""
    fake = FakeTensorMode(shape_env=ShapeEnv())
    config = model.local_config
    num_tokens = size or _HINT

    def example(*shape: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(num_tokens, *shape, dtype=dtype, device=model.device)
        if size is not None:
            return fake.from_tensor(tensor, static_shapes=True)
        return _with_symbolic_rows(fake, tensor)

    inputs = [
        example(dtype=torch.int64),
        example(dtype=torch.int64),
        example(config.num_heads, config.value_size, dtype=model.dtype),
    ]
    if len(chain.inputs) > len(inputs):
        inputs += [example(dtype=torch.int64), _example_tiles(fake, model.device)]
    values = dict(zip(chain.inputs, inputs, strict=True))
    artifacts: dict[int, CompiledArtifact] = {}
    for call in chain.calls:
        if isinstance(call, PieceCall):
            weights = [fake.from_tensor(weight, static_shapes=True) for weight in call.weights]
            inputs = [*(values[name] for name in call.inputs), *weights]
            piece = chain.pieces[call.piece]
            module = _with_operators(piece)
            with fake:
                results = _Shapes(module).run(*inputs)
            values.update(zip(call.outputs, results, strict=True))
            if call.piece not in artifacts:
                artifacts[call.piece] = cache.compiled(piece, module, inputs, size, more_options)
        elif not call.is_attention:
            args = [fake.from_tensor(a) if isinstance(a, Tensor) else a for a in call.args]
            args = [values[a] if isinstance(a, str) and a in call.names else a for a in args]
            with fake:
                values[call.output] = KERNEL_OPS.get(call.op, call.op)(*args)
    return [artifacts[index] for index in range(len(chain.pieces))]


class _Shapes(fx.Interpreter):
    """Notes on each node what it gives, which decides whether Inductor may keep the result."""

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        node.meta["example_value"] = result
        return result


def _example_tiles(fake: FakeTensorMode, device: torch.device) -> Tensor:
    """The rows sorted by adapter: of any length on a GPU, none elsewhere."""
    if device.type != "cuda":
        return fake.from_tensor(torch.empty(0, dtype=torch.int32), static_shapes=True)
    tiles = torch.empty(_TILES_HINT, dtype=torch.int32, device=device)
    return _with_symbolic_rows(fake, tiles)


def _with_symbolic_rows(fake: FakeTensorMode, tensor: Tensor) -> Tensor:
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    rows_only = [DimDynamic.DUCK] + [DimDynamic.STATIC] * (tensor.dim() - 1)
    context: Any = StatelessSymbolicContext(dynamic_sizes=rows_only)
    return fake.from_tensor(tensor, symbolic_context=context)


def _with_operators(piece: Piece) -> fx.GraphModule:
    """A copy of the piece's module that calls kernels as operators."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(piece.module.graph, {}))
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = KERNEL_OPS.get(node.target, node.target)
    return fx.GraphModule(torch.nn.Module(), graph)


def _environment(device: torch.device) -> list[str]:
    parts = [torch.__version__, str(torch.version.git_version), device.type]
    if device.type == "cuda":
        import triton

        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        parts += [triton.__version__, str(torch.version.cuda), name, f"sm{major}{minor}"]
    return parts


# One opaque operator around an artifact: a recording on the CPU sees its inputs and outputs, where
# it could not see what compiled code does.
_artifacts: list[CompiledArtifact] = []


def _handle_of(artifact: CompiledArtifact) -> int:
    _artifacts.append(artifact)
    return len(_artifacts) - 1


def _run_artifact(handle: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    return list(_artifacts[handle](*inputs))


_library = torch.library.Library("specdec", "FRAGMENT")
_library.define("compiled_piece(int handle, Tensor[] inputs) -> Tensor[]")
_library.impl("compiled_piece", _run_artifact, "CompositeExplicitAutograd")
