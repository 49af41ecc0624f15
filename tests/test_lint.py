"""The linter, the formatter and the type checker, as tests."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAPPED = ("drafters", "verifier", "kernels")


def run(*command: str, cwd: Path = ROOT) -> str:
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def link_tree() -> Path:
    """Lay ``.typing/specdec``: the package as it is installed, made of links.

    Type checkers do not follow the finder of an editable install, and see the folders of the
    checkout as three other packages.
    """
    tree = ROOT / ".typing" / "specdec"
    tree.mkdir(parents=True, exist_ok=True)
    wanted = {path.name: path for path in (ROOT / "specdec").iterdir() if path.name[0] != "_"}
    wanted |= {name: ROOT / name for name in MAPPED}
    wanted["__init__.py"] = ROOT / "specdec" / "__init__.py"
    wanted["__main__.py"] = ROOT / "specdec" / "__main__.py"
    for link in tree.iterdir():
        if link.name not in wanted or link.resolve() != wanted[link.name]:
            link.unlink()
    for name, target in wanted.items():
        if not (tree / name).is_symlink():
            (tree / name).symlink_to(target)
    return tree.parent


def test_ruff_check() -> None:
    run("ruff", "check", ".")


def test_ruff_format() -> None:
    run("ruff", "format", "--check", ".")


def test_mypy() -> None:
    config = str(ROOT / "pyproject.toml")
    output = run("mypy", "--config-file", config, "-p", "specdec", cwd=link_tree())
    num_files = sum(len(list((ROOT / name).rglob("*.py"))) for name in ("specdec", *MAPPED))
    found = re.search(r"no issues found in (\d+) source files", output)
    # Folders of data alone count as sources too.
    assert found is not None and int(found[1]) >= num_files
