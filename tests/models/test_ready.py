"""Layers with their norms as parts of the projections: which take that way, and the same result."""

import pytest
import torch
from paged import load, logits_of
from tiny import make_tiny

from specdec.kernels import ready_linear
from specdec.verifier.models import decoder
from specdec.verifier.models.decoder import DecoderLayer

IDS = [5, 17, 99, 3, 3, 42, 127, 0, 64, 11, 8, 90, 33, 71, 25, 16]


@pytest.fixture
def taken(monkeypatch):
    """Lets the CPU take that way, by its twins, and counts the layers that did."""
    layers = []
    forward = DecoderLayer.ready_forward

    def counted(self, *args):
        layers.append(self.index)
        return forward(self, *args)

    monkeypatch.setattr(decoder, "is_ready", lambda x, depths: True)
    monkeypatch.setattr(decoder, "is_fused", lambda *_: True)
    monkeypatch.setattr(DecoderLayer, "ready_forward", counted)
    return layers


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_plain_layers_have_the_same_result(family, tmp_path, taken, monkeypatch):
    """With a bias on queries, keys and values too; features after some layers are the same."""
    model = load(make_tiny(tmp_path, family=family))
    logits = logits_of(model, IDS, chunks=[3, 1, 12])
    assert taken == [0, 1] * 3
    monkeypatch.setattr(decoder, "is_ready", lambda x, depths: False)
    assert torch.equal(logits_of(model, IDS, chunks=[3, 1, 12]), logits)
    assert len(taken) == 6


def test_only_behind_norms_in_projections_do_older_keys_stand(tmp_path, taken, monkeypatch):
    """Elsewhere the kernel before attention may be one that writes lengths or such keys."""
    seen = []
    model = load(make_tiny(tmp_path))
    attend = model.attention_backend.forward

    def recorded(query, keys, values, metadata, *rest):
        seen.append(metadata.older_keys_stand)
        return attend(query, keys, values, metadata, *rest)

    monkeypatch.setattr(model.attention_backend, "forward", recorded)
    logits_of(model, IDS)
    monkeypatch.setattr(decoder, "is_ready", lambda x, depths: False)
    logits_of(model, IDS)
    assert seen == [True, True, False, False]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mixtral"])
def test_layers_with_something_between_do_without(family, tmp_path, taken):
    """Norms of heads, norms behind the products, experts."""
    logits_of(load(make_tiny(tmp_path, family=family)), IDS)
    assert not taken


def test_which_rows_are_few_and_which_layers_small(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    def ready(rows, *depths, dtype=torch.bfloat16):
        return ready_linear.is_ready(torch.empty(rows, depths[0], dtype=dtype), depths)

    assert ready(1, 576, 1536) and ready(16, 96, 2048)
    assert not ready(17, 576, 1536)
    assert not ready(1, 576, 4096) and not ready(1, 75)
    assert not ready(1, 576, dtype=torch.float16)
