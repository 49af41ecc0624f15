"""A report of the benchmark as a file, as tables for a terminal, and as Markdown."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from specdec.tables import plain_table

Report = dict[str, Any]
Point = dict[str, Any]

COLUMNS = (
    "k",
    "tok/step",
    "accepted",
    "ms/step",
    "ms/tok",
    "p95",
    "tok/s",
    "vs k=0",
    "total",
    "TTFT",
    "FULL",
    "same",
)
# What a document shows, and under which heading.
MARKDOWN_COLUMNS = {
    "k": "k",
    "tok/step": "tokens per step",
    "accepted": "drafts accepted",
    "ms/step": "ms per step",
    "tok/s": "tokens/s per user",
    "vs k=0": "against k=0",
    "same": "same text",
}


def write_report(report: Report, folder: str | Path) -> Path:
    """Write ``folder/NAME.json``, named after model, drafter and device, and return its path."""
    path = Path(folder) / f"{report_name(report)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def read_report(path: str | Path) -> Report:
    """Raises ValueError naming the file if it is not a report of a version known here."""
    report = json.loads(Path(path).read_text(encoding="utf-8"))
    if report.get("benchmark") != "acceptance_vs_latency" or report.get("schema_version") != 1:
        raise ValueError(f"{path} is not an acceptance_vs_latency report of schema version 1")
    return report


def report_name(report: Report) -> str:
    settings = report["settings"]
    parts = [
        report["benchmark"],
        report["model"]["name"].split(" (")[0],
        draft_label(report),
        report["device"]["type"],
    ]
    if settings["temperature"]:
        parts.append(f"t{settings['temperature']:g}")
    text = "-".join(parts)
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text)


def draft_label(report: Report) -> str:
    """A drafter's name, or the last part of a draft model's path."""
    return str(report["settings"]["draft"] or "none").rstrip("/").split("/")[-1]


def caption(report: Report) -> str:
    """What the numbers belong to, in one line."""
    settings, device = report["settings"], report["device"]
    how = "greedy" if not settings["temperature"] else f"temperature {settings['temperature']:g}"
    cores = f" ({device['cores']} cores)" if device["type"] == "cpu" else ""
    return (
        f"{report['model']['name']}, {report['model']['dtype']}, on {device['name']}{cores}; "
        f"drafter {draft_label(report)}, {how}, {settings['num_prompts']} prompts, "
        f"at most {settings['max_new_tokens']} new tokens"
    )


def cells(point: Point) -> list[str]:
    """One row of the table, in the order of COLUMNS."""
    full = point["decode_steps_by_mode"].get("FULL", 0)
    num_steps = sum(point["decode_steps_by_mode"].values())
    return [
        str(point["k"]),
        f"{point['mean_tokens_per_step']:.2f}",
        f"{point['acceptance_rate']:.0%}" if point["drafted"] else "-",
        _digits(point["ms_per_step"]),
        _digits(point["ms_per_token"]["p50"]),
        _digits(point["ms_per_token"]["p95"]),
        _digits(point["tokens_per_second_per_user"]),
        f"{point['speedup']:.2f}x",
        _digits(point["tokens_per_second"]),
        _digits(point["ttft_ms"]["p50"]),
        "all" if full == num_steps else f"{full}/{num_steps}",
        f"{point['texts_equal_to_k0']}/{point['texts']}",
    ]


def points_by_num_reqs(report: Report) -> dict[int, list[Point]]:
    groups: dict[int, list[Point]] = {}
    for point in report["points"]:
        groups.setdefault(point["num_reqs"], []).append(point)
    return groups


def latency_tables(report: Report) -> list[Table]:
    """One table per number of requests; what is slower than k=0 is as plain as what is faster."""
    tables = []
    for num_reqs, points in points_by_num_reqs(report).items():
        table = plain_table(f"{_requests(num_reqs)} side by side", [], COLUMNS, dense=True)
        for point in points:
            style = "green" if point["speedup"] > 1.02 else "red" if point["speedup"] < 0.98 else ""
            row = cells(point)
            row[7] = f"[{style}]{row[7]}[/{style}]" if style else row[7]
            if point["texts_equal_to_k0"] != point["texts"]:
                row[11] = f"[bold red]{row[11]}[/bold red]"
            table.add_row(*row)
        tables.append(table)
    return tables


def position_table(report: Report) -> Table:
    """Of the drafts at each position, the share that was accepted (first number of requests)."""
    points = [p for p in next(iter(points_by_num_reqs(report).values())) if p["k"]]
    width = max((len(p["acceptance_by_position"]) for p in points), default=0)
    positions = [str(position) for position in range(1, width + 1)]
    table = plain_table("Accepted, by position in the draft", [], ["k", *positions])
    for point in points:
        table.add_row(str(point["k"]), *(f"{rate:.0%}" for rate in point["acceptance_by_position"]))
    return table


def category_table(report: Report) -> Table:
    """Tokens per step by kind of prompt and k (first number of requests)."""
    points = [p for p in next(iter(points_by_num_reqs(report).values())) if p["k"]]
    columns = [f"k={point['k']}" for point in points]
    table = plain_table("Tokens per step, by kind of prompt", ["category"], columns)
    for category in sorted({name for point in points for name in point["by_category"]}):
        parts = [point["by_category"][category] for point in points]
        table.add_row(category, *(f"{part['mean_tokens_per_step']:.2f}" for part in parts))
    return table


def startup_line(report: Report) -> str:
    startup = report["startup"]
    return (
        f"Not in the numbers above: {startup['build_seconds']:.1f} s to load and capture "
        f"({startup['num_graphs']} graphs, {startup['capture_seconds']:.1f} s, "
        f"{startup['graph_bytes'] / 2**20:.0f} MiB), {startup['warmup_seconds']:.1f} s to warm up."
    )


def markdown(report: Report, source: str) -> str:
    """The latency table for a document, with what it belongs to and the file it is made from."""
    lines = [f"{caption(report)}:", ""]
    shown = [COLUMNS.index(name) for name in MARKDOWN_COLUMNS]
    names = list(MARKDOWN_COLUMNS.values())
    groups = points_by_num_reqs(report)
    if len(groups) > 1:
        names = ["requests", *names]
    lines += [_row(names), _row(["---:"] * len(names))]
    for num_reqs, points in groups.items():
        for point in points:
            row = cells(point)
            chosen = [row[i] for i in shown]
            lines.append(_row([str(num_reqs), *chosen] if len(groups) > 1 else chosen))
    versions = report["versions"]
    lines += ["", f"From `{source}`: {report['date'][:10]}, torch {versions['torch']}."]
    return "\n".join(lines)


def _digits(value: float) -> str:
    """About three digits: 1.23, 12.3, 123."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _row(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"
