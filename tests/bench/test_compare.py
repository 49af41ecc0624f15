"""Two reports side by side: a change is told from noise."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from specdec.bench import command, compare, report

Report = dict[str, Any]


def edited(result: Report, **fields: Any) -> Report:
    """A copy with each point's fields replaced; a function makes the new value of the old one."""
    made = json.loads(json.dumps(result))
    for point in made["points"]:
        for name, value in fields.items():
            point[name] = value(point[name]) if callable(value) else value
    return made


def noisy(seed: int, scale: float = 1.0) -> Any:
    generator = random.Random(seed)
    return lambda values: [scale * value * generator.uniform(0.99, 1.01) for value in values]


@pytest.fixture
def base(result: Report) -> Report:
    return edited(result, ms_per_token_by_text=lambda values: [10.0 + i for i in range(20)])


def test_a_report_has_not_changed_against_itself(base: Report) -> None:
    changes = compare.compare(base, base)
    assert len(changes) == len(base["points"])
    assert not any(change.changed for change in changes)
    assert all(change.latency_ratio == 1 for change in changes)


def test_noise_is_no_change_and_a_slow_down_is(base: Report) -> None:
    """20 texts within 1%: the mean of their logarithms is known to 0.2%, so 10% stands out."""
    again = edited(base, ms_per_token_by_text=noisy(1))
    assert not any(change.changed for change in compare.compare(base, again))
    slower = edited(base, ms_per_token_by_text=noisy(2, 1.1))
    for change in compare.compare(base, slower):
        assert change.latency_changed
        low, high = change.latency_interval
        assert 1.09 < low < high < 1.11
        assert not change.acceptance_changed
    # What is certain but small is no change either.
    assert not any(
        change.changed
        for change in compare.compare(base, edited(base, ms_per_token_by_text=noisy(3, 1.02)))
    )


def test_few_texts_that_differ_much_prove_nothing(result: Report) -> None:
    first = edited(result, ms_per_token_by_text=[10.0, 20.0, 15.0])
    second = edited(result, ms_per_token_by_text=[14.0, 19.0, 21.0])
    assert not any(change.latency_changed for change in compare.compare(first, second))
    one = edited(result, ms_per_token_by_text=[10.0])
    other = edited(result, ms_per_token_by_text=[30.0])
    assert not any(change.latency_changed for change in compare.compare(one, other))


def test_acceptance_beyond_chance_is_a_change(base: Report) -> None:
    counts = {"drafted": 400, "accepted": 200, "acceptance_rate": 0.5}
    first = edited(base, **counts)
    near = edited(base, **counts | {"accepted": 212, "acceptance_rate": 0.53})
    far = edited(base, **counts | {"accepted": 260, "acceptance_rate": 0.65})
    assert not any(change.acceptance_changed for change in compare.compare(first, near))
    assert all(change.acceptance_changed for change in compare.compare(first, far))


def test_other_texts_are_a_change_where_they_can_be_compared(base: Report) -> None:
    other = edited(base, texts_digest="0" * 16)
    changes = compare.compare(base, other)
    # Simulated texts are none.
    assert [change.texts_changed for change in changes] == [True] * 8 + [None] * 8
    assert sum(change.changed for change in changes) == 8
    other["settings"]["seed"] = 7
    assert {change.texts_changed for change in compare.compare(base, other)} == {None}
    assert compare.differences(base, other) == ["settings.seed: 0 -> 7"]


def test_the_command_says_what_changed(
    base: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for name, each in (("a", base), ("b", edited(base, ms_per_token_by_text=noisy(2, 1.5)))):
        paths.append(str(report.write_report(each, tmp_path / name)))
    command.bench(compare=(paths[0], paths[1]))
    shown = capsys.readouterr().out
    assert "16 of 16 points changed beyond noise." in shown
    assert "+50" in shown
    with pytest.raises(FileNotFoundError, match="no-such"):
        command.bench(compare=(paths[0], "no-such.json"))
    nothing = json.loads(json.dumps(base)) | {"points": []}
    with pytest.raises(ValueError, match="no point in common"):
        compare.compare(base, nothing)


def test_texts_side_by_side_are_one_observation(result: Report) -> None:
    """Fault: 16 texts of one wave, which shared every step and so the same slow spell, were taken
    for 16 observations: a few percent of difference was "beyond noise".
    """
    slower = [10.0 * 1.08 + 0.01 * i for i in range(16)]
    for num_reqs, is_known in ((1, True), (4, True), (16, False)):
        first = edited(result, ms_per_token_by_text=[10.0] * 16, num_reqs=num_reqs)
        second = edited(result, ms_per_token_by_text=slower, num_reqs=num_reqs)
        for each in (first, second):
            each["points"] = each["points"][:1]
        (change,) = compare.compare(first, second)
        assert change.latency_changed == is_known
        assert change.latency_ratio == pytest.approx(1.0875, abs=1e-3)


def test_texts_of_other_prompts_or_another_top_p_are_not_compared(base: Report) -> None:
    """Fault: they were called different in red, as if speculation had changed them."""
    for change in ({"settings": base["settings"] | {"top_p": 0.5}}, {"prompts_digest": "0" * 16}):
        other = edited(base, texts_digest="0" * 16) | change
        assert {each.texts_changed for each in compare.compare(base, other)} == {None}
        (line,) = compare.differences(base, other)
        assert "top_p" in line or "prompts" in line
    moved = json.loads(json.dumps(base))
    moved["settings"]["prompts"] = "the/same/file/elsewhere.jsonl"
    assert {each.texts_changed for each in compare.compare(base, moved)} == {False, None}
