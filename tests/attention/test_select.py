"""Which backend serves a model, what is said of the others, and the block size that follows."""

import importlib.util

import pytest
import torch
from harness import cpu_engine

from specdec.verifier.attention import select
from specdec.verifier.attention.select import BACKENDS, choose_backend, default_block_size

LLAMA = {"head_size": 128, "dtype": torch.bfloat16, "block_size": 16}


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        select.importlib.util, "find_spec", lambda name: None if name in packages else find(name)
    )


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer", "triton"])
def test_a_missing_package_is_refused_with_the_line_that_installs_it(monkeypatch, name) -> None:
    without(monkeypatch, "flash_attn", "flashinfer", "triton")
    line = BACKENDS[name].install
    assert line is not None and line.startswith("pip install")
    with pytest.raises(ValueError) as caught:
        choose_backend(name, **LLAMA, device="cuda")
    assert f"attention_backend {name!r}" in str(caught.value)
    assert "is not installed" in str(caught.value) and line in str(caught.value)


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
def test_off_a_gpu_a_missing_package_is_named_too(monkeypatch, name) -> None:
    without(monkeypatch, "flash_attn", "flashinfer")
    with pytest.raises(ValueError, match=r"on CUDA, not on cpu; .* is not installed: pip inst"):
        choose_backend(name, **LLAMA, device="cpu")


def test_auto_says_what_it_took_and_why_not_the_others(monkeypatch) -> None:
    without(monkeypatch, "flash_attn")
    choice = choose_backend("auto", **LLAMA, device="cpu")
    assert choice.backend.name == "sdpa" and choice.asked == "auto"
    others = dict(choice.others)
    assert set(others) == set(BACKENDS) - {"sdpa"}
    assert others["triton"] == "it runs on CUDA, not on cpu"
    assert others["flash_attn"].startswith("flash_attn is not installed: pip install")
    assert others["mla"] == "the model has no latent attention"
    assert str(choice).splitlines()[0] == (
        "attention: sdpa (plain PyTorch: the reference, and the CPU)"
    )
    assert len(str(choice).splitlines()) == len(BACKENDS)


def test_auto_on_a_gpu_falls_back_with_a_warning(monkeypatch, caplog) -> None:
    without(monkeypatch, "triton")
    choice = choose_backend("auto", **LLAMA, device="cuda")
    assert choice.backend.name == "sdpa"
    assert "serving sdpa, not triton: triton is not installed" in caplog.text


def test_latent_models_get_mla_and_nothing_else() -> None:
    latent = {"head_size": 48, "latent_size": 32, "dtype": torch.float32, "block_size": 4}
    choice = choose_backend("auto", **latent, device="cpu")
    assert choice.backend.name == "mla"
    assert dict(choice.others)["flashmla"] == BACKENDS["flashmla"].unavailable
    for name in ("sdpa", "flashmla"):
        with pytest.raises(ValueError, match=f"{name}.*(mla|not been run)"):
            choose_backend(name, **latent, device="cpu")
    with pytest.raises(ValueError, match="sliding window"):
        choose_backend("mla", **latent, device="cpu", sliding_window=4)


def test_block_sizes_follow_the_backend() -> None:
    assert {name: default_block_size(name) for name in ("auto", *BACKENDS)} == {
        "auto": 16,
        "sdpa": 16,
        "triton": 16,
        "mla": 16,
        "flash_attn": 256,
        "flashinfer": 16,
        "flashmla": 16,
    }


def test_the_engine_shows_its_choice(models) -> None:
    engine = cpu_engine(models["target"], None, kv_block_size="auto")
    assert engine.block_size == 16
    assert engine.attention.backend.name == "sdpa"
    assert "not triton: it runs on CUDA" in str(engine.attention)
    engine.close()


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
def test_exact_is_refused_with_packages_that_are_not_invariant(models, monkeypatch, name) -> None:
    """Where the package would serve the model: the refusal is that of ``exact``."""
    backend = choose_backend("sdpa", **LLAMA, device="cpu").backend
    backend.name, backend.batch_invariant = name, False
    monkeypatch.setattr(select, "_try", lambda *_: (backend, ""))
    with pytest.raises(ValueError, match=f"exact=True: attention backend {name!r}"):
        cpu_engine(models["target"], None, attention_backend=name, exact=True)
