"""The public contract: what is exported, its signatures, defaults, ranges and result fields."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from harness import PROMPTS, cpu_engine, greedy
from tiny import make_tiny

import specdec
from specdec.config import EngineConfig

ONE_RUNG = {"uniform_request_counts": [5]}


def test_exports():
    for name in (
        "generate",
        "Engine",
        "SamplingParams",
        "Generation",
        "Drafter",
        "CUDAGraphMode",
    ):
        assert hasattr(specdec, name)
    verifier = __import__("specdec.verifier", fromlist=["verifier"])
    for name in (
        "BatchDescriptor",
        "CUDAGraphMode",
        "CudagraphDispatcher",
        "CUDAGraphWrapper",
        "AttentionCGSupport",
        "resolve_cudagraph_mode",
        "set_forward_context",
    ):
        assert hasattr(verifier, name)
    assert verifier.CUDAGraphMode is specdec.CUDAGraphMode


@pytest.mark.parametrize("module", ["specdec", "specdec.verifier", "specdec.drafters"])
def test_importing_is_cheap(module):
    """The names are loaded on first use: an import alone brings neither transformers nor triton."""
    script = (
        f"import sys, {module}; heavy = ['torch', 'transformers', 'triton', 'fastapi'];"
        "sys.exit(','.join(name for name in heavy if name in sys.modules) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path("/"), check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_export_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = specdec.no_such_name


def defaults_of(function):
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def test_signature_of_generate():
    parameters = inspect.signature(specdec.generate).parameters
    assert next(iter(parameters)) == "prompt"
    expected = {"model": None, "draft": "auto", "k": 4, "lora": None}
    assert defaults_of(specdec.generate) == expected
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in expected)


def test_signature_of_engine():
    parameters = dict(inspect.signature(specdec.Engine).parameters)
    assert list(parameters)[:3] == ["model", "draft", "k"]
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert all(parameters[name].kind is positional for name in ("model", "draft", "k"))
    assert {name: parameters[name].default for name in ("model", "draft", "k")} == {
        "model": None,
        "draft": None,
        "k": 4,
    }
    fields = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    expected = {
        "dtype": "auto",
        "device": "auto",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "compilation_config": None,
        "cudagraph_capture_sizes": None,
        "attention_backend": "auto",
        "kv_block_size": "auto",
        "num_kv_blocks": None,
        "lora": None,
        "acceptance": "auto",
        "exact": "auto",
    }
    assert {name: fields[name] for name in expected} == expected
    assert {"max_num_seqs", "max_model_len", "max_num_batched_tokens"} <= set(fields)


def test_defaults_of_sampling_params():
    params = specdec.SamplingParams()
    expected = {
        "max_new_tokens": 256,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": None,
        "ignore_eos": False,
        "min_tokens": 0,
        "n": 1,
        "k": None,
    }
    assert {name: getattr(params, name) for name in expected} == expected
    for name in ("presence_penalty", "frequency_penalty"):
        assert getattr(params, name) == 0.0
    assert params.repetition_penalty == 1.0
    for name in ("stop", "stop_token_ids", "logit_bias", "bad_words", "logprobs"):
        assert not getattr(params, name)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": None},
        {"top_k": 0},
        {"top_k": 10**6},
        {"top_p": 1.0},
        {"top_p": 1e-6},
        {"min_p": 0.0},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"temperature": 0},
        {"temperature": 1},
        {"max_new_tokens": 10**9},
        {"stop_token_ids": []},
        {"stop_token_ids": [0, 127]},
        {"k": 0},
        {"k": 2},
        {"k": None},
    ],
    ids=str,
)
def test_values_at_the_edge_of_their_range_are_served(engines, models, fields):
    engine = engines(models["target"], models["same"], 2, max_model_len=16, **ONE_RUNG)
    params = specdec.SamplingParams(**({"max_new_tokens": 3} | fields))
    out = engine.generate(PROMPTS[0], params)
    assert 1 <= len(out.token_ids) <= 12


def test_default_parameters_are_used_without_any(engines, models, oracles):
    """256 new tokens, clipped to the context; greedy."""
    engine = engines(models["target"], models["same"], 2, max_model_len=16, **ONE_RUNG)
    out = engine.generate(PROMPTS[0])
    assert out.token_ids == oracles["target"].greedy(PROMPTS[0], 12)[0]
    assert out.finish_reason == "length"


def test_one_prompt_gives_one_generation_and_a_list_a_list(engines, models):
    engine = engines(models["target"], models["same"], 2, **ONE_RUNG)
    one = engine.generate(PROMPTS[0], greedy(3))
    assert isinstance(one, specdec.Generation)
    several = engine.generate([PROMPTS[0]], greedy(3))
    assert isinstance(several, list) and several[0].token_ids == one.token_ids
    prompts = [PROMPTS[3], PROMPTS[0], PROMPTS[3]]
    outs = engine.generate(prompts, [greedy(5), greedy(3), greedy(1)])
    assert [len(out.token_ids) for out in outs] == [5, 3, 1]
    assert outs[0].token_ids[0] == outs[2].token_ids[0]


def test_fields_of_a_generation(engines, models):
    engine = engines(models["target"], models["same"], 2, **ONE_RUNG)
    out = engine.generate(PROMPTS[0], greedy(6))
    assert isinstance(out.text, str)
    assert isinstance(out.token_ids, list) and all(type(token) is int for token in out.token_ids)
    assert out.finish_reason == "length"
    assert out.prompt_tokens == 4
    assert out.logprobs is None
    assert hasattr(out, "choices")
    stats = out.stats
    assert all(type(n) is int for n in (stats.steps, stats.drafted, stats.accepted))
    assert all(isinstance(x, float) for x in (stats.acceptance_rate, stats.mean_tokens_per_step))
    assert all(type(n) is int for n in [*stats.drafted_per_step, *stats.accepted_per_step])
    assert all(isinstance(x, float) for x in stats.acceptance_by_position)


def test_fields_of_stats_records_and_the_graph_table(engines, models):
    engine = engines(models["target"], models["same"], 2, **ONE_RUNG)
    engine.generate(PROMPTS[0], greedy(6))
    stats = engine.stats()
    assert set(stats.steps_by_mode) == {"FULL", "PIECEWISE", "NONE"}
    assert all(type(count) is int for count in stats.steps_by_mode.values())
    assert stats.total_kv_blocks >= stats.free_kv_blocks > 0
    assert stats.drafted >= stats.accepted > 0
    assert len(stats.accepted_by_position) >= 1
    assert all(hasattr(row, "drafted") for row in stats.by_adapter.values())
    record = engine.recent_steps(1)[0]
    assert record.mode in ("FULL", "PIECEWISE", "NONE")
    assert (record.num_reqs, record.num_tokens >= 1) == (1, True)
    assert isinstance(record.k, int) and isinstance(record.reason, str | None)
    assert engine.recent_steps(0) == []
    for row in engine.graph_table():
        assert row.role in ("step", "target", "draft_catchup", "draft_decode")
        assert row.mode in ("FULL", "PIECEWISE")
        assert row.variant in ("greedy", "sampled")
        shape = row.descriptor
        assert shape.num_tokens >= shape.num_reqs >= 0 and not shape.has_lora
        # Keys of PIECEWISE graphs are relaxed: they hold tokens, not requests.
        assert shape.uniform == (row.mode == "FULL")
        assert isinstance(row.num_bytes, int) and isinstance(row.replays, int)
        assert isinstance(row.capture_seconds, float)


def test_num_kv_blocks_counts_what_requests_may_use(models):
    """The dump for padding comes on top, and the draft's cache takes none of it."""
    with cpu_engine(
        models["target"], models["same"], 2, num_kv_blocks=40, cudagraph_mode="NONE"
    ) as engine:
        assert engine.stats().total_kv_blocks == engine.stats().free_kv_blocks == 40


def test_stream_events(engines, models):
    engine = engines(models["target"], models["same"], 2, **ONE_RUNG)
    whole = engine.generate(PROMPTS[3], greedy(14))
    events = list(engine.stream(PROMPTS[3], greedy(14)))
    assert [token for event in events for token in event.token_ids] == whole.token_ids
    assert "".join(event.text for event in events) == whole.text
    assert {event.index for event in events} == {0}
    assert len({event.request_id for event in events}) == 1
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert len(events) > 2


def test_interleaved_streams_have_their_own_ids_and_texts(engines, models, oracles):
    engine = engines(models["target"], models["same"], 2, **ONE_RUNG)
    streams = [engine.stream(prompt, greedy(11)) for prompt in PROMPTS[:3]]
    ids, names = [[], [], []], [set(), set(), set()]
    for _ in range(12):
        for i, stream in enumerate(streams):
            event = next(stream, None)
            if event is not None:
                names[i].add(event.request_id)
                ids[i] += event.token_ids
    assert [len(own) for own in names] == [1, 1, 1] and len(set.union(*names)) == 3
    assert ids == [oracles["target"].greedy(prompt, 11)[0] for prompt in PROMPTS[:3]]


def test_paths_may_be_path_objects(models):
    with cpu_engine(
        Path(models["target"]), Path(models["same"]), 2, cudagraph_mode="NONE"
    ) as engine:
        assert engine.generate(PROMPTS[0], greedy(9)).stats.acceptance_rate == 1.0


def test_generate_in_one_line(models, oracles):
    out = specdec.generate(
        PROMPTS[0], model=models["target"], draft=models["same"], k=2, device="cpu",
        cudagraph_mode="NONE", max_model_len=64, max_new_tokens=7,
    )  # fmt: skip
    assert isinstance(out, specdec.Generation)
    assert out.token_ids == oracles["target"].greedy(PROMPTS[0], 7)[0]
    outs = specdec.generate(
        PROMPTS[:2], model=models["target"], draft=None, device="cpu", cudagraph_mode="NONE",
        max_model_len=64, max_new_tokens=7,
    )  # fmt: skip
    assert [o.token_ids for o in outs] == [
        oracles["target"].greedy(prompt, 7)[0] for prompt in PROMPTS[:2]
    ]


def test_generate_keeps_an_engine_per_set_of_engine_fields(models, monkeypatch):
    """A second call with other sampling fields builds nothing."""
    built = []
    original = specdec.Engine.__init__

    def counted(self, *args, **kwargs):
        built.append(kwargs)
        original(self, *args, **kwargs)

    monkeypatch.setattr(specdec.Engine, "__init__", counted)
    options = {"model": models["blend.3"], "device": "cpu", "cudagraph_mode": "NONE"}
    for max_new_tokens in (2, 3):
        specdec.generate(PROMPTS[0], draft=None, max_new_tokens=max_new_tokens, **options)
    assert len(built) == 1
    specdec.generate(PROMPTS[0], draft="ngram", max_new_tokens=2, **options)
    assert len(built) == 2


def test_text_prompts_and_text_results(tmp_path):
    """A tokenizer's folder serves str; the text is the decoding of the ids, without the EOS."""
    folder = make_tiny(tmp_path / "words", seed=1, tokenizer="words")
    with cpu_engine(str(folder), "ngram", 2, cudagraph_mode="NONE") as engine:
        by_text = engine.generate("w5 w17 w99 w3", greedy(8))
        by_ids = engine.generate([5, 17, 99, 3], greedy(8))
        both = engine.generate(["w5 w17 w99 w3", [5, 17, 99, 3]], greedy(8))
        assert by_text.token_ids == by_ids.token_ids == both[0].token_ids == both[1].token_ids
        assert by_text.prompt_tokens == 4
        assert by_text.text.split() == [f"w{token}" for token in by_text.token_ids]
        stopped = engine.generate([5, 17, 99, 3], greedy(8, stop_token_ids=[by_ids.token_ids[2]]))
        end = by_ids.token_ids.index(by_ids.token_ids[2])
        assert stopped.token_ids == by_ids.token_ids[: end + 1]
        assert stopped.text.split() == [f"w{token}" for token in by_ids.token_ids[:end]]
        events = list(engine.stream("w5 w17 w99 w3", greedy(8)))
        assert "".join(event.text for event in events) == by_text.text


def test_chat_messages_and_templates(tmp_path):
    """generate applies the chat template to str and messages; Engine.generate never does."""
    template = "{% for m in messages %}{{ 'w1 ' + m['content'] + ' w2 ' }}{% endfor %}w3"
    folder = make_tiny(tmp_path / "chat", seed=1, tokenizer="words", chat_template=template)
    options = {"model": str(folder), "draft": None, "device": "cpu", "cudagraph_mode": "NONE"}
    messages = [{"role": "user", "content": "w5 w17"}]
    templated = specdec.generate([1, 5, 17, 2, 3], max_new_tokens=6, **options)
    by_messages = specdec.generate(messages, max_new_tokens=6, **options)
    by_text = specdec.generate("w5 w17", max_new_tokens=6, **options)
    assert by_messages.token_ids == by_text.token_ids == templated.token_ids
    assert by_messages.prompt_tokens == by_text.prompt_tokens == 5
    with cpu_engine(str(folder), None, cudagraph_mode="NONE") as engine:
        assert engine.generate("w5 w17", greedy(6)).prompt_tokens == 2


def test_the_drafter_protocol():
    """It has the members that the contract names."""
    for member in ("propose", "prefill", "advance", "capturable"):
        assert member in dir(specdec.Drafter) or member in specdec.Drafter.__annotations__
