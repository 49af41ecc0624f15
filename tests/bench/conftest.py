"""One sweep over a tiny model, shared by the tests of the benchmark."""

from typing import Any

import pytest
from tiny import make_tiny

KS = (0, 1, 3, "auto")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    return str(make_tiny(folder, vocab=256, tokenizer="bytes", max_position=2048))


@pytest.fixture(scope="session")
def result(model: str) -> dict[str, Any]:
    """Every draft is accepted, since the drafter is the target itself; once at a simulated rate."""
    from specdec.bench import sweep
    from specdec.bench.settings import Settings

    settings = Settings(
        model=model, drafts=(model,), ks=KS, num_reqs=(1, 3), num_prompts=4, max_new_tokens=16,
        device="cpu", ignore_eos=True, simulate=((0.5,),),
    )  # fmt: skip
    return sweep.run_sweep(settings)


@pytest.fixture(scope="session")
def real(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The points whose acceptance is not simulated."""
    return [point for point in result["points"] if point["simulated"] is None]
