"""Who may import whom, by reading the sources: kernels <- verifier <- drafters <- specdec."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A layer may import itself and what stands before it.
LAYERS = ["kernels", "verifier", "drafters", "specdec"]
MAX_LINES = 400
SOURCES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
SCRIPTS = [path for folder in ("tests", "bench") for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[int, int, str]]:
    """Every name a file imports, inside functions too: line, level (0 = absolute), dotted name."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, 0, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, node.level, f"{node.module or ''}.{alias.name}"


def layer_of(module: str) -> str | None:
    """The layer that a dotted name belongs to; None for other people's modules."""
    parts = module.split(".")
    if parts[0] != "specdec":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "specdec"


def upward_imports(path: Path, layer: str) -> list[str]:
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    found = []
    for line, _, module in imports(path):
        target = layer_of(module)
        if target is not None and target not in allowed:
            found.append(f"line {line}: {module}")
    return found


def test_the_tree_was_found() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(LAYERS)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    assert upward_imports(path, layer) == []


@pytest.mark.parametrize("path", SOURCES + SCRIPTS, ids=name_of)
def test_imports_are_absolute_and_through_specdec(path: Path) -> None:
    for line, level, module in imports(path):
        assert level == 0, f"line {line}: relative import"
        assert module.split(".")[0] not in {"kernels", "drafters", "verifier"}, f"line {line}"


@pytest.mark.parametrize("path", SOURCES + SCRIPTS, ids=name_of)
def test_no_file_is_too_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("layer", "statement", "wrong"),
    [
        ("kernels", "from specdec.verifier.modes import X", True),
        ("kernels", "from specdec import verifier", True),
        ("kernels", "from specdec import Engine", True),
        ("kernels", "import specdec.engine", True),
        ("kernels", "import specdec", True),
        ("kernels", "def f():\n    from specdec.drafters.base import Drafter", True),
        ("verifier", "from specdec.drafters.base import Drafter", True),
        ("verifier", "from specdec.kernels.norm import rms_norm", False),
        ("drafters", "from specdec.engine import Engine", True),
        ("drafters", "from specdec import verifier", False),
        ("specdec", "from specdec.drafters.base import Drafter", False),
        ("kernels", "import torch", False),
    ],
)
def test_the_check_sees_a_planted_fault(
    layer: str, statement: str, wrong: bool, tmp_path: Path
) -> None:
    path = tmp_path / "module.py"
    path.write_text(statement)
    assert bool(upward_imports(path, layer)) == wrong
