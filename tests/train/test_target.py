"""The training forward is the engine's model: its states, its logits, its choices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from made import SHAPE, documents, target_of
from oracle import Oracle
from paged import logits_of
from tiny import make_tiny

from specdec.config import EngineConfig
from specdec.train.rows import PackedRows
from specdec.train.target import default_layers, load_target
from specdec.verifier.loading import read_config
from specdec.verifier.models.config import UnsupportedModelError


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_logits_and_states_of_packed_documents(tmp_path: Path, family: str) -> None:
    """Float32 sums in another order: equal to a few parts in a million of the largest logit."""
    folder = make_tiny(tmp_path, layers=4, vocab=64, family=family, **SHAPE)
    target = target_of(folder, layers=(2, 0, 3))
    oracle = Oracle(folder)
    rows = PackedRows(documents([11, 17, 6, 9], 64), 32, "cpu")
    batch = rows.batch([1, 0])
    states = target(batch)
    logits = states.logits(target.model.lm_head)
    greedy = states.choice
    for i, row in enumerate((1, 0)):
        for document, start in rows.rows[row].places:
            place = slice(start, start + len(document.tokens))
            ours = logits_of(target.model, document.tokens)
            size = float(ours.abs().max())
            assert torch.allclose(logits[i, place], ours, atol=5e-6 * size, rtol=0)
            assert greedy[i, place].tolist() == ours.argmax(-1).tolist()
            with torch.inference_mode():
                theirs = oracle.model(
                    torch.tensor([document.tokens]), output_hidden_states=True, use_cache=False
                ).hidden_states
            expected = torch.cat([theirs[layer][0] for layer in (2, 0, 3)], dim=-1)
            found = states.features[i, place]
            assert torch.allclose(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


def test_ids_that_the_engine_never_emits_are_no_choice(tmp_path: Path) -> None:
    target = target_of(make_tiny(tmp_path, vocab=64, **SHAPE), layers=())
    target.vocab_size = 10
    batch = PackedRows(documents([40], 64), 64, "cpu").batch([0])
    assert int(target(batch).choice.max()) < 10


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(30, (2, 15, 27)), (32, (2, 16, 29)), (7, (2, 3, 4)), (4, (0, 2, 3)), (3, (0, 1, 2))],
)
def test_default_layers_ascend(num_layers: int, layers: tuple[int, ...]) -> None:
    assert default_layers(num_layers) == layers


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("mistral", {"sliding_window": 8}, "sliding_window"),
        ("gemma2", {"sliding_window": 512}, "attention_soft_cap"),
        ("deepseek_v2", {}, "latent"),
    ],
)
def test_targets_that_training_does_not_follow(
    tmp_path: Path, family: str, fields: dict[str, Any], named: str
) -> None:
    folder = make_tiny(tmp_path, family=family, **fields)
    with pytest.raises(UnsupportedModelError, match=f"train-draft: a target with a {named} "):
        load_target(str(folder), read_config(folder), EngineConfig(device="cpu"))
