"""P6: faults whose message named no field, and values that are nobody's fault and were refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from harness import PROMPTS, assert_no_leak, cpu_engine, greedy
from tiny import make_tiny

import specdec

SURROGATE = "ab\ud800c"


@pytest.fixture(scope="module")
def spelled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spelled") / "model"
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return str(make_tiny(folder, vocab=264, tokenizer="bytes", chat_template=template))


def generate(model, prompt="a", **fields):
    fields = {"draft": "ngram", "device": "cpu", "max_model_len": 64, "capture": "lazy"} | fields
    return specdec.generate(prompt, model=model, max_new_tokens=4, **fields)


@pytest.mark.parametrize("field", ["prompt", "stop", "bad_words"])
def test_half_a_surrogate_pair_is_named(spelled, field):
    """Fault: the tokenizer's "TextInputSequence must be str", which a string is."""
    with cpu_engine(spelled, None) as engine:
        prompt = SURROGATE if field == "prompt" else "a"
        params = greedy(4, **({} if field == "prompt" else {field: [SURROGATE]}))
        with pytest.raises(ValueError, match=f"^{field}: .*character 2.*surrogate"):
            engine.generate(prompt, params)
        assert_no_leak(engine)


@pytest.mark.parametrize("lora", [["a"], 3, {}, "", b"a"], ids=str)
def test_generate_s_lora_is_a_path(spelled, lora):
    """Fault: a list or a number failed inside pathlib, and an empty mapping was taken for none."""
    with pytest.raises(TypeError, match=r"^lora must be"):
        generate(spelled, lora=lora)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([{}], r"prompt\[0\].*role"),
        ([{"role": "user"}], r"prompt\[0\].*content"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], r"prompt\[1\].*role"),
        ([{"role": "user", "content": None}], r"prompt\[0\].*content"),
    ],
    ids=str,
)
def test_a_message_without_its_parts_is_named(spelled, messages, named):
    """Fault: the template wrote nothing for it, and the text began from nothing."""
    with pytest.raises(ValueError, match=named):
        generate(spelled, messages)


@pytest.mark.parametrize("weight_map", [["a"], {}, {"model.norm.weight": 5}, "x", {"a": "../b"}])
def test_a_malformed_index_names_its_file(tmp_path, weight_map):
    folder = make_tiny(tmp_path / "model", shards=2)
    index = {"metadata": {}, "weight_map": weight_map}
    (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json.*weight_map"):
        cpu_engine(str(folder))


class WithProbs(specdec.Drafter):
    name = "with probs"
    capturable = True

    def __init__(self, rows, k, vocab):
        self.more = rows, k, vocab

    def propose(self, state, k):
        rows = state.seq_lens.shape[0]
        more_rows, more_k, more_vocab = self.more
        shape = (rows + more_rows, k + more_k, 128 + more_vocab)
        probs = torch.full(shape, 1 / shape[2], dtype=torch.float32)
        return state.last_token[:, None].expand(-1, k), probs


@pytest.mark.parametrize("more", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, -1)], ids=str)
def test_probabilities_of_a_wrong_shape_are_refused(models, more):
    """Fault: of another vocabulary's size they failed inside a kernel's indexing, or were read."""
    with pytest.raises(ValueError, match=r"'with probs': probabilities must have the shape"):
        cpu_engine(models["target"], WithProbs(*more), 4).generate(PROMPTS[0], greedy(4))
    with cpu_engine(models["target"], WithProbs(0, 0, 0), 4) as engine:
        assert len(engine.generate(PROMPTS[0], greedy(4)).token_ids) == 4


@pytest.mark.parametrize("k", [-1, "x", None, 2.5, 10**9, "auto"], ids=str)
def test_without_a_drafter_k_is_ignored(models, oracles, k):
    with cpu_engine(models["target"], None, k, capture="lazy") as engine:
        ids = engine.generate(PROMPTS[0], greedy(4)).token_ids
        assert ids == oracles["target"].greedy(PROMPTS[0], 4)[0] and engine.k == 0
    with pytest.raises((ValueError, TypeError), match=r"^k must"):
        cpu_engine(models["target"], "ngram", [k])


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        (None, "FULL_AND_PIECEWISE"),
        (0, "NONE"),
        (1, "PIECEWISE"),
        (2, "FULL"),
        ("full", "FULL"),
    ],
    ids=str,
)
def test_a_mode_is_read_as_vllm_reads_it(value, mode):
    from specdec.config import EngineConfig

    config = {"cudagraph_mode": value, "cudagraph_capture_sizes": None}
    fields = EngineConfig(compilation_config=config, cudagraph_capture_sizes=[8])
    assert fields.graph_mode.name == mode and fields.capture_sizes == [8]


@pytest.mark.parametrize("value", [3, -1, True, 1.0, (2, 0), "fullest"], ids=str)
def test_another_mode_is_refused(value):
    from specdec.config import EngineConfig

    with pytest.raises(ValueError, match="cudagraph_mode must be one of"):
        EngineConfig(compilation_config={"cudagraph_mode": value})


def test_a_closed_engine_unloads_nothing(models, tmp_path):
    from adapters import write_adapter

    path = write_adapter(tmp_path / "a", models["target"], seed=1)
    engine = cpu_engine(models["target"], None, lora={"a": path}, capture="lazy")
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.remove_lora("a")
    shutil.rmtree(path)


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
def test_an_end_of_sequence_id_outside_the_vocabulary_is_harmless(tmp_path, mode):
    """Fault: with min_tokens the id was masked in the logits, out of bounds, at every step."""
    model = str(make_tiny(tmp_path / "model", vocab=128, eos=[7, 140]))
    with cpu_engine(model, "ngram", 4, cudagraph_mode=mode) as engine:
        params = [greedy(6, ignore_eos=False, min_tokens=3), greedy(6, ignore_eos=False)]
        held, free = engine.generate([[5, 17, 99], [5, 17, 99]], params)
        assert held.error is None and free.error is None
        assert 7 not in held.token_ids[:3]
        assert_no_leak(engine)


@pytest.mark.parametrize(("field", "value"), [("tensor_parallel", 2), ("tensor_parallel_size", 7)])
def test_more_gpus_than_can_serve_are_refused_by_name(spelled, field, value):
    """C60: what cannot be done must not be dropped, since nobody would start the other ranks."""
    with pytest.raises((ValueError, TypeError), match=field):
        cpu_engine(spelled, None, **{field: value})
    with pytest.raises((ValueError, TypeError), match=field):
        generate(spelled, **{field: value})


INNER = {"cudagraph_mode": "NONE", "cudagraph_capture_sizes": [8]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"cudagraph_mode": "zip", "compilation_config": INNER}, "cudagraph_mode.*zip"),
        ({"cudagraph_mode": "FULL", "compilation_config": INNER}, "FULL.*compilation_config NONE"),
        ({"cudagraph_capture_sizes": [-4], "compilation_config": INNER}, "capture_sizes"),
        (
            {"cudagraph_capture_sizes": [16], "compilation_config": INNER},
            r"\[16\].*compilation_config \[8\]",
        ),
        ({"compilation_config": {"cudagraph_mode": "zip"}}, "compilation_config: .*zip"),
        ({"compilation_config": {"splitting_ops": 5}}, "splitting_ops must be a list.*5"),
        ({"compilation_config": {"splitting_ops": [1]}}, "splitting_ops must be a list"),
        ({"compilation_config": {"splitting_ops": "abc"}}, "splitting_ops must be a list.*abc"),
        ({"compilation_config": {"compile_sizes": True}}, "compile_sizes must be.*True"),
        ({"compilation_config": {1: 2, "a": 3}}, "compilation_config: 1, a not supported"),
        ({"exact": 1}, "exact must be True"),
        ({"async_scheduling": 0}, "async_scheduling must be True"),
    ],
    ids=str,
)
def test_settings_that_are_wrong_or_said_twice(fields, named):
    """Fault: of two that differ one was dropped in silence, unchecked; others failed inside."""
    with pytest.raises((TypeError, ValueError), match=named):
        specdec.Engine("no such folder", device="cpu", **fields)


def test_the_bound_of_extra_k_is_named(spelled):
    with pytest.raises(ValueError, match=r"extra_k \[1, 5\] must not be above k_max, 4"):
        cpu_engine(spelled, "ngram", "auto", k_max=4, extra_k=[1, 5])
