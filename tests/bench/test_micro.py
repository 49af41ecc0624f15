"""The micro-benchmarks run: each once, untimed, so that they cannot rot."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_micro_benchmark_runs() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(
        [*command, str(ROOT / "bench" / "micro"), "--benchmark-disable"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
    assert " failed" not in ran.stdout


def test_make_bench_runs_them() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "pytest bench/micro" in makefile
