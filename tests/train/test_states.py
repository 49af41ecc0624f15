"""The target's states are computed once a row, and are the same when they come from memory."""

import pytest
import torch
from made import SHAPE, documents, target_of
from tiny import make_tiny

from specdec.train import states
from specdec.train.rows import Batch, PackedRows
from specdec.train.states import KeptStates, has_room
from specdec.train.target import TargetStates


@pytest.mark.parametrize("room", [True, False], ids=["kept", "no room"])
def test_rows_that_were_seen_are_not_computed_again(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    monkeypatch.setattr(states, "has_room", lambda *_: room)
    target = target_of(make_tiny(tmp_path_factory.mktemp("m"), layers=3, vocab=64, **SHAPE))
    rows = PackedRows(documents([20, 25, 30, 22], 64), 32, "cpu")
    asked: list[tuple[int, ...]] = []

    def compute(batch: Batch) -> TargetStates:
        asked.append(batch.rows)
        return target(batch)

    kept = KeptStates(compute)  # type: ignore[arg-type]
    for numbers in ([2, 0], [1, 3], [0, 1], [3, 2], [2]):
        batch = rows.batch(numbers)
        for found, expected in zip(kept(batch).tensors, target(batch).tensors, strict=True):
            assert found.dtype == expected.dtype
            # Of floats the last bits hang on the batch in which they were computed.
            assert torch.allclose(found.float(), expected.float(), atol=1e-5)
    assert len(asked) == (2 if room else 5)


def test_nothing_is_kept_on_a_cpu() -> None:
    assert not has_room(1, torch.device("cpu"))
