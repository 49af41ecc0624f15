"""Saving, shortening and making models, and what read_config reports."""

import json
from pathlib import Path

import pytest
import torch
from oracle import Oracle
from paged import cache_for, load, logits_of, relative_error
from tiny import (
    ARCHITECTURES,
    blended,
    constant_model,
    make_tiny,
    negated,
    read_json,
    read_tensors,
    resized_vocab,
)

from specdec.verifier.attention.sdpa import SdpaBackend
from specdec.verifier.loading import (
    random_weights,
    read_config,
    save_first_layers,
    save_model,
    silence_layers,
    truncate_layers,
)
from specdec.verifier.models.config import config_from_json, config_to_json

IDS = [5, 17, 99, 3, 42]


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [
        (7, None, (7,)),
        (None, 7, (7,)),
        (7, [8, 9], (8, 9)),
        ([3, 4], None, (3, 4)),
        (None, None, ()),
        (0, None, (0,)),
        (7, 0, (0,)),
    ],
)
def test_eos_ids(
    tmp_path: Path,
    config_eos: int | list[int] | None,
    generation_eos: int | list[int] | None,
    expected: tuple[int, ...],
) -> None:
    """generation_config.json's, and config.json's where it has none."""
    folder = make_tiny(tmp_path, eos=config_eos, bos=1)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    config = read_config(folder)
    assert config.eos_token_ids == expected
    assert config.bos_token_id == 1


def test_without_generation_config(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, eos=9)
    (folder / "generation_config.json").unlink()
    assert read_config(folder).eos_token_ids == (9,)


def test_yarn_extends_the_context(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read_config(make_tiny(tmp_path, rope_scaling=yarn)).max_position_embeddings == 2048


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_config_survives_being_written(tmp_path: Path, family: str) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = read_config(make_tiny(tmp_path, family=family, eos=[1, 2], bos=3, rope_scaling=llama3))
    assert config_from_json(config_to_json(config), source="") == config


@pytest.mark.parametrize("tie", [False, True])
def test_saved_models_load_again(tmp_path: Path, tie: bool) -> None:
    model = load(make_tiny(tmp_path / "a", tie=tie, family="qwen3", eos=5))
    saved = save_model(model, tmp_path / "b")
    assert ("lm_head.weight" in read_tensors(saved)) != tie
    again = load(saved)
    assert again.config == model.config
    assert torch.equal(logits_of(again, IDS), logits_of(model, IDS))
    assert relative_error(logits_of(again, IDS), Oracle(saved).logits(IDS)) < 1e-4


def test_large_models_are_saved_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(make_tiny(tmp_path / "a"))
    monkeypatch.setattr("specdec.verifier.checkpoint.MAX_SHARD_BYTES", 100_000)
    saved = save_model(model, tmp_path / "b")
    assert len(list(saved.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(load(saved), IDS), logits_of(model, IDS))


def test_truncated_model_shares_memory(tmp_path: Path) -> None:
    model = load(make_tiny(tmp_path, layers=3))
    short = truncate_layers(model, 2)
    assert short.config.num_layers == 2
    assert short.dtype == model.dtype
    shared = {slot.data_ptr() for slot in model.weight_slots().values()}
    assert {slot.data_ptr() for slot in short.weight_slots().values()} <= shared
    assert torch.equal(logits_of(short, IDS), logits_of(model, IDS, num_layers=2))
    with pytest.raises(ValueError, match="num_layers must be between 1 and 3, got 4"):
        truncate_layers(model, 4)


def test_first_layers_as_a_checkpoint(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "a", layers=3, tie=True, dtype=torch.bfloat16, tokenizer="words")
    short = save_first_layers(folder, tmp_path / "b", 2)
    assert read_config(short).dtype == torch.bfloat16
    assert (short / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    expected = logits_of(load(folder), IDS, num_layers=2)
    assert torch.equal(logits_of(load(short), IDS), expected)
    assert relative_error(logits_of(load(short), IDS), Oracle(short).logits(IDS)) < 1e-4


def test_the_made_pair_agrees_everywhere(tmp_path: Path) -> None:
    """Silenced layers cost what they cost and add exactly nothing."""
    config = read_config(make_tiny(tmp_path, layers=4, family="qwen2"))
    model = random_weights(config, std=0.25, seed=1, attention_backend=SdpaBackend("cpu"))
    silence_layers(model, 2)
    draft = truncate_layers(model, 2)
    assert torch.equal(logits_of(draft, IDS), logits_of(model, IDS))


def test_random_weights_repeat_and_have_the_deviation_asked_for(tmp_path: Path) -> None:
    config = read_config(make_tiny(tmp_path, family="qwen2"))
    backend = SdpaBackend("cpu")
    one, two, other = (
        random_weights(config, std=0.25, seed=seed, attention_backend=backend) for seed in (3, 3, 4)
    )
    slots = one.weight_slots()
    for name, slot in two.weight_slots().items():
        assert torch.equal(slot, slots[name]), name
        if slot.dim() == 2:
            # 4096 draws or more: the deviation is within 10 % but for one time in 10^19.
            assert slot.std().item() == pytest.approx(0.25, rel=0.1), name
    assert not torch.equal(other.embed_tokens, one.embed_tokens)
    half = random_weights(config, std=0.25, dtype=torch.bfloat16, attention_backend=backend)
    assert half.dtype == torch.bfloat16
    assert logits_of(half, IDS).dtype == torch.float32


def test_padding_writes_nowhere(tmp_path: Path) -> None:
    """A whole batch of padding rows leaves the pool as it was."""
    from specdec.verifier.attention.base import AttentionMetadata

    model = load(make_tiny(tmp_path))
    cache = cache_for(model, 8)
    cache.data.fill_(7.0)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
        context_lens=torch.tensor([0], dtype=torch.int32),
        seq_lens=torch.tensor([0], dtype=torch.int32),
        block_table=torch.zeros(1, 3, dtype=torch.int32),
        slot_mapping=torch.full((2,), -1),
        max_query_len=2,
        uniform=True,
    )
    hidden = model.forward(torch.tensor([1, 2]), torch.tensor([0, 0]), cache, metadata)
    assert hidden.isfinite().all()
    assert (cache.data[:, :, :-1] == 7.0).all()


class TestTiny:
    """The models that other tests are made of are what they say."""

    def test_constant_model(self, tmp_path: Path) -> None:
        probs = (0.30, 0.35, 0.25, 0.10)
        model = load(constant_model(tmp_path, probs, vocab=7))
        found = logits_of(model, [3, 0, 6, 1]).softmax(-1)
        assert torch.allclose(found[:, :4], torch.tensor(probs).expand(4, 4), atol=1e-6)
        assert (found[:, 4:] == 0).all()

    def test_negated(self, tmp_path: Path) -> None:
        folder = make_tiny(tmp_path / "a", tie=True)
        ours = logits_of(load(folder), IDS)
        assert torch.equal(logits_of(load(negated(folder, tmp_path / "b")), IDS), -ours)

    def test_blended(self, tmp_path: Path) -> None:
        folder = make_tiny(tmp_path / "a")
        head = read_tensors(folder)["lm_head.weight"]
        noise = read_tensors(blended(folder, tmp_path / "b", 0.3))["lm_head.weight"] - head
        # 8192 draws: within 5 % but for one time in 10^9.
        assert (noise.std() / head.std()).item() == pytest.approx(0.3, rel=0.05)

    def test_resized_vocab(self, tmp_path: Path) -> None:
        folder = make_tiny(tmp_path / "a", vocab=128)
        ids = [5, 17, 99]
        ours = logits_of(load(folder), ids)
        wide = logits_of(load(resized_vocab(folder, tmp_path / "b", 140, loud=True)), ids)
        assert relative_error(wide[:, :128], ours) < 1e-5
        assert (wide[:, 138:].amax(-1) > ours.amax(-1)).all()
        narrow = load(resized_vocab(folder, tmp_path / "c", 104))
        assert relative_error(logits_of(narrow, ids), ours[:, :104]) < 1e-5

    def test_folder_is_what_transformers_writes(self, tmp_path: Path) -> None:
        folder = make_tiny(tmp_path, shards=2)
        index = read_json(folder / "model.safetensors.index.json")
        assert set(index["weight_map"]) == set(read_tensors(folder))
