"""A sweep on a tiny model: every number can be recomputed, and nothing is left out."""

import math
from typing import Any

import pytest

import specdec
from specdec.bench import report, sweep
from specdec.bench.settings import Settings
from specdec.outputs import GenerationStats, StreamEvent
from specdec.timed import TimedText

FIXED = (0, 1, 3)
Points = list[dict[str, Any]]


def test_every_point_is_there_and_plain_decoding_is_the_baseline(
    result: dict[str, Any], real: Points
) -> None:
    wanted = [(num_reqs, k) for num_reqs in (1, 3) for k in (*FIXED, "auto")]
    assert [(p["num_reqs"], p["k"]) for p in real] == wanted
    assert [(p["num_reqs"], p["k"]) for p in result["points"][len(real) :]] == wanted
    for points in report.groups(result).values():
        plain = points[0]
        assert plain["k"] == 0
        assert plain["drafted"] == 0
        assert plain["speedup"] == 1.0
        assert plain["mean_tokens_per_step"] == 1.0
        for point in points:
            ratio = point["tokens_per_second_per_user"] / plain["tokens_per_second_per_user"]
            assert point["speedup"] == pytest.approx(ratio)


def test_counts_are_tokens_and_add_up(real: Points) -> None:
    """4 prompts; 3 side by side make two waves of 3, the second filled up from the front."""
    for point in real:
        texts = 4 if point["num_reqs"] == 1 else 6
        assert point["texts"] == point["texts_equal_to_k0"] == texts
        assert point["tokens"] == texts * 16
        # The first token of a text comes from its prefill.
        assert point["committed_by_steps"] == texts * 15
        assert point["committed_by_steps"] == point["steps"] + point["accepted"]
        assert point["accepted"] == point["drafted"]
        assert sum(point["drafted_by_position"]) == point["drafted"]
        assert sum(point["accepted_by_position"]) == point["accepted"]
        if point["k"] != "auto":
            assert point["acceptance_by_position"] == [1.0] * point["k"]
        parts = point["by_category"].values()
        for name in ("texts", "tokens", "steps", "drafted", "accepted", "ngrams"):
            assert sum(part[name] for part in parts) == point[name]
        assert point["ngrams"] == texts * 13
    # All drafts accepted: 15 tokens in steps of up to 1 + k.
    steps = {p["k"]: p["steps"] for p in real if p["num_reqs"] == 1}
    assert {k: steps[k] for k in FIXED} == {0: 60, 1: 32, 3: 16}
    assert 16 <= steps["auto"] <= 60


def test_times_are_of_decode_steps_and_start_up_stands_apart(result: dict[str, Any]) -> None:
    for point in result["points"]:
        per_token, gaps = point["ms_per_token"], point["ms_between_tokens"]
        assert 0 < per_token["p50"] <= per_token["p95"] <= per_token["p99"]
        assert gaps["p50"] <= gaps["p95"] <= gaps["p99"]
        assert 0 < point["ttft_ms"]["p50"] < point["end_to_end_ms"]["p50"]
        speed = point["tokens_per_second_per_user"]
        assert speed == pytest.approx(1e3 / per_token["mean"])
        decode_seconds = point["ms_per_step"] * point["steps"] / 1e3
        # Each of up to num_reqs texts at a time lies within the time of its wave.
        assert decode_seconds <= point["seconds"] * point["num_reqs"]
        assert point["tokens_per_second"] == pytest.approx(point["tokens"] / point["seconds"])
        assert set(point["decode_steps_by_mode"]) == {"FULL"}
        assert point["reasons_not_full"] == {}
        assert len(point["ms_per_token_by_text"]) == point["texts"]
    # Where every step brings four tokens, most have no gap before them.
    (wide,) = [p for p in result["points"][:4] if p["k"] == 3]
    assert wide["ms_between_tokens"]["p50"] == 0 < wide["ms_between_tokens"]["p99"]
    for engine in result["engines"]:
        startup = engine["startup"]
        assert 0 < startup["capture_seconds"] < startup["build_seconds"]
        assert startup["num_graphs"] > 0
        assert startup["warmup_seconds"] > 0


def test_the_floor_is_the_bytes_that_must_be_read(result: dict[str, Any], real: Points) -> None:
    """TINY: embedding 256 x 64 is not read; 2 layers of q, k, v, o, three of the MLP, two norms."""
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    weights = 4 * (2 * layer + 64 + 256 * 64)
    assert {engine["weight_bytes"] for engine in result["engines"]} == {weights}
    for point in real:
        kv = 4 * 2 * 2 * 2 * 16 * point["num_reqs"] * point["mean_context"]
        ms = 1e3 * (weights + kv) / result["bandwidth_bytes_per_second"]
        floor = point["floor_ms_per_step"]
        assert floor["verify"] == pytest.approx(ms)
        # The draft is the same model, and makes k passes.
        assert floor["draft"] == pytest.approx(point["mean_k"] * ms)
        share = (floor["verify"] + floor["draft"]) / point["ms_per_step"]
        assert point["share_of_floor"] == pytest.approx(share)


def test_the_parts_of_a_step_are_timed_alone(result: dict[str, Any]) -> None:
    for point in result["points"]:
        if point["k"] == "auto":
            assert point["parts_ms"] is None
            continue
        parts = point["parts_ms"]
        assert min(parts["step"], parts["verify"], parts["accept"]) > 0
        assert (parts["draft"] > 0) == (point["k"] > 0)
        assert parts["accept"] < parts["step"]


def test_a_simulated_drafter_costs_the_same_and_writes_no_text(result: dict[str, Any]) -> None:
    simulated = [point for point in result["points"] if point["simulated"] is not None]
    assert len(simulated) == 8
    for point in simulated:
        assert point["texts_equal_to_k0"] is None
        assert report.cells(point)[report.SAME] == "-"
        assert point["floor_ms_per_step"]["draft"] > 0 or point["mean_k"] == 0
    drafted = sum(point["drafted_by_position"][0] for point in simulated if point["drafted"])
    accepted = sum(point["accepted_by_position"][0] for point in simulated if point["drafted"])
    assert abs(accepted / drafted - 0.5) < 4 * math.sqrt(0.25 / drafted)
    assert "simulated 0.5" in report.group_title(simulated[0])


def test_what_a_number_belongs_to_is_recorded(result: dict[str, Any]) -> None:
    assert result["benchmark"] == "acceptance_vs_latency"
    assert result["schema_version"] == 2
    assert result["versions"]["specdec"] == specdec.__version__
    assert {"torch", "python", "triton", "cuda"} <= set(result["versions"])
    assert result["device"]["type"] == "cpu"
    assert result["model"]["dtype"] == "float32"
    settings = result["settings"]
    assert settings["temperatures"] == (0.0,)
    assert settings["ks"] == (*FIXED, "auto")
    assert settings["num_prompts"] == 4
    assert {"seed", "top_k", "top_p", "dtype", "max_new_tokens", "ignore_eos"} <= set(settings)
    assert result["command"]
    assert "commit" in result


def test_sampled_texts_with_seeds_do_not_depend_on_k(model: str) -> None:
    settings = Settings(
        model=model, drafts=("ngram",), ks=(2,), num_reqs=(2,), num_prompts=2, max_new_tokens=8,
        temperatures=(0.0, 1.0), contexts=(None, 12), seed=5, device="cpu", parts=False,
        warm_up=False,
    )  # fmt: skip
    lines: list[str] = []
    got = sweep.run_sweep(settings, progress=lines.append)
    cases = [(p["context"], p["temperature"], p["k"]) for p in got["points"]]
    assert cases == [(c, t, k) for c in (None, 12) for t in (0.0, 1.0) for k in (0, 2)]
    assert all(p["texts_equal_to_k0"] == p["texts"] == 2 for p in got["points"])
    digests = [p["texts_digest"] for p in got["points"]]
    assert digests[0] == digests[1] != digests[2] == digests[3]
    assert [p["mean_context"] for p in got["points"][4:]] == [12 + 4] * 4
    assert all(point["parts_ms"] is None for point in got["points"])
    assert "greedy and temperature 1" in report.caption(got)
    assert "NOT warmed up" in report.caption(got)
    assert got["engines"][0]["startup"]["warmup_seconds"] == 0
    assert report.report_name(got).endswith("-t1")
    assert lines


def test_without_a_drafter_there_is_plain_decoding_alone(model: str) -> None:
    settings = Settings(
        model=model, drafts=(None,), ks=(0,), num_prompts=1, max_new_tokens=4, device="cpu"
    )
    (point,) = sweep.run_sweep(settings)["points"]
    assert point["steps"] == 3
    assert point["acceptance_by_position"] == []


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("drafts", (None,), "ks"),
        ("drafts", (), "drafts"),
        ("drafts", ("ngram", "ngram"), "drafts"),
        ("ks", (0,), "ks"),
        ("ks", (-1, 2), "ks"),
        ("ks", ("all",), "ks"),
        ("num_reqs", (0,), "num_reqs"),
        ("contexts", (0,), "contexts"),
        ("temperatures", (-1.0,), "temperatures"),
        ("simulate", ((1.5,),), "simulate"),
        ("simulate", ((),), "simulate"),
        ("simulate", ((0.8,), (0.8,)), "simulate"),
        ("drafts", ("runs/a/head", "runs/b/head"), "drafts"),
        ("max_new_tokens", 1, "max_new_tokens"),
        ("num_prompts", 0, "num_prompts"),
    ],
)
def test_bad_settings_are_refused_by_name(field: str, value: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Settings(**{field: value})


def test_prompts_that_fill_the_context_are_measured_too(model: str) -> None:
    """Fault: the parts of a step were timed past the end of the context, which ended the run. And
    of lengths that do not fit the others were measured first, for nothing.
    """
    sizes: dict[str, Any] = {"model": model, "ks": (4,), "num_prompts": 2, "max_new_tokens": 9}
    how: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "warm_up": False}
    got = sweep.run_sweep(Settings(**sizes, **how, contexts=(60,)))
    assert all(point["parts_ms"]["step"] > 0 for point in got["points"])
    # What begins as one kind of text goes on as others.
    assert all(set(point["by_category"]) == {sweep.SYNTHETIC} for point in got["points"])
    assert report.repeated_prompts(got) == []
    lines: list[str] = []
    with pytest.raises(ValueError, match="contexts: 64 is too long"):
        sweep.run_sweep(Settings(**sizes, **how, contexts=(8, 64)), progress=lines.append)
    assert not any("texts of each k done" in line for line in lines)


def test_prompts_longer_than_their_texts_are_said_to_repeat_themselves(result: Any) -> None:
    engine = result["engines"][0] | {"prompt_text_tokens": 300}
    settings = result["settings"] | {"contexts": (None, 200, 1024)}
    (line,) = report.repeated_prompts(result | {"engines": [engine], "settings": settings})
    assert line.startswith("Prompts of 1024 tokens say their 300 tokens of text over and over")


def test_prompts_that_run_side_by_side_with_themselves_count_once(model: str) -> None:
    settings = Settings(
        model=model, ks=(2,), num_reqs=(1, 6), num_prompts=2, max_new_tokens=12, device="cpu",
        parts=False, warm_up=False, ignore_eos=True, cudagraph_mode="NONE", simulate=((0.5,),),
    )  # fmt: skip
    by_case = {
        (p["simulated"], p["num_reqs"], p["k"]): p for p in sweep.run_sweep(settings)["points"]
    }
    alone, together = by_case[None, 1, 2], by_case[None, 6, 2]
    assert (together["texts"], together["distinct_texts"]) == (6, 2)
    assert together["drafted"] == 3 * alone["drafted"]
    assert together["acceptance_intervals"] == [
        pytest.approx(interval) for interval in alone["acceptance_intervals"]
    ]
    # Simulated draws differ from row to row.
    assert by_case[(0.5,), 6, 2]["distinct_texts"] == 6


def test_a_lookup_does_not_find_what_another_k_wrote(model: str) -> None:
    """Fault: "suffix" keeps the outputs of earlier requests, and k=0 had just answered the same
    prompt on the same engine: nine of ten drafts were right on any prompt.
    """
    settings = Settings(
        model=model, drafts=("suffix",), ks=(4,), num_prompts=3, max_new_tokens=16, device="cpu",
        parts=False, warm_up=False, ignore_eos=True, cudagraph_mode="NONE",
    )  # fmt: skip
    (point,) = [p for p in sweep.run_sweep(settings)["points"] if p["k"] == 4]
    accepted = steps = 0
    for prompt in sweep.spread(sweep.load_prompts(), 3):
        with specdec.Engine(model, "suffix", 4, device="cpu", cudagraph_mode="NONE") as engine:
            params = specdec.SamplingParams(max_new_tokens=16, ignore_eos=True)
            (alone,) = engine.generate([engine.tokenizer.encode(prompt.text)], params)
        accepted, steps = accepted + alone.stats.accepted, steps + alone.stats.steps
    assert (point["accepted"], point["steps"]) == (accepted, steps)


def test_tokens_are_counted_and_not_events() -> None:
    """A step that brings four tokens is one event: counting events would give 2, not 5."""
    from specdec import timed

    text = TimedText(prompt_tokens=3, stats=GenerationStats())
    timed._add(text, StreamEvent("r", 0, "a", [1]), 0.5)
    timed._add(text, StreamEvent("r", 0, "bcde", [2, 3, 4, 5], "length"), 0.9)
    assert len(text.token_ids) == 5
    assert text.decode_tokens == 4
    assert text.decode_seconds == pytest.approx(0.4)
    assert text.first_token == 0.5
    assert text.gaps == pytest.approx([0.4, 0, 0, 0])
    assert text.finish_reason == "length"
