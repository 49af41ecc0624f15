"""Reading and writing checkpoints of safetensors files."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.verifier.models.config import UnsupportedModelError, read_json_object

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
INDEX_TYPES = ("I64", "I32", "BOOL")
# Large enough that an 8B model has four files, small enough to be written from memory.
MAX_SHARD_BYTES = 5 * 10**9
# Tensors of old checkpoints that are computed, not learned.
COMPUTED = ".rotary_emb.inv_freq"


class Checkpoint(Protocol):
    """Named tensors, under Hugging Face's names whatever the file calls them."""

    source: str  # the file or folder, for messages

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape, read without its data."""

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, in the dtype of the file; perhaps a view of the mapped file."""


class SafetensorsCheckpoint:
    """The safetensors files of a Hugging Face folder, mapped into memory.

    Raises FileNotFoundError where there are none, UnsupportedModelError for pickled or quantised
    weights, ValueError naming a file that is damaged or a tensor that its index misplaces.
    """

    def __init__(self, folder: Path, *, indices: Collection[str] = ()) -> None:
        """``indices``: names of tensors that hold integers or truth values."""
        self.source = str(folder)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}
        index = _weight_map(folder)
        for path in _weight_files(folder, index):
            for name, shape, handle in _open(path, indices):
                if index is not None and index.get(name) != path.name:
                    continue
                self._shapes[name] = shape
                self._files[name] = handle
        for name, file in (index or {}).items():
            if name not in self._files:
                raise ValueError(
                    f"{folder / file} does not hold {name}, which {INDEX} says it does"
                )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: s for name, s in self._shapes.items() if not name.endswith(COMPUTED)}

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` as one safetensors file, or as shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = WEIGHTS
        if len(shards) > 1:
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in shard.items()}
        save_file(contiguous, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(content, indent=2), encoding="utf-8")


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name, or None where the weights are one file."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return None
    weight_map = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX} has no weight_map, an object of file names")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(
                f"{folder / INDEX}: weight_map[{name!r}] must be the name of a file, got {file!r}"
            )
    return weight_map


def _weight_files(folder: Path, index: dict[str, str] | None) -> list[Path]:
    paths = [folder / name for name in sorted(set(index.values()))] if index else [folder / WEIGHTS]
    missing = [path for path in paths if not path.exists()]
    if not missing:
        return paths
    pickled = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
    )
    if index is None and pickled:
        raise UnsupportedModelError(
            f"{folder} holds only pickled weights ({pickled[0]}), which are never loaded; convert "
            "them to safetensors"
        )
    raise FileNotFoundError(f"weights not found: {missing[0]} (pickled ones are never loaded)")


def _open(path: Path, indices: Collection[str]) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    try:
        handle = safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
    for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
        view = handle.get_slice(name)
        if view.get_dtype() not in (INDEX_TYPES if name in indices else FLOAT_TYPES):
            raise UnsupportedModelError(
                f"{path}: {name} is stored as {view.get_dtype()}; quantised weights are not "
                "supported"
            )
        yield name, tuple(view.get_shape()), handle
