"""A report of the benchmark as a file, and in words."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Report = dict[str, Any]
Point = dict[str, Any]
SCHEMA_VERSION = 2

COLUMNS = (
    "k",
    "tok/st",
    "acc",
    "ms/st",
    "floor",
    "ms/tok",
    "p95",
    "tok/s",
    "vs k=0",
    "total",
    "TTFT",
    "FULL",
    "same",
)
SPEEDUP, SAME = COLUMNS.index("vs k=0"), COLUMNS.index("same")


def write_report(report: Report, folder: str | Path) -> Path:
    """Write ``folder/NAME.json``, named after model, drafters and device, and return its path."""
    path = Path(folder) / f"{report_name(report)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def read_report(path: str | Path) -> Report:
    """Raises FileNotFoundError, or ValueError naming the file if it is no report known here."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such report: {path}")
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a report: {error}") from error
    known = isinstance(report, dict) and report.get("benchmark") == "acceptance_vs_latency"
    if not known or report.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{path} is not an acceptance_vs_latency report of schema version {SCHEMA_VERSION}"
        )
    return report


def report_name(report: Report) -> str:
    settings = report["settings"]
    parts = [
        report["benchmark"],
        report["model"]["name"].split(" (")[0],
        *(draft_label(draft) for draft in settings["drafts"]),
        report["device"]["type"],
    ]
    parts += [f"t{temperature:g}" for temperature in settings["temperatures"] if temperature]
    text = "-".join(parts)
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text)


def draft_label(draft: str | None) -> str:
    """A drafter's name, or the last part of a draft model's path."""
    return str(draft or "none").rstrip("/").split("/")[-1]


def series_label(point: Point) -> str:
    """What a point's curve is called: its drafter, and whether acceptance is simulated."""
    label = draft_label(point["draft"])
    rates = point["simulated"]
    if rates is None:
        return label
    return f"{label} at simulated {' '.join(f'{rate:g}' for rate in rates)}"


def caption(report: Report) -> str:
    """What the numbers belong to, in one line."""
    settings, device = report["settings"], report["device"]
    how = [
        "greedy" if not temperature else f"temperature {temperature:g}"
        for temperature in settings["temperatures"]
    ]
    cores = f" ({device['cores']} cores)" if device["type"] == "cpu" else ""
    drafts = ", ".join(draft_label(draft) for draft in settings["drafts"])
    cold = "" if settings["warm_up"] else "; NOT warmed up: first uses are in the numbers"
    return (
        f"{report['model']['name']}, {report['model']['dtype']}, on {device['name']}{cores}; "
        f"drafter {drafts}, {' and '.join(how)}, {settings['num_prompts']} prompts, "
        f"at most {settings['max_new_tokens']} new tokens{cold}"
    )


def group_title(point: Point) -> str:
    """What the points of one table have in common."""
    words = [series_label(point), requests(point["num_reqs"])]
    if point["context"] is not None:
        words.append(f"prompts of {point['context']} tokens")
    if point["temperature"]:
        words.append(f"temperature {point['temperature']:g}")
    return ", ".join(words)


def groups(report: Report) -> dict[str, list[Point]]:
    """The points by what they have in common: everything but k."""
    made: dict[str, list[Point]] = {}
    for point in report["points"]:
        made.setdefault(group_title(point), []).append(point)
    return made


def first_groups(report: Report) -> dict[str, list[Point]]:
    """Of each curve the group with the fewest requests: acceptance hardly depends on the others."""
    made: dict[str, list[Point]] = {}
    seen: set[str] = set()
    for title, points in groups(report).items():
        label = f"{series_label(points[0])} {points[0]['context']} {points[0]['temperature']}"
        if label not in seen:
            seen.add(label)
            made[title] = points
    return made


def cells(point: Point) -> list[str]:
    """One row of the table, in the order of COLUMNS."""
    full = point["decode_steps_by_mode"].get("FULL", 0)
    num_steps = sum(point["decode_steps_by_mode"].values())
    equal = point["texts_equal_to_k0"]
    return [
        str(point["k"]),
        f"{point['mean_tokens_per_step']:.2f}",
        f"{point['acceptance_rate']:.0%}" if point["drafted"] else "-",
        digits(point["ms_per_step"]),
        f"{point['share_of_floor']:.0%}",
        digits(point["ms_per_token"]["p50"]),
        digits(point["ms_per_token"]["p95"]),
        digits(point["tokens_per_second_per_user"]),
        f"{point['speedup']:.2f}x",
        digits(point["tokens_per_second"]),
        digits(point["ttft_ms"]["p50"]),
        "all" if full == num_steps else f"{full}/{num_steps}",
        f"{equal}/{point['texts']}" if equal is not None else "-",
    ]


def k_label(point: Point) -> str:
    return f"auto ({point['mean_k']:.1f})" if point["k"] == "auto" else str(point["k"])


def startup_lines(report: Report) -> list[str]:
    lines = []
    for engine in report["engines"]:
        startup = engine["startup"]
        lines.append(
            f"{series_label(engine)}: not in the numbers above: {startup['build_seconds']:.1f} s "
            f"to load and capture ({startup['num_graphs']} graphs, "
            f"{startup['capture_seconds']:.1f} s, {startup['graph_bytes'] / 2**20:.0f} MiB), "
            f"{startup['warmup_seconds']:.1f} s to warm up."
        )
    return lines


def repeated_prompts(report: Report) -> list[str]:
    """One line for each length of prompts that is more than their texts have."""
    have = report["engines"][0].get("prompt_text_tokens", 0)
    return [
        f"Prompts of {context} tokens say their {have} tokens of text over and over, which "
        "flatters drafters that look words up; give more with --prompts."
        for context in report["settings"]["contexts"]
        if context is not None and have and context > have
    ]


def differing(report: Report) -> list[str]:
    """One line for each point that failed or whose texts, or a peer's, are not those of k=0."""
    lines = [
        f"{group_title(point)}, k={point['k']}: {len(point['errors'])} of {point['texts']} texts "
        f"ended with an error, the first with: {point['errors'][0]}"
        for point in report["points"]
        if point.get("errors")
    ]
    lines += [
        f"{group_title(point)}, k={point['k']}: {point['texts'] - point['texts_equal_to_k0']} of "
        f"{point['texts']} texts differ from those of k=0"
        for point in report["points"]
        if point["texts_equal_to_k0"] not in (None, point["texts"])
    ]
    return lines + [
        f"{peer['peer']}, {peer['method']}, k={peer['k']}: "
        f"{peer['texts'] - peer['texts_equal_to_k0']} of {peer['texts']} texts differ from those "
        f"that specdec writes without drafts"
        for peer in report["peers"]
        if peer["texts_equal_to_k0"] != peer["texts"]
    ]


def digits(value: float) -> str:
    """About three digits: 1.23, 12.3, 123."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


# What a document shows, and under which heading.
MARKDOWN_COLUMNS = {
    "k": "k",
    "tok/st": "tokens per step",
    "acc": "drafts accepted",
    "ms/st": "ms per step",
    "floor": "of the floor",
    "tok/s": "tokens/s per user",
    "vs k=0": "against k=0",
    "same": "same text",
}


def markdown(report: Report, source: str) -> str:
    """The latency table for a document, with what it belongs to and the file it is made from."""
    lines = [f"{caption(report)}:", ""]
    shown = [COLUMNS.index(name) for name in MARKDOWN_COLUMNS]
    several = len({series_label(point) for point in report["points"]}) > 1
    names = ["drafter"] * several + ["requests", *MARKDOWN_COLUMNS.values()]
    aligned = ["---"] * several + ["---:"] * (len(names) - several)
    lines += [_row(names), _row(aligned)]
    for point in report["points"]:
        row = cells(point)
        label = [series_label(point)] * several
        lines.append(_row([*label, str(point["num_reqs"]), *(row[i] for i in shown)]))
    versions = report["versions"]
    lines += ["", f"From `{source}`: {report['date'][:10]}, torch {versions['torch']}."]
    return "\n".join(lines)


def _row(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"
