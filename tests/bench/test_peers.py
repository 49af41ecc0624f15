"""Peers: what is not there is refused with the line that installs it; what is there is compared."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.bench import peers, sweep
from specdec.bench.settings import Settings
from specdec.verifier.attention.select import select_backend
from specdec.verifier.loading import load_model


def test_a_peer_that_is_missing_is_refused_with_the_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name)
    )
    with pytest.raises(ValueError, match=r"--peer vllm is not installed here: pip install vllm"):
        peers.check_peers(["transformers", "vllm"], "ngram")
    with pytest.raises(ValueError, match="--peer must be one of transformers, vllm"):
        peers.check_peers(["tgi"], "ngram")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="flashspec has no drafter like 'ngram'"):
        peers.check_peers(["flashspec"], "ngram")
    with pytest.raises(ValueError, match="transformers has no drafter like 'layer_skip:2'"):
        peers.check_peers(["transformers"], "layer_skip:2")
    # Fault: they were taken for paths of models, and failed after the whole sweep.
    for draft in ("suffix", "mtp", "auto", "eagle:head", "medusa:head", "suffix+some/model"):
        with pytest.raises(ValueError, match="transformers has no drafter like"):
            peers.check_peers(["transformers"], draft)
    for draft in (None, "ngram", "some/eagle", "suffix/model"):
        peers.check_peers(["transformers"], draft)
    with pytest.raises(ValueError, match="temperatures must hold 0"):
        Settings(peers=("transformers",), temperatures=(0.5,))


@pytest.mark.parametrize(("own", "method"), [(False, "prompt lookup"), (True, "assistant_model")])
def test_transformers_runs_the_same_prompts_and_k(model: str, own: bool, method: str) -> None:
    """In float32 both write the same greedy text, with drafts and without."""
    settings = Settings(
        model=model, drafts=(model if own else "ngram",), ks=(0, 2), num_reqs=(1,), num_prompts=2,
        max_new_tokens=8, device="cpu", ignore_eos=True, parts=False, peers=("transformers",),
    )  # fmt: skip
    got = sweep.run_sweep(settings)
    assert [(row["method"], row["k"]) for row in got["peers"]] == [("plain", 0), (method, 2)]
    speeds = {p["k"]: p["tokens_per_second_per_user"] for p in got["points"]}
    for row in got["peers"]:
        assert row["texts"] == row["texts_equal_to_k0"] == 2
        assert row["tokens"] == 16
        assert row["tokens_per_second"] == pytest.approx(16 / row["seconds"])
        ratio = row["decode_tokens_per_second"] / speeds[row["k"]]
        assert row["versus_specdec"] == pytest.approx(ratio)


def test_a_peer_in_this_process_shares_the_weights(model: str) -> None:
    backend = select_backend("auto", head_size=16, dtype=torch.float32, block_size=16, device="cpu")
    ours = load_model(model, attention_backend=backend)
    sizes: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True, "max_model_len": 64}
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    made = []
    for source in (ours, Path(model)):
        task = peers.Task(target=source, draft=None, **where, **sizes)
        peer = peers.TransformersPeer(task)
        made.append(peer.prepare("plain", 0)([5, 6, 7], 8))
        if source is ours:
            shared = peer.model.get_input_embeddings().weight
            assert shared.data_ptr() == ours.embed_tokens.data_ptr()
    assert made[0] == made[1]
    assert len(made[0]) == 8
