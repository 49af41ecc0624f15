"""``specdec.generate`` keeps engines, and not all that it ever made."""

import pytest
from harness import PROMPTS

import specdec
from specdec import api


@pytest.fixture
def kept(monkeypatch):
    """The engines that are kept, by no other test."""
    engines = {}
    monkeypatch.setattr(api, "_engines", engines)
    yield engines
    for engine in engines.values():
        engine.close()


def test_the_two_engines_used_last_are_kept_and_older_ones_closed(models, kept):
    def engine_of(**fields):
        options = {"model": models["target"], "draft": None, "device": "cpu"} | fields
        specdec.generate(PROMPTS[0], max_new_tokens=2, cudagraph_mode="NONE", **options)
        return list(kept.values())[-1]

    plain, drafted = engine_of(), engine_of(draft="ngram")
    assert plain is not drafted
    # The first one was used last when a third comes.
    assert engine_of() is plain and len(kept) == 2
    third = engine_of(max_num_seqs=2)
    assert list(kept.values()) == [plain, third]
    with pytest.raises(RuntimeError, match="closed"):
        drafted.generate(PROMPTS[0])
    assert engine_of() is plain
    assert engine_of(draft="ngram") is not drafted


def test_an_engine_that_cannot_be_made_leaves_what_is_kept(models, kept):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        specdec.generate("a", model="./nowhere", device="cpu")
    assert not kept
