"""What the README says is so: its code runs, its commands, files and numbers exist."""

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from specdec.cli import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
SHELL = "".join(body for kind, body in BLOCKS if kind == "sh")
SHELL_LINES = [line.split("#")[0].strip() for line in SHELL.splitlines()]


@pytest.mark.smollm2
@pytest.mark.slow
def test_the_code_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    bodies = [body for kind, body in BLOCKS if kind == "python"]
    assert len(bodies) == 3
    for body in bodies:
        exec(compile(body, "README.md", "exec"), scope)
    printed = capsys.readouterr().out
    first = scope["out"]
    assert first.text in printed  # type: ignore[attr-defined]
    assert first.stats.steps > 0  # type: ignore[attr-defined]
    assert "'FULL': " in printed
    assert printed.count("mean_tokens_per_step") == 2


def test_the_first_example_is_six_lines() -> None:
    first = next(body for kind, body in BLOCKS if kind == "python")
    assert len([line for line in first.splitlines() if line.strip()]) <= 6


@pytest.mark.parametrize("line", [line for line in SHELL_LINES if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    target = line.split()[1]
    dry = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert dry.returncode == 0, dry.stderr


@pytest.mark.parametrize("line", [line for line in SHELL_LINES if "specdec " in line])
def test_the_command_lines_are_understood(line: str) -> None:
    """Parsed by the program's own parser, but not run."""
    words = shlex.split(line[line.index("specdec ") :])
    command = typer.main.get_command(app).commands[words[1]]  # type: ignore[attr-defined]
    assert command.make_context(words[1], words[2:]).params


def test_what_the_commands_need_is_installed_before_them() -> None:
    """Fault: after ``make demo`` no command was found, and ``serve`` lacked its packages."""
    activated = SHELL_LINES.index(". .venv/bin/activate")
    first = next(i for i, line in enumerate(SHELL_LINES) if line.startswith(("specdec ", "pip ")))
    assert SHELL_LINES.index("make demo") < activated < first
    served = next(i for i, line in enumerate(SHELL_LINES) if line.startswith("specdec serve"))
    assert any("serve" in line for line in SHELL_LINES[:served] if line.startswith("pip install"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in set(extras["optional-dependencies"]) - {"test"}:
        assert re.search(rf"`{extra}` \(", README), extra


def test_the_files_it_names_exist() -> None:
    named = set(re.findall(r"`([\w./-]+\.(?:py|jsonl|txt|json)|\w+/|LICENSE|Makefile)`", README))
    assert len(named) > 15
    for name in named:
        assert (ROOT / name).exists(), name


def test_the_names_it_uses_exist() -> None:
    import specdec
    import specdec.verifier

    for name in set(re.findall(r"specdec\.([A-Za-z]\w*)", README)) - {"py"}:
        assert name in specdec.__all__ or (ROOT / name).is_dir(), name
    for name in ("BatchDescriptor", "CudagraphDispatcher", "CUDAGraphWrapper"):
        assert name in README
        assert name in specdec.verifier.__all__
    for mode in re.findall(r"`(FULL\w*|NONE|PIECEWISE)`", README):
        assert mode in specdec.CUDAGraphMode.__members__


def test_nothing_tells_people_to_install_another_project() -> None:
    for path in [ROOT / "README.md", *ROOT.glob("specdec/**/*.py")]:
        text = path.read_text(encoding="utf-8")
        wrong = re.search(r"pip3? install ([^`\n]* )?(specdec|drafters|kernels)\b(?!-)", text)
        assert wrong is None, path


def test_the_tables_are_those_of_the_recorded_results() -> None:
    script = ROOT / "bench" / "readme_tables.py"
    check = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr
    assert README.count("<!-- table: bench/results/") == README.count("<!-- end of table -->") >= 1
    assert "against k=0" in README


def test_the_plots_are_those_of_the_recorded_results() -> None:
    """A plot carries the digest of the points that it shows."""
    from PIL import Image

    from specdec.bench.plot import PLOTS, points_digest
    from specdec.bench.report import read_report

    names = re.findall(r"\((bench/results/[^)]+)-(\w+)\.png\)", README)
    assert len(names) >= 2
    for stem, plot in names:
        assert plot in PLOTS
        digest = points_digest(read_report(ROOT / f"{stem}.json"))
        with Image.open(ROOT / f"{stem}-{plot}.png") as image:
            assert image.info["Source"] == digest, (stem, plot)
    for image in re.findall(r"!\[[^]]+\]\(([^)]+)\)", README):
        assert (ROOT / image).is_file(), image


def test_a_changed_number_would_be_noticed() -> None:
    updated = runpy.run_path(str(ROOT / "bench" / "readme_tables.py"))["updated"]
    assert updated(README) == README
    forged = README.replace("| 1.00x |", "| 9.99x |")
    assert forged != README
    assert updated(forged) == README
