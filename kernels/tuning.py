"""Tiles of the skinny linear kernels: measured ones per GPU, a rule everywhere else.

Tiles decide speed alone: every tile adds along K in order (``linear_triton``). The files in
``tuned/`` are written by ``bench/kernel_tune.py`` and named after the GPU.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# Shared memory of one program, below the 227 KiB that a Hopper multiprocessor has.
_SHARED_BYTES = 200 << 10
TUNED_FOLDER = Path(__file__).parent / "tuned"


@dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """Tile of the weight matrix and depth of the pipeline that streams it."""

    block_n: int
    block_k: int
    stages: int
    num_warps: int = 4
    # Weights on the tall side of the tensor cores' instruction (needs block_n >= 64).
    swap: bool = False


def tuned_file(device_name: str) -> Path:
    return TUNED_FOLDER / f"{device_name.replace(' ', '_').replace('/', '_')}.json"


@cache
def tuned_tiles(device_name: str) -> dict[tuple[int, int, int], TileConfig]:
    """{(outputs, inputs, rows of a tile): tile} measured on this GPU in 16 bits; may be empty."""
    file = tuned_file(device_name)
    if not file.exists():
        return {}
    return {
        (entry["outputs"], entry["inputs"], entry["rows"]): TileConfig(**entry["tile"])
        for entry in json.loads(file.read_text())["linear"]
    }


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def skinny_config(num_features: int, depth: int, block_m: int, like: Tensor) -> TileConfig:
    """The tile for a layer of ``num_features`` outputs and ``depth`` inputs.

    ``block_m`` rows share a tile; dtype and device are those of ``like``.
    """
    itemsize = like.itemsize
    if itemsize == 4:
        return TileConfig(block_n=32, block_k=32, stages=3)
    config = tuned_tiles(_device_name(like.device)).get((num_features, depth, block_m))
    if config is None:
        # Enough programs to keep every multiprocessor reading, no larger tiles than that needs,
        # and a depth that divides K where there is one.
        block_n = 64 if num_features >= 6144 else 32 if num_features >= 4096 else 16
        block_k = 128 if depth % 128 == 0 else 64
        config = TileConfig(block_n=block_n, block_k=block_k, stages=640 // block_k)
    stage_bytes = (config.block_n + block_m) * config.block_k * itemsize
    return replace(config, stages=max(2, min(config.stages, _SHARED_BYTES // stage_bytes)))
