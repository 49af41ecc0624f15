"""The scripts for one GPU, at tiny sizes on the CPU: they run, and their files are right."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def run(script: str, out: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCH / script), "--tiny", "--device", "cpu", "--out", str(out)]
    ran = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(out.read_text(encoding="utf-8"))


def test_the_step_by_part_per_token_and_idle(tmp_path: Path) -> None:
    made = run("step.py", tmp_path / "step.json")
    assert [(row["num_reqs"], row["k"]) for row in made["parts"]] == [
        (num_reqs, k) for num_reqs in (1, 2) for k in (0, 2, 4)
    ]
    for row in made["parts"]:
        times, floor = row["ms"], row["floor_ms"]
        assert min(times["step"], times["verify"], times["accept"]) > 0
        assert (times["draft"] > 0) == (row["k"] > 0)
        assert ("verify_sampled" in times) == (row["num_reqs"] == 1)
        assert floor["step"] == pytest.approx(floor["draft"] + floor["verify"])
    speeds = {(row["drafter"], row["num_reqs"]): row for row in made["speed"]}
    assert {drafter for drafter, _ in speeds} == {"none", "ngram", "tiny draft model"}
    for (drafter, _), row in speeds.items():
        assert (row["tokens_per_step"] == 1) == (drafter == "none")
        each = row["ms_per_step"] / row["tokens_per_step"]
        assert row["ms_per_token_and_user"] == pytest.approx(each)
    # Acceptance is drawn by row and position, not by what a drafter proposes.
    ngram, model = speeds["ngram", 1], speeds["tiny draft model", 1]
    assert ngram["tokens_per_step"] == model["tokens_per_step"] > 2
    for row in made["idle"]:
        first, middle, last = row["ms_alone"]
        mean = (first + 4 * middle + last) / 6
        assert row["idle_share"] == pytest.approx(1 - mean / row["ms_per_step"])


@pytest.mark.parametrize("script", ["full_graphs.py", "peers.py"])
def test_scripts_that_repeat_their_prompts_keep_no_history(script: str) -> None:
    """Fault: "suffix + head" was measured on prompts that the same engine had just answered."""
    source = (BENCH / script).read_text(encoding="utf-8")
    assert "suffix+auto" in source
    assert "suffix_history=0," in source


def test_the_made_pair_is_accepted_in_full_and_no_text_differs(tmp_path: Path) -> None:
    made = run("peers.py", tmp_path / "peers.json", "--only", "pair")["pair"]
    rows = [(row["num_reqs"], row["k"], row["acceptance_rate"]) for row in made["specdec"]]
    assert rows == [(1, 0, 0.0), (1, 4, 1.0), (2, 0, 0.0), (2, 4, 1.0)]
    assert all(row["texts_equal_to_k0"] == row["num_reqs"] for row in made["specdec"])
    methods = [(row["method"], row["texts_equal_to_k0"]) for row in made["peers"]]
    assert methods == [("plain", 1), ("assistant_model", 1)]
