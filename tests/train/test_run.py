"""The whole command on small models: it learns, goes on where it was stopped, and refuses."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made import CHATML, bigram_model
from rich.console import Console
from safetensors.torch import load_file
from tiny import make_tiny, read_json

from specdec import cli
from specdec.train import loop as loop_file
from specdec.train import run as run_file
from specdec.train.loop import Clock, TrainingLoop, learning_rate, read_log
from specdec.train.run import train
from specdec.train.settings import TrainSettings

SMALL: dict[str, Any] = {
    "device": "cpu",
    "tokens": 1000,
    "seq_len": 64,
    "batch_tokens": 256,
    "max_user_tokens": 12,
    "max_answer_tokens": 40,
    "num_seqs": 32,
    "unroll": 3,
    "draft_vocab": 64,
    "lr": 1e-2,
}


@pytest.fixture(scope="module")
def bigram(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bigram_model(tmp_path_factory.mktemp("bigram"), bos=1)


def settings(model: Path, out: Path, **changes: Any) -> TrainSettings:
    return TrainSettings(model=str(model), out=str(out), **(SMALL | changes))


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture(scope="module")
def trained(bigram: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("trained") / "head"
    return out, train(settings(bigram, out, steps=100, save_every=45), quiet())


def test_a_head_learns_a_target_that_can_be_learned(trained: tuple[Path, dict[str, Any]]) -> None:
    out, report = trained
    log = read_log(out)
    assert [line["step"] for line in log] == [20, 40, 45, 60, 80, 90, 100]
    assert log[-1]["loss"] < log[0]["loss"]
    assert log[-1]["agreement_by_position"][0] > 0.7 > log[0]["agreement_by_position"][0]
    held_out = report["acceptance"]["held_out"]
    assert [each["k"] for each in held_out] == [2, 4, 6]
    assert held_out[0]["by_position"][0] > 0.7
    assert held_out[0]["mean_tokens_per_step"] > 2
    assert report == read_json(out / "train_report.json")
    assert report["text"]["documents"] > report["text"]["held_out_documents"] > 0
    assert report["training"]["steps"] == 100
    assert (out / "train_report.png").stat().st_size > 0


def test_the_result_is_in_the_public_layout(trained: tuple[Path, dict[str, Any]]) -> None:
    out, report = trained
    tensors = load_file(out / "model.safetensors")
    config = read_json(out / "config.json")
    size = report["draft_vocabulary"]["size"]
    assert config["draft_vocab_size"] == len(tensors["d2t"]) == int(tensors["t2d"].sum()) == size
    assert "lm_head.weight" not in tensors and "embed_tokens.weight" not in tensors


class Stopped(Exception):
    """Stands for the process being killed."""


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    original, done = TrainingLoop._train_step, []

    def step(self: TrainingLoop, lr: float) -> torch.Tensor:
        if len(done) == steps:
            raise Stopped
        done.append(lr)
        return original(self, lr)

    monkeypatch.setattr(TrainingLoop, "_train_step", step)


@pytest.mark.parametrize("stopped", [3, 53], ids=["before the first state", "between two"])
def test_a_killed_run_ends_as_if_it_had_not_been(
    bigram: Path,
    trained: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stopped: int,
) -> None:
    out = tmp_path / "head"
    wanted = settings(bigram, out, steps=100, save_every=45)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, stopped)
        train(wanted, quiet(), plot=False)
    assert (out / "model.safetensors").exists() == (stopped > 45)
    with (out / "train_log.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"step": 5')  # the line that the process was writing
    report = train(wanted, quiet(), resume=True, plot=False)
    whole, expected = trained
    ours, theirs = load_file(out / "model.safetensors"), load_file(whole / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert report["acceptance"] == expected["acceptance"]
    logs = [[{**line, "seconds": 0} for line in read_log(folder)] for folder in (out, whole)]
    assert logs[0] == logs[1]


def test_a_run_killed_while_it_writes_goes_on_with_the_next_file(
    bigram: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_file, "SHARD_DOCUMENTS", 20)
    wanted = settings(bigram, tmp_path / "a", steps=2, tokens=2500)
    train(wanted, quiet(), plot=False)
    other = settings(bigram, tmp_path / "b", steps=2, tokens=2500)
    original, calls = run_file._write_shard, []

    def write(*arguments: Any) -> Any:
        calls.append(arguments[1])
        if len(calls) == 2:
            raise Stopped
        return original(*arguments)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(run_file, "_write_shard", write)
        train(other, quiet(), plot=False)
    train(other, quiet(), resume=True, plot=False)
    files = sorted(path.name for path in (tmp_path / "a" / "data").glob("shard-*"))
    assert len(files) > 2
    for name in (f"data/{file}" for file in files):
        ours, theirs = load_file(tmp_path / "b" / name), load_file(tmp_path / "a" / name)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert calls == [0, 1]


def test_parallel_heads_with_a_head_of_their_own_learn_too(bigram: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    report = train(
        settings(bigram, out, steps=60, parallel=True, head="own", lr=5e-3), quiet(), plot=False
    )
    tensors = load_file(out / "model.safetensors")
    assert {"mask_embedding", "mask_feature", "lm_head.weight"} <= tensors.keys()
    assert read_json(out / "config.json")["specdec_parallel_drafting"] is True
    assert report["acceptance"]["held_out"][0]["by_position"][0] > 0.4
    log = read_log(out)
    assert all(b < a for a, b in zip(log[0]["loss_by_position"], log[-1]["loss_by_position"]))  # noqa: B905


def test_a_time_limit_ends_the_run_with_a_result(
    bigram: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock is a second: writing, training and the report all end in time."""
    now = iter(range(10**9))
    clock = SimpleNamespace(perf_counter=lambda: float(next(now)))
    monkeypatch.setattr(loop_file, "time", clock)
    monkeypatch.setattr(loop_file, "MAX_WARMUP_STEPS", 5)
    out = tmp_path / "head"
    report = train(settings(bigram, out, steps=10**6, time_limit=300.0), quiet(), plot=False)
    monkeypatch.undo()
    assert (out / "model.safetensors").exists()
    assert 0 < report["training"]["steps"] < 200
    assert report["seconds"] < 320
    assert report["acceptance"]["held_out"][0]["documents"] > 0
    lrs = [line["lr"] for line in read_log(out)]
    assert lrs[-1] < 0.2 * max(lrs)


def test_the_schedule_warms_up_and_falls() -> None:
    assert learning_rate(1.0, 0, 10, 0.0) == pytest.approx(0.1)
    assert learning_rate(1.0, 9, 10, 0.0) == pytest.approx(1.0)
    assert learning_rate(1.0, 50, 10, 0.5) == pytest.approx(0.51)
    assert learning_rate(1.0, 99, 10, 1.0) == pytest.approx(0.02)
    assert learning_rate(1.0, 99, 10, 1.7) == pytest.approx(0.02)


def test_a_clock_without_a_limit_never_ends() -> None:
    assert Clock(None).left(0.1) == float("inf")
    assert Clock(100.0).left() == pytest.approx(90.0, abs=0.1)
    assert Clock(20.0).left(0.5) == pytest.approx(7.0, abs=0.1)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["specdec", "train-draft", *arguments])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_command_with_prompts_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny(
        tmp_path / "m", layers=3, vocab=256, tokenizer="bytes", chat_template=CHATML, eos=7
    )
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"question": "One?"}\n{"turns": ["Two?", "Three?"]}\n', encoding="utf-8")
    out = tmp_path / "out"
    sizes = "--tokens 900 --seq-len 256 --batch-tokens 256 --max-answer-tokens 24 --steps 3"
    options = [*sizes.split(), "--data", str(data), "--device", "cpu", "--num-seqs", "4"]
    assert (
        call(monkeypatch, str(model), "--out", str(out), *options, "--no-plot", "--layers", "0,1,2")
        == 0
    )
    output = capsys.readouterr()
    assert output.out == f"{out}\n"
    assert "tok/step" in output.err
    assert read_json(out / "train_report.json")["settings"]["data"] == str(data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--out"),
        (["--out", "{new}", "--tokens", "0"], "--tokens must be at least 1"),
        (["--out", "{new}", "--head", "both"], "--head must be one of"),
        (["--out", "{new}", "--greedy-share", "1.5"], "--greedy-share must be in [0, 1]"),
        (["--out", "{new}", "--lr", "-1"], "--lr must be positive"),
        (["--out", "{new}", "--time-limit", "0"], "--time-limit must be positive"),
        (["--out", "{new}", "--step-decay", "2"], "--step-decay must be at most 1"),
        (["--out", "{new}", "--seq-len", "100"], "--seq-len must be a multiple of 8"),
        (["--out", "{new}", "--batch-tokens", "1000"], "--batch-tokens (1000)"),
        (["--out", "{new}", "--layers", "a"], "--layers must be three numbers"),
        (
            ["--out", "{new}", "--layers", "0,1,3", "--seq-len", "64"],
            "--layers must be three numbers from 0 to 2",
        ),
        (
            ["--out", "{new}", "--layers", "0,1", "--seq-len", "64"],
            "--layers must be three numbers from 0 to 2",
        ),
        (["--out", "{new}"], "--seq-len (1024) is above the model's context (512)"),
        (["--out", "{new}", "--lora-rank", "4"], "--lora-rank is for a draft model"),
        (["--out", "{new}", "--draft", "x", "--parallel"], "--parallel is for a draft head"),
        (["--out", "{new}", "--seq-len", "64", "--data", "none.jsonl"], "none.jsonl: no such file"),
        (["--out", "{new}", "--resume", "--seq-len", "64"], "holds no run of train-draft"),
        (["--out", "{full}", "--seq-len", "64"], "is not an empty folder"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_loaded(
    bigram: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    monkeypatch.setattr(run_file, "load_target", lambda *_: pytest.fail("a model was loaded"))
    given = [o.format(new=tmp_path / "new", full=tmp_path / "full") for o in options]
    assert call(monkeypatch, str(bigram), "--device", "cpu", *given) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_resuming_with_other_settings_is_refused(
    bigram: Path, trained: tuple[Path, dict[str, Any]]
) -> None:
    out, _ = trained
    with pytest.raises(ValueError, match=r"started with --unroll 3, not 4"):
        train(
            settings(bigram, out, steps=100, save_every=45, unroll=4),
            quiet(),
            resume=True,
            plot=False,
        )
    with pytest.raises(ValueError, match="--resume continues"):
        train(settings(bigram, out, steps=100, save_every=45), quiet(), plot=False)


def test_too_little_text_is_refused(bigram: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too few to train on"):
        train(settings(bigram, tmp_path / "a", time_limit=1e-9), quiet(), plot=False)
