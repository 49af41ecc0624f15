"""The Triton kernels under Triton's interpreter, each file of ``interpreted/`` in a fresh process.

Whether kernels are interpreted is decided when Triton is imported, for the whole process; here that
must not reach other tests. Float32 only: the interpreter's bfloat16 product is wrong.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent / "interpreted"
FILES = sorted(path.name for path in HERE.glob("interpreted_*.py"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("name", FILES)
def test_interpreted(name) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / name)]
    result = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    assert " skipped" not in result.stdout
