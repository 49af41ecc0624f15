"""A report in words, tables, plots and a page: it agrees with its file and hides nothing."""

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specdec.bench import html, plot, report, tables

ROOT = Path(__file__).resolve().parents[2]


def rendered(table: Any) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def changed_copy(result: dict[str, Any]) -> dict[str, Any]:
    """One point slower than k=0, another whose texts differ."""
    made = json.loads(json.dumps(result))
    made["points"][1]["speedup"] = 0.4321
    made["points"][2]["texts_equal_to_k0"] = 1
    return made


def test_a_report_survives_its_file(result: dict[str, Any], tmp_path: Path) -> None:
    path = report.write_report(result, tmp_path / "new" / "folder")
    assert path.name == "acceptance_vs_latency-tiny-tiny-cpu.json"
    assert report.read_report(path) == json.loads(json.dumps(result))
    path.write_text(json.dumps(result | {"schema_version": 1}))
    with pytest.raises(ValueError, match=path.name):
        report.read_report(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=path.name):
        report.read_report(path)


def test_the_tables_agree_with_the_file(result: dict[str, Any], tmp_path: Path) -> None:
    read = report.read_report(report.write_report(result, tmp_path))
    made = tables.latency_tables(read)
    assert len(made) == 4
    for table, points in zip(made, report.groups(read).values(), strict=True):
        rows = [line.split() for line in rendered(table).splitlines()]
        rows = [words for words in rows if words and words[0] in {"0", "1", "3", "auto"}]
        for row, point in zip(rows, points, strict=True):
            assert row == report.cells(point)
            assert row[1] == f"{point['mean_tokens_per_step']:.2f}"
            assert row[report.SPEEDUP] == f"{point['speedup']:.2f}x"
    positions = rendered(tables.position_table(read))
    assert "tiny, k=3" in positions
    assert len(re.findall(r"^ +[123] +100 \(\d+-100\)", positions, re.MULTILINE)) == 3
    categories = {name for point in read["points"] for name in point["by_category"]}
    shown = rendered(tables.category_table(read))
    assert all(name in shown for name in categories)
    parts = rendered(tables.part_tables(read)[0])
    for point in read["points"][:3]:
        assert report.digits(point["parts_ms"]["verify"]) in parts
    document = report.markdown(read, "some/file.json")
    assert "some/file.json" in document
    # Two numbers of requests and two k at least; what "auto" drafts depends on the machine.
    accepted = [p for p in read["points"] if p["drafted"] and p["acceptance_rate"] == 1]
    assert document.count("| 100% |") == len(accepted) >= 4


def test_tables_fit_a_terminal_of_eighty_columns(result: dict[str, Any]) -> None:
    console = Console(width=80)
    with console.capture() as capture:
        for table in tables.latency_tables(result):
            console.print(table)
    assert "…" not in capture.get()


def test_a_slow_down_and_a_changed_text_are_shown_as_plainly_as_a_gain(
    result: dict[str, Any], tmp_path: Path
) -> None:
    slow = changed_copy(result)
    table = tables.latency_tables(slow)[0]
    assert "[red]0.43x[/red]" in list(table.columns[report.SPEEDUP].cells)
    assert "[bold red]1/4[/bold red]" in list(table.columns[report.SAME].cells)
    assert "0.43x" in report.markdown(slow, "x.json")
    assert "1/4" in report.markdown(slow, "x.json")
    page = html.html_report(slow, {})
    assert re.search(r'class="slower">0\.43x', page)
    assert re.search(r'class="wrong">1/4', page)
    (line,) = report.differing(slow)
    assert f'<p class="alarm">{line}</p>' in page
    assert "3 of 4 texts differ" in line
    assert "is the same as without drafts" not in page
    assert "is the same as without drafts" in html.html_report(result, {})


def test_a_peer_that_writes_another_text_is_a_red_line(result: dict[str, Any]) -> None:
    peer = {
        "peer": "other", "version": "1", "method": "assisted", "k": 3, "texts": 4,
        "texts_equal_to_k0": 2, "tokens": 60, "tokens_per_second": 10.0,
        "decode_tokens_per_second": 12.0, "versus_specdec": 0.5,
    }  # fmt: skip
    with_peer = result | {"peers": [peer]}
    (line,) = report.differing(with_peer)
    assert line.startswith("other, assisted, k=3: 2 of 4 texts differ")
    assert f'<p class="alarm">{line}</p>' in html.html_report(with_peer, {})
    assert "[bold red]2/4[/bold red]" in list(tables.peer_table(with_peer).columns[-1].cells)


def test_a_text_that_failed_is_a_red_line(result: dict[str, Any]) -> None:
    """Fault: a text that the engine ended with an error was measured like any other."""
    failed = json.loads(json.dumps(result))
    failed["points"][1]["errors"] = ["a logit was [not] finite", "x"]
    (line,) = report.differing(failed)
    assert "k=1: 2 of 4 texts ended with an error" in line
    assert f'<p class="alarm">{line}</p>' in html.html_report(failed, {})


def test_no_panel_is_left_out(result: dict[str, Any]) -> None:
    """Fault: of more than four numbers of requests, lengths and temperatures four were drawn."""
    from matplotlib import pyplot

    many = json.loads(json.dumps(result))
    points = many["points"][:4]
    many["points"] = [point | {"num_reqs": n} for n in (1, 2, 4, 8, 16, 32) for point in points]
    figure = plot._latency(many, pyplot)
    titles = [axis.get_title() for axis in figure.axes]
    pyplot.close(figure)
    assert titles == ["1 request"] + [f"{n} requests" for n in (2, 4, 8, 16, 32)]


def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """Fault: the file was written last, so that a whole sweep was lost."""
    from specdec.bench import command

    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--out .*file"):
        command.bench("no-such-model", out=str(tmp_path / "file" / "x"), device="cpu")
    with pytest.raises(ValueError, match="max_new_tokens"):
        command.bench("no-such-model", out=str(tmp_path), max_new_tokens=0, device="cpu")


def test_the_page_stands_alone(result: dict[str, Any], tmp_path: Path) -> None:
    """Plots inline, nothing fetched, every point there, simulated ones marked."""
    plots = plot.plot_report(result, tmp_path / "name")
    page = html.html_report(result, plots)
    assert set(plots) == set(plot.PLOTS)
    for path in plots.values():
        image = path.read_bytes()
        assert image.startswith(b"\x89PNG")
        assert len(image) > 10_000
        assert base64.b64encode(image).decode() in page
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert "http" not in page
    for title, points in report.groups(result).items():
        assert title in page
        for point in points:
            for name in ("ms_per_token", "ms_between_tokens", "ttft_ms"):
                for share in ("p50", "p95", "p99"):
                    assert f">{report.digits(point[name][share])}<" in page
    assert "acceptance is drawn at a given rate" in page
    assert result["command"].split()[0] in page


def test_a_machine_without_matplotlib_gets_everything_but_the_plots(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from specdec.bench import command

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command.save(result, str(tmp_path))
    said = capsys.readouterr().err
    assert "no plots" in said and "[bench]" in said and "pip install" in said
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".html", ".json"]


def test_the_script_writes_table_files_plots_and_page(model: str, tmp_path: Path) -> None:
    command = [
        sys.executable, str(ROOT / "bench" / "acceptance_vs_latency.py"), "--model", model,
        "--draft", "layer_skip:1", "--k", "0,2", "--num-reqs", "1", "--num-prompts", "2",
        "--max-new-tokens", "6", "--device", "cpu", "--out", str(tmp_path), "--name", "my model",
        "--commit", "abc",
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
    assert len(list(tmp_path.glob("*.png"))) == 3
    assert path.with_suffix(".html").is_file()
