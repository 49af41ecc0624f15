"""CASES C59: a benchmark that misleads. Each way of it, as reported of other engines, closed here.

Chunks counted as tokens: ``tests/server/test_load.py``.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import specdec
from specdec.bench import report, sweep
from specdec.bench.command import bench
from specdec.bench.html import html_report
from specdec.bench.settings import Settings

KS, COUNTS, TEMPERATURES = (0, 1, 2, 4, 8), (1, 4, 16), (0.0, 0.8)
KINDS = {
    "chat": ["Tell me of rain.", "Tell me of snow."],
    "loop": ["one two one two one two one two", "abababababab"],
    "code": ["def f(x): return x", "for i in range(3): print(i)"],
}


@pytest.fixture(scope="module")
def swept(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("c59") / "prompts.jsonl"
    rows = [
        {"id": f"{kind}-{number}", "category": kind, "turns": [text]}
        for kind, texts in KINDS.items()
        for number, text in enumerate(texts)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    settings = Settings(
        model=model, drafts=("ngram",), ks=KS, num_reqs=COUNTS, temperatures=TEMPERATURES,
        prompts=str(path), max_new_tokens=8, device="cpu", seed=11, parts=False,
        cudagraph_mode="NONE",  # graphs change no number that is looked at here
    )  # fmt: skip
    return sweep.run_sweep(settings)


def test_every_batch_k_and_temperature_is_shown_and_none_left_out(swept: dict[str, Any]) -> None:
    """Not batch 1 alone, and no greedy run under a sampled label."""
    seen = [(p["temperature"], p["num_reqs"], p["k"]) for p in swept["points"]]
    assert seen == [(t, n, k) for t in TEMPERATURES for n in COUNTS for k in KS]
    by_case = {(p["temperature"], p["num_reqs"]): p for p in swept["points"] if p["k"] == 0}
    for num_reqs in COUNTS:
        digests = {by_case[t, num_reqs]["texts_digest"] for t in TEMPERATURES}
        assert len(digests) == 2
    page = html_report(swept, {})
    for title in report.groups(swept):
        assert title in page


def test_rates_come_from_tokens(swept: dict[str, Any]) -> None:
    for point in swept["points"]:
        assert point["tokens_per_second"] == pytest.approx(point["tokens"] / point["seconds"])
        per_user = 1e3 / point["ms_per_token"]["mean"]
        assert point["tokens_per_second_per_user"] == pytest.approx(per_user)
        for name in ("ttft_ms", "ms_per_token", "ms_between_tokens", "end_to_end_ms"):
            assert {"p50", "p95"} <= set(point[name])
        assert {"acceptance_rate", "acceptance_by_position", "ms_per_step"} <= set(point)


def test_plain_decoding_is_the_plain_engine(swept: dict[str, Any], model: str) -> None:
    """k=0 steps draft nothing, bring one token each, and write what an engine without a drafter
    writes: it is the same work, so that its time is a fair baseline.
    """
    texts = [text for group in KINDS.values() for text in group]
    with specdec.Engine(model, None, 0, device="cpu", max_num_seqs=4, capture="lazy") as engine:
        params = specdec.SamplingParams(max_new_tokens=8)
        plain = engine.generate([engine.tokenizer.encode(text) for text in texts], params)
    for point in swept["points"]:
        if point["k"] == 0:
            assert point["drafted"] == 0
            assert point["committed_by_steps"] == point["steps"]
            assert point["speedup"] == 1.0
    (point,) = [p for p in swept["points"][: len(KS)] if p["k"] == 0]
    assert point["tokens"] == sum(len(each.token_ids) for each in plain)


def test_loops_are_seen_for_what_they_are(swept: dict[str, Any]) -> None:
    """Prompts of three kinds are counted apart, each with how much its texts repeat themselves."""
    for point in swept["points"]:
        assert set(point["by_category"]) == set(KINDS)
        for part in point["by_category"].values():
            assert 0 <= part["repeated_share"] < 1


def test_slow_downs_are_shown(swept: dict[str, Any]) -> None:
    """On a CPU a wide draft that is rarely right makes plain decoding slower, and it is said so."""
    worst = min(swept["points"], key=lambda point: point["speedup"])
    assert worst["speedup"] < 1
    assert f">{worst['speedup']:.2f}x<" in html_report(swept, {})
    assert f"{worst['speedup']:.2f}x" in report.markdown(swept, "x.json")


def test_settings_device_and_seed_are_stored_and_warm_up_stands_apart(
    swept: dict[str, Any],
) -> None:
    settings = swept["settings"]
    assert settings["seed"] == 11
    assert settings["temperatures"] == TEMPERATURES
    assert {"name", "type"} <= set(swept["device"])
    assert swept["model"]["dtype"] == "float32"
    startup = swept["engines"][0]["startup"]
    assert startup["warmup_seconds"] > 0
    assert {"capture_seconds", "build_seconds"} <= set(startup)


def test_a_run_without_warm_up_says_so(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(
        model, ks="0,1", num_reqs="1", num_prompts=1, max_new_tokens=4, warm_up=False, parts=False,
        device="cpu", out=str(tmp_path),
    )  # fmt: skip
    assert "NOT warmed up" in capsys.readouterr().out
    (page,) = tmp_path.glob("*.html")
    assert "NOT warmed up" in page.read_text()
