"""C22: a draft that lies or computes somewhere else than the target."""

import pytest
import torch
from harness import PROMPTS, cpu_engine, greedy
from paged import load

from specdec import Drafter
from specdec.sources import check_device
from specdec.verifier.attention.sdpa import SdpaBackend
from specdec.verifier.models.llama import CausalLM


def elsewhere(model):
    """The same model without memory: a device that every machine has beside its CPU."""
    backend = SdpaBackend("cpu")
    return CausalLM(model.config, dtype=model.dtype, device="meta", attention_backend=backend)


@pytest.mark.parametrize("field", ["model", "draft"])
def test_a_loaded_model_on_another_device_is_refused(models, field):
    target = load(models["target"])
    pair = {"model": target, "draft": target} | {field: elsewhere(target)}
    with pytest.raises(ValueError, match=rf"^{field}: its weights are on meta, .* device is cpu"):
        cpu_engine(pair["model"], pair["draft"], 3)
    with cpu_engine(target, load(models["target"]), 3) as engine:
        assert engine.generate(PROMPTS[0], greedy(8)).stats.acceptance_rate == 1.0


@pytest.mark.parametrize(
    ("own", "asked", "fits"),
    [
        ("cuda:0", "cuda", True),
        ("cuda:1", "cuda:1", True),
        ("cuda:1", "cuda:0", False),
        ("cpu", "cuda", False),
        ("cuda:0", "cpu", False),
        ("cpu", "cpu", True),
    ],
)
def test_which_devices_are_the_same(models, monkeypatch, own, asked, fits):
    model = load(models["target"])
    monkeypatch.setattr(CausalLM, "device", torch.device(own))
    if fits:
        check_device("draft", model, torch.device(asked))
    else:
        with pytest.raises(ValueError, match=f"on {own}, the engine's device is {asked}"):
            check_device("draft", model, torch.device(asked))


class OnTheHost(Drafter):
    """Proposes tensors of the CPU, whatever the target is on: the last token again and again."""

    name = "on the host"

    def propose(self, state, k):
        lengths = state.seq_lens.tolist()
        texts = state.tokens.tolist()
        last = [text[max(length - 1, 0)] for text, length in zip(texts, lengths, strict=True)]
        return torch.tensor(last, dtype=torch.int32)[:, None].expand(-1, k)


PROCESSED = {"min_tokens": 6, "stop_token_ids": [7, 11], "logit_bias": {7: 2.0, 90: 3.0}}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_drafter_on_the_cpu_changes_no_text(models, device):
    """With a list of ends, a least length and biases, on graphs."""
    params = [greedy(20, **PROCESSED), greedy(20, temperature=0.9, seed=3, **PROCESSED)] * 2
    texts = []
    for draft in (None, OnTheHost()):
        with cpu_engine(models["target"], draft, 3, device=device, dtype="float32") as engine:
            texts.append([out.token_ids for out in engine.generate(PROMPTS[:4], params)])
            decodes = [r for r in engine.recent_steps(100) if r.descriptor.uniform]
            assert decodes and {r.mode for r in decodes} == {"FULL"}
    assert texts[0] == texts[1]


@pytest.mark.gpu
def test_a_draft_model_on_the_cpu_is_refused_beside_a_target_on_a_gpu(models):
    draft = load(models["target"])
    with pytest.raises(ValueError, match=r"draft: its weights are on cpu, .* device is cuda"):
        cpu_engine(models["target"], draft, 3, device="cuda")
