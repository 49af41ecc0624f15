"""A report as tables for a terminal."""

from typing import Any

from rich.table import Table

from specdec.bench.report import (
    COLUMNS,
    SAME,
    SPEEDUP,
    Point,
    Report,
    cells,
    digits,
    first_groups,
    groups,
    k_label,
    series_label,
)
from specdec.drafters.adaptive import CrossoverRow
from specdec.tables import crossover_table, plain_table

LEGEND = (
    "tok/st: tokens per step; acc: drafts accepted; floor: how much of a step reading weights and "
    "KV would take at the measured copy bandwidth; tok/s and ms/tok (median and p95 of the texts' "
    "means) are what one user sees after the first token; total is tokens/s over all requests, "
    "prefills included; TTFT in ms; FULL: decode steps that replayed a FULL graph; same: texts "
    "equal to those of k=0 (simulated ones are no texts)."
)


def latency_tables(report: Report) -> list[Table]:
    """One table per group; what is slower than k=0 is as plain as what is faster."""
    tables = []
    for title, points in groups(report).items():
        table = plain_table(title, [], COLUMNS, dense=True)
        for point in points:
            style = "green" if point["speedup"] > 1.02 else "red" if point["speedup"] < 0.98 else ""
            row = cells(point)
            row[SPEEDUP] = f"[{style}]{row[SPEEDUP]}[/{style}]" if style else row[SPEEDUP]
            if point["texts_equal_to_k0"] not in (None, point["texts"]):
                row[SAME] = f"[bold red]{row[SAME]}[/bold red]"
            table.add_row(*row)
        tables.append(table)
    return tables


def part_tables(report: Report) -> list[Table]:
    """Milliseconds of the parts of a step, each graph replayed alone, beside the floor."""
    names = ["k", "step", "draft", "verify", "accept", "floor draft", "floor verify", "running"]
    tables = []
    for title, points in groups(report).items():
        timed = [point for point in points if point["parts_ms"] is not None]
        if not timed:
            continue
        table = plain_table(f"{title}: parts, ms", [], names)
        for point in timed:
            parts, floor = point["parts_ms"], point["floor_ms_per_step"]
            values = [parts[name] for name in ("step", "draft", "verify", "accept")]
            values += [floor["draft"], floor["verify"], point["ms_per_step"]]
            table.add_row(str(point["k"]), *("-" if v is None else digits(v) for v in values))
        tables.append(table)
    return tables


def crossover_of(engine: dict[str, Any]) -> Table:
    """Of an engine with k="auto": which k it found to pay, after all points."""
    return crossover_table([CrossoverRow(**row) for row in engine["crossover"]])


def position_table(report: Report) -> Table:
    """Of the drafts at each position, the share accepted: the widest draft of each curve."""
    shown = []
    for points in first_groups(report).values():
        widest = max(points, key=lambda point: len(point["acceptance_by_position"]))
        shown += [widest] if widest["drafted"] else []
    names = [f"{series_label(point)}, k={k_label(point)}" for point in shown]
    title = "Accepted, % (95%)"
    table = plain_table(title, [], ["position", *names])
    for index in range(max((len(p["acceptance_by_position"]) for p in shown), default=0)):
        table.add_row(str(index + 1), *(share_cell(point, index) for point in shown))
    return table


def share_cell(point: Point, index: int) -> str:
    """``42 (31-54)``, or nothing where a point drafts no such position."""
    if index >= len(point["acceptance_by_position"]):
        return ""
    low, high = point["acceptance_intervals"][index]
    rate = point["acceptance_by_position"][index]
    return f"{100 * rate:.0f} ({100 * low:.0f}-{100 * high:.0f})"


def category_table(report: Report) -> Table:
    """Tokens per step by kind of prompt and k, and how repetitive the texts are."""
    points = [p for group in first_groups(report).values() for p in group]
    shown = [point for point in points if point["drafted"] and point["simulated"] is None]
    first = [(p["draft"], p["context"], p["temperature"]) for p in shown[:1]]
    shown = [p for p in shown if (p["draft"], p["context"], p["temperature"]) in first]
    columns = [f"k={k_label(point)}" for point in shown]
    table = plain_table("Tokens per step, by kind of prompt", ["category"], [*columns, "repeated"])
    for category in sorted({name for point in shown for name in point["by_category"]}):
        parts = [point["by_category"][category] for point in shown]
        repeated = f"{parts[0]['repeated_share']:.0%}"
        table.add_row(category, *(f"{p['mean_tokens_per_step']:.2f}" for p in parts), repeated)
    return table


def peer_table(report: Report) -> Table:
    """Other engines on the same weights, prompts and k; one request at a time."""
    names = ["k", "tokens", "tok/s", "tok/s without prefill", "vs specdec", "same"]
    table = plain_table("Peers, one request at a time, greedy", ["engine", "method"], names)
    for peer in report["peers"]:
        equal = f"{peer['texts_equal_to_k0']}/{peer['texts']}"
        if peer["texts_equal_to_k0"] != peer["texts"]:
            equal = f"[bold red]{equal}[/bold red]"
        ratio = peer["versus_specdec"]
        table.add_row(
            peer["peer"],
            peer["method"],
            str(peer["k"]),
            str(peer["tokens"]),
            digits(peer["tokens_per_second"]),
            digits(peer["decode_tokens_per_second"]),
            f"{ratio:.2f}x" if ratio is not None else "-",
            equal,
        )
    return table
