"""The benchmark on a tiny model: every number can be recomputed, and nothing is left out."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny import make_tiny

import specdec
from specdec.bench import plot, prompts, report, sweep
from specdec.bench.command import parse_numbers
from specdec.outputs import GenerationStats, StreamEvent
from specdec.timed import TimedText

ROOT = Path(__file__).resolve().parents[1]
KS = (0, 1, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    return str(make_tiny(folder, vocab=256, tokenizer="bytes", max_position=2048))


@pytest.fixture(scope="module")
def result(model: str) -> dict[str, Any]:
    """Every draft is accepted, since the drafter is the target itself."""
    settings = sweep.Settings(
        model=model, draft=model, ks=KS, num_reqs=(1, 3), num_prompts=4, max_new_tokens=16,
        device="cpu", ignore_eos=True,
    )  # fmt: skip
    return sweep.run_sweep(settings)


def rendered(table: Any) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_every_point_is_there_and_plain_decoding_is_the_baseline(result: dict[str, Any]) -> None:
    assert [(p["num_reqs"], p["k"]) for p in result["points"]] == [
        (num_reqs, k) for num_reqs in (1, 3) for k in KS
    ]
    for points in report.points_by_num_reqs(result).values():
        plain = points[0]
        assert plain["k"] == 0
        assert plain["drafted"] == 0
        assert plain["speedup"] == 1.0
        assert plain["mean_tokens_per_step"] == 1.0
        for point in points:
            ratio = point["tokens_per_second_per_user"] / plain["tokens_per_second_per_user"]
            assert point["speedup"] == pytest.approx(ratio)
            assert point["texts_equal_to_k0"] == point["texts"]


def test_counts_are_tokens_and_add_up(result: dict[str, Any]) -> None:
    """4 prompts; 3 side by side make two waves of 3, the second filled up from the front."""
    for point in result["points"]:
        texts = 4 if point["num_reqs"] == 1 else 6
        assert point["texts"] == texts
        assert point["tokens"] == texts * 16
        # The first token of a text comes from its prefill.
        assert point["committed_by_steps"] == texts * 15
        assert point["committed_by_steps"] == point["steps"] + point["accepted"]
        assert point["accepted"] == point["drafted"]
        assert sum(point["drafted_by_position"]) == point["drafted"]
        assert sum(point["accepted_by_position"]) == point["accepted"]
        assert point["acceptance_by_position"] == [1.0] * point["k"]
        parts = point["by_category"].values()
        for name in ("texts", "tokens", "steps", "drafted", "accepted"):
            assert sum(part[name] for part in parts) == point[name]
    # All drafts accepted: 15 tokens in steps of up to 1 + k.
    steps = {p["k"]: p["steps"] for p in result["points"] if p["num_reqs"] == 1}
    assert steps == {0: 60, 1: 32, 3: 16}


def test_times_are_of_decode_steps_and_start_up_stands_apart(result: dict[str, Any]) -> None:
    for point in result["points"]:
        per_token = point["ms_per_token"]
        assert 0 < per_token["p50"] <= per_token["p95"]
        assert point["ttft_ms"]["p50"] > 0
        speed = point["tokens_per_second_per_user"]
        assert speed == pytest.approx(1e3 / per_token["mean"])
        decode_seconds = point["ms_per_step"] * point["steps"] / 1e3
        # Each of up to num_reqs texts at a time lies within the time of its wave.
        assert decode_seconds <= point["seconds"] * point["num_reqs"]
        assert point["tokens_per_second"] == pytest.approx(point["tokens"] / point["seconds"])
        assert set(point["decode_steps_by_mode"]) == {"FULL"}
        assert point["reasons_not_full"] == {}
    startup = result["startup"]
    assert 0 < startup["capture_seconds"] < startup["build_seconds"]
    assert startup["num_graphs"] > 0
    assert startup["warmup_seconds"] > 0


def test_what_a_number_belongs_to_is_recorded(result: dict[str, Any]) -> None:
    assert result["benchmark"] == "acceptance_vs_latency"
    assert result["schema_version"] == 1
    assert result["versions"]["specdec"] == specdec.__version__
    assert {"torch", "python", "triton", "cuda"} <= set(result["versions"])
    assert result["device"]["type"] == "cpu"
    assert result["model"]["dtype"] == "float32"
    settings = result["settings"]
    assert settings["temperature"] == 0.0
    assert settings["ks"] == list(KS)
    assert settings["num_prompts"] == 4
    assert {"seed", "top_k", "top_p", "dtype", "max_new_tokens", "ignore_eos"} <= set(settings)
    assert result["command"]
    assert "commit" in result


def test_a_report_survives_its_file(result: dict[str, Any], tmp_path: Path) -> None:
    path = report.write_report(result, tmp_path / "new" / "folder")
    assert path.name == "acceptance_vs_latency-tiny-tiny-cpu.json"
    assert report.read_report(path) == json.loads(json.dumps(result))
    path.write_text(json.dumps(result | {"schema_version": 99}))
    with pytest.raises(ValueError, match=path.name):
        report.read_report(path)


def test_the_tables_agree_with_the_file(result: dict[str, Any], tmp_path: Path) -> None:
    read = report.read_report(report.write_report(result, tmp_path))
    tables = report.latency_tables(read)
    assert len(tables) == 2
    for table, points in zip(tables, report.points_by_num_reqs(read).values(), strict=True):
        rows = [line.split() for line in rendered(table).splitlines()]
        rows = [words for words in rows if len(words) == len(report.COLUMNS)]
        for row, point in zip(rows, points, strict=True):
            assert row == report.cells(point)
            assert row[1] == f"{point['mean_tokens_per_step']:.2f}"
            assert row[7] == f"{point['speedup']:.2f}x"
            assert row[11] == f"{point['texts']}/{point['texts']}"
    positions = rendered(report.position_table(read)).splitlines()
    assert positions[-1].split() == ["3", "100%", "100%", "100%"]
    categories = {name for point in read["points"] for name in point["by_category"]}
    shown = rendered(report.category_table(read))
    assert all(name in shown for name in categories)
    document = report.markdown(read, "some/file.json")
    assert "some/file.json" in document
    assert document.count("| 100% |") == 4  # two numbers of requests, two k above 0


def test_a_slow_down_and_a_changed_text_are_shown_as_plainly_as_a_gain(
    result: dict[str, Any],
) -> None:
    slow = json.loads(json.dumps(result))
    slow["points"][1]["speedup"] = 0.4321
    slow["points"][2]["texts_equal_to_k0"] = 1
    table = report.latency_tables(slow)[0]
    assert "0.43x" in rendered(table)
    assert "[red]0.43x[/red]" in list(table.columns[7].cells)
    assert "[bold red]1/4[/bold red]" in list(table.columns[11].cells)
    assert "0.43x" in report.markdown(slow, "x.json")
    assert "1/4" in report.markdown(slow, "x.json")


def test_sampled_texts_with_seeds_do_not_depend_on_k(model: str) -> None:
    settings = sweep.Settings(
        model=model, draft="ngram", ks=(2,), num_reqs=(2,), num_prompts=2, max_new_tokens=8,
        temperature=1.0, seed=5, device="cpu",
    )  # fmt: skip
    lines: list[str] = []
    got = sweep.run_sweep(settings, progress=lines.append)
    assert [p["k"] for p in got["points"]] == [0, 2]
    assert all(p["texts_equal_to_k0"] == p["texts"] == 2 for p in got["points"])
    assert "temperature 1" in report.caption(got)
    assert report.report_name(got).endswith("-t1")
    assert lines


def test_without_a_drafter_there_is_plain_decoding_alone(model: str) -> None:
    with pytest.raises(ValueError, match="ks"):
        sweep.Settings(model=model, draft=None, ks=(0, 2))
    settings = sweep.Settings(
        model=model, draft=None, ks=(0,), num_prompts=1, max_new_tokens=4, device="cpu"
    )
    (point,) = sweep.run_sweep(settings)["points"]
    assert point["steps"] == 3
    assert point["acceptance_by_position"] == []


def test_the_script_writes_table_file_and_plot(model: str, tmp_path: Path) -> None:
    command = [
        sys.executable, str(ROOT / "bench" / "acceptance_vs_latency.py"), "--model", model,
        "--draft", "layer_skip:1", "--k", "0,2", "--num-prompts", "2", "--max-new-tokens", "6",
        "--device", "cpu", "--out", str(tmp_path), "--name", "my model", "--commit", "abc",
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ran.returncode == 0, ran.stderr
    (path,) = tmp_path.glob("*.json")
    written = report.read_report(path)
    assert written["commit"] == "abc"
    assert written["model"]["name"] == "my model"
    assert "acceptance_vs_latency.py --model" in written["command"]
    for point in written["points"]:
        assert " ".join(report.cells(point)[:3]) in " ".join(ran.stdout.split())
    image = path.with_suffix(".png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 10_000


def test_a_machine_without_matplotlib_gets_everything_but_the_plot(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from specdec.bench import command

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError):
        plot.plot_report(result, tmp_path / "x.png")
    command.save(result, str(tmp_path))
    assert "no plot" in capsys.readouterr().err
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_tokens_are_counted_and_not_events() -> None:
    """A step that brings four tokens is one event: counting events would give 2, not 5."""
    from specdec import timed

    text = TimedText(prompt_tokens=3, stats=GenerationStats())
    timed._add(text, StreamEvent("r", 0, "a", [1]), 0.5)
    timed._add(text, StreamEvent("r", 0, "bcde", [2, 3, 4, 5], "length"), 0.9)
    assert len(text.token_ids) == 5
    assert text.decode_tokens == 4
    assert text.decode_seconds == pytest.approx(0.4)
    assert text.first_token == 0.5
    assert text.finish_reason == "length"


def test_the_shipped_prompts_are_a_few_of_each_kind() -> None:
    shipped = prompts.load_prompts()
    counts = Counter(prompt.category for prompt in shipped)
    assert set(counts) == {"chat", "qa", "math", "summarization", "code", "translation"}
    assert set(counts.values()) == {4}
    assert len({prompt.id for prompt in shipped}) == len(shipped)
    assert len({prompt.text for prompt in shipped}) == len(shipped)


def test_few_prompts_are_taken_from_all_categories() -> None:
    chosen = prompts.spread(prompts.load_prompts(), 8)
    counts = Counter(prompt.category for prompt in chosen)
    assert len(counts) == 6
    assert max(counts.values()) == 2
    with pytest.raises(ValueError, match="num_prompts"):
        prompts.spread(chosen, 0)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "holds no prompt"),
        ('{"id": 1, "category": "a", "turns": ["x"]}\nnot json', "line 2: not JSON"),
        ('{"id": 1, "category": "a"}', "line 1: turns"),
        ('{"id": 1, "turns": []}', "line 1: turns"),
        ('{"id": 1, "turns": [3]}', "line 1: turns"),
        ("[1, 2]", "line 1: expected an object"),
    ],
)
def test_a_bad_prompt_file_is_named_with_its_line(content: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"mine.jsonl.*{named}"):
        prompts.load_prompts(path)


def test_prompt_files_of_both_kinds_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"id": 7, "category": "a", "sub": null, "turns": ["first", "second"]}\n\n'
        '{"question_id": 8, "turns": ["third"]}\n'
    )
    assert prompts.load_prompts(path) == [
        prompts.Prompt(id="7", category="a", text="first"),
        prompts.Prompt(id="8", category="all", text="third"),
    ]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0..3", (0, 1, 2, 3)), ("4", (4,)), ("8,1,3", (1, 3, 8)), ("0,2..4", (0, 2, 3, 4))],
)
def test_lists_of_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_numbers("--k", text) == numbers


@pytest.mark.parametrize("text", ["", "a", "1,", "-1", "1..", "1.5"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--k"):
        parse_numbers("--k", text)
