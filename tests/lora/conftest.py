"""Three adapters of TINY of different ranks, and an oracle for each and for the base."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from adapters import merged, write_adapter
from oracle import speculate

FORMS = {
    "a": {"r": 8, "lora_alpha": 16},
    "b": {"r": 3, "lora_alpha": 9, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "c": {"r": 16, "lora_alpha": 16, "use_rslora": True},
}


@pytest.fixture(scope="session")
def lora(models, oracles, tmp_path_factory) -> SimpleNamespace:
    """``paths`` by name; ``oracles`` by name, None for the base; ``expected``, see below."""
    root = tmp_path_factory.mktemp("adapters")
    base = models["target"]
    paths = {
        name: write_adapter(root / name, base, seed=10 + i, **form)
        for i, (name, form) in enumerate(FORMS.items())
    }
    by_name = {name: merged(base, path) for name, path in paths.items()}
    by_name[None] = oracles["target"]
    skips = {name: merged(base, path, num_layers=1) for name, path in paths.items()}
    skips[None] = oracles["layer_skip:1"]
    makers: dict[str, Callable] = {"layer_skip:1": skips.get}

    def expected(name, draft, prompt, k, max_new_tokens):
        """The text on adapter ``name``, and its counts where ``draft`` is a model's."""
        drafts = makers.get(draft, lambda _: oracles.get(draft))
        return speculate(by_name[name], drafts(name), prompt, k=k, max_new_tokens=max_new_tokens)

    return SimpleNamespace(paths=paths, oracles=by_name, expected=expected)
