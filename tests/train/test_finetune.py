"""A draft model trained on its target's text, whole and through adapters."""

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from made import documents, target_of
from oracle import Oracle
from rich.console import Console
from tiny import blended, make_tiny, read_tensors, write_tokenizer

import specdec
from specdec.train.corpus import Corpus
from specdec.train.finetune import DraftModelTraining
from specdec.train.rows import PackedRows
from specdec.train.run import train
from specdec.train.settings import TrainSettings

SHAPE: dict[str, Any] = {"hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn": 48}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and the target with noise on its head as the draft."""
    root = tmp_path_factory.mktemp("pair")
    target = make_tiny(root / "target", vocab=64, tokenizer="words", bos=1, **SHAPE)
    return target, blended(target, root / "draft", 0.5)


def run(pair: tuple[Path, Path], out: Path, **changes: Any) -> dict[str, Any]:
    target, draft = pair
    fields: dict[str, Any] = {
        "device": "cpu",
        "tokens": 1200,
        "seq_len": 64,
        "batch_tokens": 256,
        "max_user_tokens": 12,
        "max_answer_tokens": 40,
        "num_seqs": 32,
        "steps": 60,
    }
    settings = TrainSettings(
        model=str(target), out=str(out), draft=str(draft), **(fields | changes)
    )
    return train(settings, Console(file=io.StringIO()), plot=False)


def accepted_share(target: Path, draft: Path) -> float:
    with specdec.Engine(
        str(target), str(draft), 3, device="cpu", max_num_seqs=4, max_model_len=64
    ) as engine:
        params = specdec.SamplingParams(max_new_tokens=30)
        results = engine.generate([[1, i, i + 9] for i in range(2, 42, 5)], params)
    assert isinstance(results, list)
    return sum(r.stats.accepted for r in results) / sum(r.stats.drafted for r in results)


@pytest.mark.parametrize("lora_rank", [None, 4], ids=["full", "lora"])
def test_training_makes_a_better_draft_that_an_engine_loads(
    pair: tuple[Path, Path], tmp_path: Path, lora_rank: int | None
) -> None:
    out = tmp_path / "out"
    report = run(pair, out, lora_rank=lora_rank, lr=1e-2 if lora_rank else 3e-3)
    before, after = accepted_share(*pair), accepted_share(pair[0], out)
    assert after > before + 0.03
    assert report["training"]["last"]["loss"] > 0
    old, new = read_tensors(pair[1]), read_tensors(out)
    assert old.keys() == new.keys()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    if lora_rank is None:
        assert changed == set(old)
        assert not (out / "adapter").exists()
    else:
        # The embedding, the norms and the head have no adapters.
        assert changed == {name for name in old if "_proj" in name}
        assert (out / "adapter" / "adapter_model.safetensors").exists()
    assert (out / "tokenizer.json").exists()


def test_packed_rows_give_the_draft_what_its_documents_alone_would(
    pair: tuple[Path, Path],
) -> None:
    target, draft = pair
    made = DraftModelTraining(draft, target_of(target, ()), lora_rank=None, seed=0)
    rows = PackedRows(documents([9, 14, 7], 64), 32, "cpu")
    proposals = made.proposals(rows.batch([0]), 3)
    oracle = Oracle(draft)
    (row,) = rows.rows
    for document, start in row.places:
        choices = oracle.logits(document.tokens).argmax(-1).tolist()
        for at in range(len(document.tokens) - 4):
            # Drafts after token at + 1: what the model says there and after the text's next ones.
            assert proposals[0, start + at].tolist() == choices[at + 1 : at + 4]


def test_pairs_that_do_not_fit_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = pair
    other = tmp_path / "other"
    shutil.copytree(draft, other)
    write_tokenizer(other, "words", 64, swap=(3, 4))
    with pytest.raises(ValueError, match="another tokenizer than the target: id 3"):
        run((target, other), tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="no-such"):
        run((target, tmp_path / "no-such"), tmp_path / "out")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"a .gguf file cannot be trained"):
        run((target, tmp_path / "x.gguf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_draft_that_lacks_ids_of_the_text_is_refused(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Fault: without a tokenizer to compare, its embedding was read out of range after writing."""
    other = make_tiny(tmp_path / "other", vocab=40, **SHAPE)
    with pytest.raises(ValueError, match="its vocab_size is 40, and the target writes 64 ids"):
        run((pair[0], other), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_target_with_rows_of_padding_never_writes_their_ids(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Fault: the engine that wrote had no tokenizer, and took padding for tokens."""
    _, draft = pair
    padded = make_tiny(
        tmp_path / "padded", vocab=80, tokenizer="words", tokenizer_vocab=64, bos=1, **SHAPE
    )
    out = tmp_path / "out"
    run((padded, draft), out, steps=1)
    ids = {token for each in Corpus(out / "data").documents() for token in each.tokens}
    assert max(ids) < 64
