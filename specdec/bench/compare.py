"""What changed between two reports, beyond noise.

Latency: the same prompts ran in both, so each text is compared with itself. A point has changed
where the 99% interval (Student's t) of the mean logarithm of the ratios of ms per token leaves out
0, and by at least 3%: one machine is not equally fast in two runs. Texts that ran side by side
shared their steps, and count as one observation. Acceptance: two shares of
drafts (or two numbers of tokens per step) whose difference is beyond 99% of what draws of that
many would give. Texts: greedy ones must be the same, whatever changed.
"""

import math
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from specdec.bench.report import Point, Report, group_title
from specdec.tables import plain_table

Z = 2.576
# Two-sided 99% quantiles of Student's t by degrees of freedom; between two the larger holds.
STUDENT = {
    **{1: 63.66, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707, 7: 3.499, 8: 3.355},
    **{10: 3.169, 15: 2.947, 20: 2.845, 30: 2.75, 60: 2.66, 120: 2.617},
}
MIN_CHANGE = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One point in both reports."""

    point: str
    latency_ratio: float  # of ms per token, second over first
    latency_interval: tuple[float, float]
    latency_changed: bool
    acceptance: tuple[float, float]
    acceptance_changed: bool
    texts_changed: bool | None  # None where they cannot be compared

    @property
    def changed(self) -> bool:
        return self.latency_changed or self.acceptance_changed or self.texts_changed is True


def compare(first: Report, second: Report) -> list[Change]:
    """One entry per point that both have. Raises ValueError where they have none in common."""
    others = {_key(point): point for point in second["points"]}
    pairs = [(p, others[_key(p)]) for p in first["points"] if _key(p) in others]
    if not pairs:
        raise ValueError("the two reports have no point in common: drafter, k, requests, context")
    same_prompts = _workload(first) == _workload(second)
    return [_change(one, other, same_prompts) for one, other in pairs]


def differences(first: Report, second: Report) -> list[str]:
    """What was not the same about the two runs: device, versions, settings."""
    lines = []
    for section in ("device", "versions", "model", "settings"):
        one, other = first[section], second[section]
        for name in sorted({*one, *other}):
            if one.get(name) != other.get(name):
                lines.append(f"{section}.{name}: {one.get(name)} -> {other.get(name)}")
    prompts = [report.get("prompts_digest") for report in (first, second)]
    if prompts[0] != prompts[1]:
        lines.append(f"prompts: {prompts[0]} -> {prompts[1]} (digests of their texts)")
    if first["commit"] != second["commit"]:
        lines.append(f"commit: {first['commit']} -> {second['commit']}")
    return lines


def change_table(changes: list[Change]) -> Table:
    names = ["ms/tok", "99% interval", "accepted", "text"]
    table = plain_table("Second report against the first", ["point"], names, dense=True)
    for change in changes:
        low, high = change.latency_interval
        percent = f"{change.latency_ratio - 1:+.1%}"
        if change.latency_changed:
            style = "red" if change.latency_ratio > 1 else "green"
            percent = f"[{style}]{percent}[/{style}]"
        before, after = change.acceptance
        accepted = f"{before:.1%} -> {after:.1%}"
        table.add_row(
            change.point,
            percent,
            f"{low - 1:+.0%} to {high - 1:+.0%}",
            f"[bold]{accepted}[/bold]" if change.acceptance_changed else "-",
            {None: "-", False: "same", True: "[bold red]DIFFERS[/bold red]"}[change.texts_changed],
        )
    return table


def _key(point: Point) -> tuple:
    return group_title(point), str(point["k"])


def _workload(report: Report) -> dict[str, Any]:
    names = ("num_prompts", "max_new_tokens", "seed", "ignore_eos", "chat_template")
    settings = report["settings"]
    made = {name: settings[name] for name in (*names, "top_k", "top_p")}
    # Reports of before had the file's name alone.
    made["prompts"] = report.get("prompts_digest", settings["prompts"])
    return made | {"model": report["model"]["name"]}


def _change(one: Point, other: Point, same_prompts: bool) -> Change:
    ratio, interval = _latency(one, other, paired=same_prompts)
    changed = not interval[0] <= 1 <= interval[1] and abs(math.log(ratio)) > math.log1p(MIN_CHANGE)
    return Change(
        point=", ".join([group_title(one), f"k={one['k']}"]),
        latency_ratio=ratio,
        latency_interval=interval,
        latency_changed=changed,
        acceptance=(one["acceptance_rate"], other["acceptance_rate"]),
        acceptance_changed=_shares_differ(one, other),
        texts_changed=(
            one["texts_digest"] != other["texts_digest"]
            if same_prompts and one["simulated"] is None
            else None
        ),
    )


def _latency(one: Point, other: Point, *, paired: bool) -> tuple[float, tuple[float, float]]:
    """Ratio of the geometric means of ms per token, and its 99% interval."""
    times = one["ms_per_token_by_text"], other["ms_per_token_by_text"]
    if not any(times[0]) or not any(times[1]):
        return 1.0, (0.0, math.inf)
    if paired and len(times[0]) == len(times[1]):
        deltas = _by_wave(
            [
                math.log(after / before) if before and after else None
                for before, after in zip(*times, strict=True)
            ],
            one["num_reqs"],
        )
        if not deltas:
            return 1.0, (0.0, math.inf)
        mean, error, freedom = _mean(deltas), _error(deltas), len(deltas) - 1
    else:
        logs = [
            _by_wave([math.log(ms) if ms else None for ms in each], one["num_reqs"])
            for each in times
        ]
        mean = _mean(logs[1]) - _mean(logs[0])
        error = math.hypot(_error(logs[0]), _error(logs[1]))
        freedom = min(len(logs[0]), len(logs[1])) - 1
    # Without a second wave nothing is known of the noise.
    half = error * min((t for n, t in STUDENT.items() if n <= freedom), default=1.0)
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


def _by_wave(values: list[float | None], num_reqs: int) -> list[float]:
    """Means over the texts that ran side by side; None stands for a text without decode steps."""
    waves = (values[start : start + num_reqs] for start in range(0, len(values), num_reqs))
    known = ([value for value in wave if value is not None] for wave in waves)
    return [_mean(wave) for wave in known if wave]


def _shares_differ(one: Point, other: Point) -> bool:
    if not one["drafted"] or not other["drafted"]:
        return bool(one["drafted"]) != bool(other["drafted"])
    pooled = (one["accepted"] + other["accepted"]) / (one["drafted"] + other["drafted"])
    # A prompt that ran twice tells nothing new.
    drafted = [
        p["drafted"] * p.get("distinct_texts", p["texts"]) / p["texts"] for p in (one, other)
    ]
    spread = math.sqrt(pooled * (1 - pooled) * sum(1 / count for count in drafted))
    return abs(one["acceptance_rate"] - other["acceptance_rate"]) > Z * spread


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _error(values: list[float]) -> float:
    """Standard error of the mean; of a single value it is infinite."""
    if len(values) < 2:
        return math.inf
    mean = _mean(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))
