"""The settings of an engine, checked before anything is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from specdec.drafters.suffix import DEFAULT_HISTORY, MAX_HISTORY
from specdec.verifier.compile import CompilationConfig
from specdec.verifier.modes import CUDAGraphMode

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
BASE = "base"  # what the counts of rows without an adapter go by
MODEL_IMPLS = ("specdec", "transformers")
ACCEPTANCE = ("auto", "coupled", "rejection")
_DEFAULT_GRAPH_MODE = "FULL_AND_PIECEWISE"
COMPILATION_KEYS = ("cudagraph_mode", "cudagraph_capture_sizes", *CompilationConfig.keys())


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Engine fields. A bad value raises ValueError or TypeError naming the field.

    Attributes:
        dtype: "auto" (float32 on the CPU, the checkpoint's on a GPU), "float32", "float16" or
            "bfloat16".
        device: "auto" (cuda where there is one), "cpu", "cuda" or "cuda:N".
        cudagraph_mode: a CUDAGraphMode or its name.
        compilation_config: the same and ``cudagraph_capture_sizes`` in vLLM's form, and the fields
            of ``CompilationConfig`` (mode, backend, splitting_ops, compile_sizes, ...).
        cudagraph_capture_sizes: batch sizes in tokens to capture; must cover ``max_num_seqs``.
        uniform_request_counts: batch sizes in requests to capture, instead.
        model_impl: "specdec", or "transformers" for any other causal language model of
            transformers, on our attention and graphs. Target and draft model alike.
        attention_backend: "auto" (triton on a GPU, sdpa elsewhere), "sdpa", "triton",
            "flash_attn", "flashinfer" or "mla"; ``Engine.attention`` says why.
        max_num_seqs: requests that run at once. Default: 8 on the CPU, 64 on a GPU.
        max_model_len: longest text, prompt included. Default: the model's context.
        max_num_batched_tokens: token budget of one step.
        kv_block_size: positions per KV block, a power of two from 1 to 256; "auto" is 16, and 256
            for flash_attn, which has no other.
        num_kv_blocks: blocks of the pool. Default: what memory allows, at most what
            ``max_num_seqs`` texts of ``max_model_len`` can fill.
        gpu_memory_utilization: share of the GPU's memory that the engine may fill.
        enable_prefix_caching: reuse the KV of texts that begin alike; never with recurrent states.
        lora: adapters to load, {name: folder in PEFT's format}. This or one of the next two makes
            room and graphs for adapters at start-up; else the first ``add_lora`` does.
        max_loras: adapters that can run at the same time, 8 by default. More may be loaded.
        max_lora_rank: the largest rank. Default: the largest of ``lora``, 16 at least.
        lora_vocabulary: room for adapters of the embedding and the head too. Made without asking
            where one of ``lora`` needs it.
        draft_lora: adapters for a draft model, {name: folder}: rows on the adapter of that name are
            drafted with it, all others by the draft model as it is.
        acceptance: "auto" (coupled for rows with a seed, else rejection), "coupled", "rejection".
        exact: True asks for batch-invariant kernels, "auto" takes them where they are.
        suffix_history: tokens of earlier outputs that draft="suffix" looks in besides a request's
            own text; 0 for none.
        k_max: the widest draft of an engine with k="auto".
        extra_k: further draft widths, each with graphs of its own, beside 0 and the engine's k.
        steps_per_replay: decode steps in one replay of a graph, 1 to 8: the host works once for all
            of them, and a stream's tokens come that many steps at once. "auto" is 1, or 4 on a GPU
            where the host is the limit and no text is streamed; which batches have graphs of 4 is
            decided at start-up (see ``RoundsChoice``).
        async_scheduling: launch a step before the last one's tokens are read; "auto" on a GPU.
        capture: "eager" captures all greedy keys at start-up, "lazy" each key on first use. Off a
            GPU, graphs of batches with prompts are always captured on first use.
        graph_memory_limit: bytes that the graphs captured at start-up may take. Sizes are left out
            evenly until they fit. Default: what the GPU has free.
        verify_graphs: compare the first replay of each graph with an eager run; the graph table
            keeps the largest error.
        simulated_acceptance: for benchmarks alone: acceptance is drawn at this rate (a list: by
            position) instead of comparing, so that texts mean nothing; they come out empty, and
            generations are marked ``simulated``. A rate is the chance that a draft is accepted if
            those before it were.
        tensor_parallel_size: GPUs (or processes on the CPU) that hold the model together, each with
            its part of every layer.
        draft_tensor_parallel_size: the same for a draft model: that number, by default, or 1, which
            keeps it whole on each of them.
        symmetric_memory: several GPUs add small messages through memory that each can read of the
            others, where that gives the bits of NCCL; False leaves all to NCCL.
        debug: check the static addresses of every replay, and on several ranks that all of them
            take the same graph and commit the same tokens.
    """

    dtype: str = "auto"
    device: str = "auto"
    cudagraph_mode: CUDAGraphMode | str = _DEFAULT_GRAPH_MODE
    compilation_config: Mapping[str, Any] | None = None
    cudagraph_capture_sizes: Sequence[int] | None = None
    uniform_request_counts: Sequence[int] | None = None
    model_impl: str = "specdec"
    attention_backend: str = "auto"
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    kv_block_size: int | str = "auto"
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    lora: Mapping[str, str | Path] | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    lora_vocabulary: bool = False
    draft_lora: Mapping[str, str | Path] | None = None
    acceptance: str = "auto"
    exact: bool | str = "auto"
    suffix_history: int = DEFAULT_HISTORY
    k_max: int = 4
    extra_k: Sequence[int] = ()
    steps_per_replay: int | str = "auto"
    async_scheduling: bool | str = "auto"
    capture: str = "eager"
    graph_memory_limit: int | None = None
    verify_graphs: bool = False
    simulated_acceptance: float | Sequence[float] | None = None
    tensor_parallel_size: int = 1
    draft_tensor_parallel_size: int | None = None
    symmetric_memory: bool = True
    debug: bool = False

    def __post_init__(self) -> None:
        _choose("dtype", self.dtype, ("auto", *DTYPES))
        _choose("model_impl", self.model_impl, MODEL_IMPLS)
        _choose("acceptance", self.acceptance, ACCEPTANCE)
        _choose("capture", self.capture, ("eager", "lazy"))
        for name in (
            *("max_num_seqs", "max_model_len", "num_kv_blocks", "max_num_batched_tokens"),
            *("k_max", "tensor_parallel_size", "draft_tensor_parallel_size"),
        ):
            _check_positive(name, getattr(self, name))
        for name in ("max_num_batched_tokens", "k_max", "tensor_parallel_size"):
            if getattr(self, name) is None:
                raise TypeError(f"{name} must be an integer, got None")
        history = self.suffix_history
        if isinstance(history, bool) or not isinstance(history, int):
            raise TypeError(f"suffix_history must be an integer, got {history!r}")
        if not 0 <= history <= MAX_HISTORY:
            raise ValueError(
                f"suffix_history must be between 0 and {MAX_HISTORY} tokens, got {history}"
            )
        if self.kv_block_size != "auto":
            _check_positive("kv_block_size", self.kv_block_size)
            size = self.kv_block_size
            if not isinstance(size, int) or size > 256 or size & (size - 1):
                raise ValueError(f"kv_block_size must be a power of two from 1 to 256, got {size}")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {share!r}")
        _check_positive("graph_memory_limit", self.graph_memory_limit)
        for name in ("max_loras", "max_lora_rank"):
            _check_positive(name, getattr(self, name))
        if self.steps_per_replay != "auto":
            _check_positive("steps_per_replay", self.steps_per_replay)
            if self.steps_per_replay not in range(1, 9):
                raise ValueError(
                    f"steps_per_replay must be 'auto' or 1 to 8, got {self.steps_per_replay!r}"
                )
        if self.draft_tensor_parallel_size not in (None, 1, self.tensor_parallel_size):
            raise ValueError(
                f"draft_tensor_parallel_size must be 1 or tensor_parallel_size, "
                f"{self.tensor_parallel_size}, got {self.draft_tensor_parallel_size}"
            )
        self._check_adapters()
        for name in ("exact", "async_scheduling"):
            value = getattr(self, name)
            if value != "auto" and not isinstance(value, bool):
                raise ValueError(f"{name} must be True, False or 'auto', got {value!r}")
        for name in ("enable_prefix_caching", "debug", "verify_graphs", "symmetric_memory"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        _check_sizes("cudagraph_capture_sizes", self.cudagraph_capture_sizes, 1)
        _check_sizes("cudagraph_capture_sizes", self.capture_sizes, 1)
        self._check_compilation_config()
        _check_sizes("uniform_request_counts", self.uniform_request_counts, 1)
        _check_sizes("extra_k", self.extra_k, 0)
        self._check_simulated()
        _ = self.graph_mode, self.torch_device
        if self.model_impl == "transformers":
            self._check_transformers()

    def _check_simulated(self) -> None:
        value = self.simulated_acceptance
        if value is None:
            return
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        rates: list[object] = [*value] if is_list else [value]  # type: ignore[misc]
        for rate in rates or [None]:
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
                raise ValueError(
                    f"simulated_acceptance must be a rate in [0, 1] or a list, got {value!r}"
                )
        if self.exact is True or self.acceptance == "coupled":
            name = "exact=True" if self.exact is True else "acceptance='coupled'"
            raise ValueError(f"simulated_acceptance writes no real text, and {name} promises one")

    def _check_adapters(self) -> None:
        if not isinstance(self.lora_vocabulary, bool):
            raise TypeError(f"lora_vocabulary must be a bool, got {self.lora_vocabulary!r}")
        for field in ("lora", "draft_lora"):
            paths = getattr(self, field)
            if paths is not None and not isinstance(paths, Mapping):
                raise TypeError(f"{field} must map names to paths, got {paths!r}")
            for name, path in (paths or {}).items():
                check_adapter_name(field, name)
                if not isinstance(path, str | Path):
                    raise TypeError(f"{field}[{name!r}] must be a path, got {path!r}")
        for name in self.draft_lora or ():
            if name not in (self.lora or {}):
                raise ValueError(f"draft_lora: no adapter {name!r} is in lora")

    def _check_transformers(self) -> None:
        """Refuse by name what only our own models have."""
        for what, asked in (
            ("adapters (lora, max_loras and the like)", self.lora_at_start),
            ("compilation (compilation_config)", self.compilation.is_compiled),
            ("exact=True", self.exact is True),
        ):
            if asked:
                raise ValueError(f"model_impl='transformers' does not have {what}")

    @property
    def lora_at_start(self) -> bool:
        """Whether slots and graphs for adapters are made before the first request."""
        asked = (self.lora, self.max_loras, self.max_lora_rank, self.draft_lora)
        return self.lora_vocabulary or any(field is not None for field in asked)

    def _check_compilation_config(self) -> None:
        config = self.compilation_config
        if config is None:
            return
        if not isinstance(config, Mapping):
            raise TypeError(f"compilation_config must be a mapping, got {config!r}")
        unknown = [str(key) for key in config if key not in COMPILATION_KEYS]
        if unknown:
            raise ValueError(
                f"compilation_config: {', '.join(sorted(unknown))} not supported; "
                f"known keys are {', '.join(COMPILATION_KEYS)}"
            )
        self._check_said_twice(config)
        unsupported = self.compilation.unsupported_on(self.torch_device)
        if unsupported is not None:
            raise ValueError(f"compilation_config: {unsupported}")

    def _check_said_twice(self, config: Mapping[str, Any]) -> None:
        """A field that stands in ``compilation_config`` too must not say something else."""
        mode, inner = CUDAGraphMode.parse(self.cudagraph_mode), config.get("cudagraph_mode")
        is_default = mode is CUDAGraphMode.parse(_DEFAULT_GRAPH_MODE)
        if inner is not None and not is_default and self.graph_mode is not mode:
            raise ValueError(f"cudagraph_mode is {mode}, but in compilation_config {inner}")
        sizes, inner = self.cudagraph_capture_sizes, config.get("cudagraph_capture_sizes")
        if sizes is not None and inner is not None and list(sizes) != list(inner):
            raise ValueError(
                f"cudagraph_capture_sizes is {list(sizes)}, but in compilation_config {list(inner)}"
            )

    @property
    def compilation(self) -> CompilationConfig:
        own = CompilationConfig.keys()
        values = self.compilation_config or {}
        return CompilationConfig.parse({key: values[key] for key in values if key in own})

    @property
    def graph_mode(self) -> CUDAGraphMode:
        mode = CUDAGraphMode.parse(self.cudagraph_mode)
        chosen = (self.compilation_config or {}).get("cudagraph_mode")
        if chosen is None:
            return mode
        try:
            return CUDAGraphMode.parse(chosen)
        except (ValueError, TypeError) as error:
            raise type(error)(f"compilation_config: {error}") from error

    @property
    def capture_sizes(self) -> Sequence[int] | None:
        sizes = (self.compilation_config or {}).get("cudagraph_capture_sizes")
        return self.cudagraph_capture_sizes if sizes is None else sizes

    @property
    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device: {self.device!r} is not a device") from error
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"device {self.device!r} was asked for; this machine has "
                f"{torch.cuda.device_count()} CUDA devices"
            )
        return device

    @classmethod
    def field_names(cls) -> frozenset[str]:
        return frozenset(field.name for field in fields(cls))


def check_k(k: object) -> int | str:
    """The engine's k: an int of at least 0, or "auto"."""
    if k == "auto":
        return "auto"
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k must be an integer or 'auto', got {k!r}")
    if k < 0:
        raise ValueError(f"k must be at least 0, got {k}")
    return k


def check_adapter_name(field: str, name: object) -> None:
    """Raise ValueError or TypeError where ``name`` cannot name an adapter."""
    if not isinstance(name, str):
        raise TypeError(f"{field}: an adapter's name must be a string, got {name!r}")
    if not name or name == BASE:
        raise ValueError(f"{field}: an adapter cannot be called {name!r}")


def _choose(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _check_positive(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _check_sizes(name: str, value: object, low: int) -> None:
    """A list of integers of at least ``low``, or None."""
    if value is None and name != "extra_k":
        return
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list of integers, got {value!r}")
    for size in value:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be a list of integers, got {value!r}")
        if size < low:
            raise ValueError(f"{name} must hold integers of at least {low}, got {size}")
