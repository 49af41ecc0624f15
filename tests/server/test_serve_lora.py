"""The LoRA-serving script on a random model, and how it counts."""

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def script():
    """The script as a module; its sibling is found as when it runs."""
    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location("serve_lora", BENCH / "serve_lora.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["serve_lora"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCH))
    return module


def test_a_run_reports_every_model(tmp_path) -> None:
    command = [sys.executable, str(BENCH / "serve_lora.py"), "--tiny", "--out", str(tmp_path)]
    command += ["--requests", "12", "--rate", "40", "--num-adapters", "2", "--max-tokens", "16"]
    command += ["--device", "cpu", "--seed", "1", "--", "--max-loras", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "serve_lora.json").read_text())
    assert report["client"] == "openai" and report["settings"]["server_options"]
    rows = report["by_model"]
    assert set(rows) == {"base", "random-0", "random-1"} == set(report["samples"])
    for key in ("requests", "tokens", "drafted"):
        assert sum(row[key] for row in rows.values()) == report["total"][key]
    assert report["total"]["requests"] == 12 and report["total"]["tokens"] == 12 * 16
    for row in rows.values():
        assert 0 < row["ttft_ms"]["p50"] < row["request_ms"]["p50"]
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / report["seconds"])
    assert report["graphs"]["replays_with_adapters"] > 0
    # Two adapters share one slot.
    assert report["adapter_loads"] >= 1
    assert (tmp_path / "serve_lora.png").stat().st_size > 1000
    assert "random-1" in done.stdout and "accepted" in done.stdout
    assert all(sum(row["steps_by_mode"].values()) > 0 for row in rows.values())


def test_traffic_is_poisson_and_zipf_and_repeats(script) -> None:
    """20,000 draws: the bounds below are more than five standard deviations wide."""
    args = script.argparse.Namespace(seed=3, zipf=1.0, requests=20_000)
    traffic = script.make_traffic(args, 5.0, ["x", "y", "z"])
    assert traffic == script.make_traffic(args, 5.0, ["x", "y", "z"])
    assert traffic[-1][0] == pytest.approx(4000, rel=0.04)
    shares = [sum(model == name for _, model, _ in traffic) / 20_000 for name in "xyz"]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.02)


def test_tokens_are_counted_by_usage_not_by_chunks(script) -> None:
    """A server that sends four tokens a chunk is not four times slower."""

    async def chunks():
        for text in ("ab", "", "cd"):
            await asyncio.sleep(0.02)
            yield {"choices": [{"text": text, "token_ids": [1, 2, 3, 4]}], "usage": None}
        usage = {"prompt_tokens": 3, "completion_tokens": 12, "drafted": 10, "accepted": 9}
        yield {"choices": [], "usage": usage}

    served = asyncio.run(sys.modules["serve_clients"].watch("m", chunks()))
    assert (served.text, served.tokens, served.drafted, served.accepted) == ("abcd", 12, 10, 9)
    assert served.per_token == pytest.approx((served.last_token - served.first_token) / 11)
    row = script.summary([served, served], 2.0)
    assert row["tokens_per_second"] == 12 and row["acceptance_rate"] == 0.9
