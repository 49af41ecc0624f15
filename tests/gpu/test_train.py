"""Training on a real GPU: the forward is the engine's, and the command learns, in bfloat16."""

import io
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny import make_tiny

import specdec

pytestmark = pytest.mark.gpu

# Head size 64 and a group of three: the shape of the bundled model's layers.
SHAPE = {"hidden": 192, "heads": 3, "kv_heads": 1, "head_dim": 64, "ffn": 320, "vocab": 256}
# Two forwards of the same model differ by the rounding of their attention: a greedy choice turns
# over where its margin is of that size, in bfloat16 a few positions in a hundred.
MIN_SAME_CHOICES = {"float32": 0.99, "bfloat16": 0.9}


@pytest.fixture(scope="module", autouse=True)
def helpers():
    """The helpers of the CPU tests of training."""
    folder = str(Path(__file__).resolve().parents[1] / "train")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


@pytest.mark.parametrize("dtype", MIN_SAME_CHOICES)
def test_the_training_forward_makes_the_engines_choices(tmp_path, dtype):
    from specdec.config import EngineConfig
    from specdec.train.corpus import Document
    from specdec.train.rows import PackedRows
    from specdec.train.target import FrozenTarget, load_target
    from specdec.verifier.loading import read_config

    folder = make_tiny(tmp_path, layers=4, std=0.15, **SHAPE)
    config = EngineConfig(device="cuda", dtype=dtype)
    model = load_target(str(folder), read_config(folder), config)
    prompts = [[i, 3 * i, 7] for i in range(1, 30)]
    with specdec.Engine(
        model, device="cuda", max_num_seqs=8, max_model_len=128, num_kv_blocks=256
    ) as engine:
        results = engine.generate(prompts, specdec.SamplingParams(max_new_tokens=40))
    documents = [
        Document(i, True, [*prompt, *result.token_ids], [(3, 43)])
        for i, (prompt, result) in enumerate(zip(prompts, results, strict=True))
    ]
    rows = PackedRows(documents, 128, "cuda")
    target = FrozenTarget(model, (0, 2, 3), 256)
    same = total = 0
    for number in range(len(rows)):
        batch = rows.batch([number])
        states = target(batch)
        assert states.features.shape == (1, 128, 3 * 192)
        choices = states.choice[0].tolist()
        for document, start in rows.rows[number].places:
            own = choices[start + 2 : start + 42]
            same += sum(a == b for a, b in zip(own, document.answer, strict=True))
            total += 40
    assert total == 29 * 40
    assert same / total >= MIN_SAME_CHOICES[dtype]


@pytest.mark.parametrize("parallel", [False, True], ids=["chain", "parallel"])
def test_the_command_learns_in_bfloat16(tmp_path, parallel):
    """A target whose next token depends on the last alone. Chance would be one in 64."""
    from made import bigram_model

    from specdec.train.run import train
    from specdec.train.settings import TrainSettings

    shape = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 256}
    model = bigram_model(tmp_path / "m", bos=1, **shape)
    settings = TrainSettings(
        model=str(model),
        out=str(tmp_path / "out"),
        device="cuda",
        dtype="bfloat16",
        tokens=20_000,
        seq_len=128,
        batch_tokens=1024,
        max_user_tokens=16,
        max_answer_tokens=64,
        num_seqs=64,
        unroll=3,
        draft_vocab=64,
        steps=300,
        lr=3e-3,
        parallel=parallel,
        time_limit=120.0,
    )
    report = train(settings, Console(file=io.StringIO()), plot=False)
    assert report["training"]["steps"] == 300
    assert report["training"]["last"]["loss"] < 3.0  # log(64) is 4.2
    held_out = report["acceptance"]["held_out"][0]
    assert held_out["by_position"][0] > 0.5
    assert report["environment"]["device_type"] == "cuda"
    assert report["environment"]["peak_memory_bytes"] > 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_distilled_rows_in_bfloat16():
    """The kernel rounds once, at the end: its error is at most twice that of plain PyTorch."""
    from specdec.kernels.distill import distill_rows, distill_rows_reference

    generator = torch.Generator("cuda").manual_seed(0)
    logits = (4 * torch.randn(333, 24576, generator=generator, device="cuda")).bfloat16()
    wide = 4 * torch.randn(400, 24600, generator=generator, device="cuda")
    target_logits = wide.bfloat16()[:, :24576]
    rows = torch.randint(400, (333,), generator=generator, device="cuda")
    exact, plain = logits.double(), logits.clone()
    log_probs = exact.log_softmax(-1)
    target = target_logits[rows].double().softmax(-1)
    loss, grad = -(target * log_probs).sum(-1), log_probs.exp() - target
    plain_loss, plain_hits = distill_rows_reference(plain, target_logits, rows)
    found_loss, hits = distill_rows(logits, target_logits, rows)
    assert torch.equal(hits, plain_hits)
    assert (logits - grad).abs().max() <= 2 * (plain - grad).abs().max()
    assert torch.allclose(found_loss.double(), loss, rtol=1e-5)
    assert torch.allclose(plain_loss.double(), loss, rtol=1e-5)


def test_states_are_kept_where_there_is_room(tmp_path):
    from made import documents

    from specdec.config import EngineConfig
    from specdec.train.rows import PackedRows
    from specdec.train.states import KeptStates, has_room
    from specdec.train.target import FrozenTarget, load_target
    from specdec.verifier.loading import read_config

    folder = make_tiny(tmp_path, layers=4, **SHAPE)
    model = load_target(str(folder), read_config(folder), EngineConfig(device="cuda"))
    target = FrozenTarget(model, (0, 2, 3), 256)
    assert has_room(2**20, torch.device("cuda")) and not has_room(2**50, torch.device("cuda"))
    rows = PackedRows(documents([100, 90, 128], 256), 128, "cuda")
    kept = KeptStates(target)
    first = kept(rows.batch([0, 1, 2]))
    again = kept(rows.batch([2, 0]))
    for one, other in zip(first.tensors, again.tensors, strict=True):
        assert torch.equal(one[[2, 0]], other)
