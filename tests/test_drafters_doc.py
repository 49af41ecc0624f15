"""docs/drafters.md: its example runs as it stands, and is as short as it says."""

import re
from pathlib import Path

import pytest

DOC = (Path(__file__).resolve().parents[1] / "docs" / "drafters.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)


@pytest.mark.smollm2
@pytest.mark.slow
def test_the_example_runs_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLE, "drafters.md", "exec"), {})
    first, second = re.findall(r"drafted=(\d+) accepted=(\d+)", capsys.readouterr().out)
    assert first == ("0", "0")
    assert int(second[1]) > 0


def test_the_example_is_thirty_lines() -> None:
    code = [line for line in EXAMPLE.splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 30


def test_the_files_and_names_it_speaks_of_exist() -> None:
    import specdec

    root = Path(__file__).resolve().parents[1]
    for name in re.findall(r"`((?:drafters|bench|docs)/[\w./-]+)`", DOC):
        assert (root / name).exists(), name
    for name in ("propose", "propose_after", "prefill", "advance", "catch_up", "learn", "refresh"):
        assert callable(getattr(specdec.Drafter, name)), name
