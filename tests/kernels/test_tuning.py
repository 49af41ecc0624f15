"""The files of measured tiles: they can be read, and a GPU without one has a rule."""

import pytest
import torch

from specdec.kernels.tuning import (
    TUNED_FOLDER,
    TileConfig,
    skinny_config,
    tuned_file,
    tuned_tiles,
)

FILES = sorted(TUNED_FOLDER.glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_tuned_tiles_can_be_compiled(file) -> None:
    tiles = tuned_tiles(file.stem.replace("_", " "))
    assert tiles
    for (outputs, inputs, rows), tile in tiles.items():
        assert outputs > 0 and inputs % 8 == 0 and rows in (16, 32, 64)
        for size in (tile.block_n, tile.block_k, tile.num_warps):
            assert size > 0 and size & (size - 1) == 0
        assert tile.block_n >= (64 if tile.swap else 16)
        # Stages are cut down to what fits, but a tile that needs that was not measured as written.
        assert 2 * 2 * (tile.block_n + rows) * tile.block_k <= 200 << 10


def test_a_gpu_without_a_file_has_a_rule() -> None:
    assert tuned_tiles("a GPU that nobody has measured") == {}
    for outputs, inputs in ((128_256, 4096), (576, 1536), (63, 75)):
        tile = skinny_config(outputs, inputs, 16, torch.empty(0, dtype=torch.bfloat16))
        assert isinstance(tile, TileConfig) and tile.stages >= 2
    assert tuned_file("NVIDIA H200").name == "NVIDIA_H200.json"
