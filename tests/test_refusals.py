"""P6 and P7: what is not supported is refused by name; one bad request never stops the engine."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from harness import PROMPTS, assert_no_leak, cpu_engine, greedy
from oracle import expect, speculate
from tiny import make_tiny

import specdec

REFUSED = (ValueError, TypeError, NotImplementedError)


@pytest.fixture(scope="module")
def engine(engines, models):
    return engines(models["target"], models["blend.1"], 4, uniform_request_counts=[5])


def refuse_request(engine, prompts, params, match):
    """The call fails by name, no step has run, and no block is taken."""
    before = engine.stats().steps_by_mode
    with pytest.raises((ValueError, TypeError), match=match):
        engine.generate(prompts, params() if callable(params) else params)
    assert engine.stats().steps_by_mode == before
    assert_no_leak(engine)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", None),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
        ("stop_token_ids", [128]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("ignore_eos", "yes"),
        ("k", -1),
        ("k", 5),
        ("k", 1.5),
        ("k", "many"),
        ("n", 0),
        ("min_tokens", -1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("repetition_penalty", 0.0),
        ("logit_bias", {128: 1.0}),
        ("logit_bias", {0: math.nan}),
        ("bad_words", [[128]]),
        ("logprobs", -1),
        ("stop", [""]),
        ("stop", 5),
    ],
    ids=lambda value: str(value),
)
def test_a_bad_parameter_is_named(engine, field, value):
    refuse_request(
        engine, PROMPTS[0], lambda: greedy(**({"max_new_tokens": 4} | {field: value})), field
    )


@pytest.mark.parametrize("field", ["best_of", "use_beam_search", "max_tokens", "draft"])
def test_an_unknown_parameter_is_named(field):
    with pytest.raises(TypeError, match=field):
        greedy(4, **{field: 1})


@pytest.mark.parametrize("draft", ["none", "same"])
def test_k_above_the_engine_is_refused_unless_nothing_drafts(engines, models, oracles, draft):
    """draft=None ignores k; otherwise the request's k lies within the engine's."""
    if draft == "none":
        plain = engines(models["target"], None, 4, cudagraph_mode="NONE")
        ids = plain.generate(PROMPTS[0], greedy(4, k=9)).token_ids
        assert ids == oracles["target"].greedy(PROMPTS[0], 4)[0]
        return
    engine = engines(models["target"], models[draft], 2, cudagraph_mode="NONE")
    refuse_request(engine, PROMPTS[0], greedy(4, k=3), r"\bk\b.*2|2.*\bk\b")


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ([[]], "(?i)empty|prompt"),
        ([PROMPTS[0], []], "(?i)empty|prompt"),
        ([[5, 128]], "128"),
        ([[5, -1]], "-1"),
        ([PROMPTS[0], [2**40]], str(2**40)),
        ([[1.5, 2]], "(?i)prompt"),
        ([PROMPTS[0], None], "(?i)prompt"),
        ("some text", "(?i)tokenizer"),
        ([PROMPTS[0], "some text"], "(?i)tokenizer"),
    ],
    ids=[
        "empty",
        "empty-second",
        "above",
        "negative",
        "huge",
        "float",
        "none",
        "str",
        "str-second",
    ],
)
def test_a_bad_prompt_is_named_and_nothing_runs(engine, oracles, prompts, match):
    refuse_request(engine, prompts, greedy(4), match)
    expected = speculate(oracles["target"], oracles["blend.1"], PROMPTS[0], k=4, max_new_tokens=9)
    expect(engine.generate(PROMPTS[0], greedy(9)), expected)


@pytest.mark.parametrize("num_params", [1, 3])
def test_one_set_of_parameters_per_prompt(engine, num_params):
    refuse_request(engine, PROMPTS[:2], [greedy(4)] * num_params, "(?i)param")


def test_parameters_of_another_type(engine):
    refuse_request(engine, PROMPTS[:2], {"max_new_tokens": 4}, "(?i)param")


def test_an_empty_list_is_an_empty_prompt(engine):
    refuse_request(engine, [], greedy(4), "(?i)empty|prompt")


def test_an_unknown_adapter_is_named(engine):
    before = engine.stats().steps_by_mode
    with pytest.raises((ValueError, KeyError, NotImplementedError), match=r"typo|lora"):
        engine.generate(PROMPTS[0], greedy(4), lora="typo")
    assert engine.stats().steps_by_mode == before


def test_abort_of_an_unknown_request_harms_nobody(engine, oracles):
    events = engine.stream(PROMPTS[3], greedy(9))
    ids = list(next(events).token_ids)
    try:
        engine.abort("no-such-request")
    except (KeyError, ValueError) as error:
        assert "no-such-request" in str(error)
    ids += [token for event in events for token in event.token_ids]
    assert ids == oracles["target"].greedy(PROMPTS[3], 9)[0]


def test_a_refused_request_leaves_running_ones_alone(engine, oracles):
    events = engine.stream(PROMPTS[3], greedy(20))
    ids = list(next(events).token_ids)
    for prompt in ([], [999], [1] * 500):
        with pytest.raises(ValueError):
            engine.generate(prompt, greedy(4))
        ids += next(events).token_ids
    ids += [token for event in events for token in event.token_ids]
    assert ids == oracles["target"].greedy(PROMPTS[3], 20)[0]
    assert_no_leak(engine)


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 3.0},
        {"frequency_penalty": 3.0},
        {"repetition_penalty": 2.0},
        {"logit_bias": "best"},
        {"bad_words": "best"},
        {"logprobs": 2},
        {"n": 2},
        {"min_p": 0.999, "temperature": 5.0},
        {"min_tokens": 3},
        {"stop": ["w"]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_parameter_acts_or_is_refused(tmp_path, oracles, fields):
    """P6: a field that is accepted must show in the result; one that is not built is named."""
    folder = make_tiny(tmp_path / "model", seed=1, tokenizer="words")
    prompt = [7] * 12
    plain = oracles["target"].greedy(prompt, 12)[0]
    field = next(iter(fields))
    with cpu_engine(str(folder), None, cudagraph_mode="NONE") as engine:
        best = {"logit_bias": {plain[0]: -100.0}, "bad_words": [[plain[0]]]}
        values = {**fields, field: best.get(field, fields[field])}
        extra = {"stop_token_ids": [plain[0]]} if field == "min_tokens" else {}
        try:
            out = engine.generate(prompt, greedy(12, **values, **extra))
        except REFUSED as error:
            assert field in str(error)
            return
        if field == "logprobs":
            assert len(out.logprobs) == 12
        elif field == "n":
            assert len(out.choices) == 2
        elif field == "min_p":
            assert out.token_ids == plain
        elif field == "min_tokens":
            assert len(out.token_ids) >= 3
        else:
            assert out.token_ids != plain


BAD_ENGINE_FIELDS = [
    ("k", -1),
    ("k", 2.5),
    ("k", "several"),
    ("dtype", "float3"),
    ("device", "abacus"),
    ("cudagraph_mode", "SOMETIMES"),
    ("attention_backend", "telepathy"),
    ("acceptance", "generous"),
    ("max_num_seqs", 0),
    ("max_num_seqs", 1.5),
    ("max_model_len", 0),
    ("max_model_len", 10_000),
    ("max_num_batched_tokens", 0),
    ("kv_block_size", 0),
    ("kv_block_size", 3),
    ("kv_block_size", 512),
    ("num_kv_blocks", 0),
    ("capture", "sometimes"),
    ("exact", "rather"),
]


@pytest.mark.parametrize(("field", "value"), BAD_ENGINE_FIELDS, ids=lambda value: str(value))
def test_a_bad_engine_argument_is_named(models, field, value):
    with pytest.raises((ValueError, TypeError), match=rf"\b{field}\b"):
        if field == "k":
            cpu_engine(models["target"], models["same"], value)
        else:
            cpu_engine(models["target"], models["same"], 2, **{field: value})


def test_an_unknown_engine_argument_is_named(models):
    with pytest.raises(TypeError, match="tensor_magic"):
        cpu_engine(models["target"], None, tensor_magic=True)


def test_an_unknown_argument_of_generate_is_named(models):
    with pytest.raises((TypeError, ValueError), match="max_tokens"):
        specdec.generate(PROMPTS[0], model=models["target"], draft=None, max_tokens=3)


def test_exact_with_a_backend_that_is_not_batch_invariant_is_refused(models):
    with pytest.raises(ValueError, match=r"(?s)exact.*sdpa|sdpa.*exact"):
        cpu_engine(models["target"], None, attention_backend="sdpa", exact=True)


@pytest.mark.parametrize("missing", ["/no/such/folder", "empty"])
@pytest.mark.parametrize("role", ["model", "draft"])
def test_a_missing_model_is_named(models, tmp_path, missing, role):
    """An absent path, and a folder without a config."""
    path = missing if missing.startswith("/") else str(tmp_path)
    with pytest.raises((ValueError, OSError), match=path):
        cpu_engine(*((path, None) if role == "model" else (models["target"], path)))


@pytest.mark.parametrize("draft", ["ngrams", "layer_skip:", "layer_skip:0", "layer_skip:3", 7])
def test_a_draft_that_means_nothing_is_named(models, draft):
    """The model has two layers: there are no first three."""
    with pytest.raises((ValueError, TypeError, OSError), match=rf"draft|{draft}"):
        cpu_engine(models["target"], draft)


def config_only(folder, models, **changes):
    """A copy with another config and no weights: a refusal must come before they are opened."""
    folder.mkdir()
    config = json.loads((Path(models["target"]) / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("role", ["model", "draft"])
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"architectures": ["OPTForCausalLM"], "model_type": "opt"}, "OPTForCausalLM"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "wobbly", "factor": 2.0}}, "wobbly"),
        ({"rope_parameters": {"rope_type": "wobbly", "rope_theta": 1e4}}, "wobbly"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Custom"}}, "trust_remote_code|auto_map"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_key_value_heads|heads"),
    ],
    ids=["opt", "mamba", "quantized", "window", "rope4", "rope5", "remote-code", "heads-3-2"],
)
def test_an_unsupported_model_is_refused_before_its_weights(tmp_path, models, changes, name, role):
    path = config_only(tmp_path / "model", models, **changes)
    pair = (path, None) if role == "model" else (models["target"], path)
    with pytest.raises(REFUSED, match=name):
        cpu_engine(*pair)


def test_pickle_weights_are_refused(tmp_path, models):
    """The file is not even a pickle: it must not be opened to find out."""
    path = config_only(tmp_path / "model", models)
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"not to be read")
    with pytest.raises((*REFUSED, OSError), match=r"(?i)safetensors|pickle|pytorch_model\.bin"):
        cpu_engine(path)


def test_trust_remote_code_is_refused(models):
    with pytest.raises(REFUSED, match="trust_remote_code"):
        cpu_engine(models["target"], None, trust_remote_code=True)


def test_a_truncated_weight_file_is_named(tmp_path, models):
    folder = tmp_path / "model"
    shutil.copytree(models["target"], folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(Exception, match=r"model\.safetensors"):
        cpu_engine(str(folder))


def test_a_tensor_of_another_shape_is_named(tmp_path):
    folder = make_tiny(tmp_path / "model", seed=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(ValueError, match=r"mlp\.\w+_proj"):
        cpu_engine(str(folder))


def test_cuda_without_a_device_is_refused(models):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)cuda"):
        cpu_engine(models["target"], None, device="cuda")


def test_a_closed_engine_says_so(models):
    engine = cpu_engine(models["target"], None, cudagraph_mode="NONE")
    engine.close()
    engine.close()
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)closed"):
        engine.generate(PROMPTS[0], greedy(2))
