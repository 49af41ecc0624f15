"""What the engine counts, as lines and tables for a terminal."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from specdec.outputs import GenerationStats
    from specdec.verifier.modes import BatchDescriptor


class GraphRow(Protocol):
    """One row of ``Engine.graph_table()``."""

    role: str
    mode: str
    descriptor: "BatchDescriptor"
    variant: str
    num_bytes: int
    capture_seconds: float
    replays: int


def format_bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def plain_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """A table narrow enough for 80 columns; ``left`` and ``right`` say how columns align."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def graph_table(rows: Iterable[GraphRow], title: str = "Captured graphs") -> Table:
    """One line per captured graph: what it holds, what it cost, how often it was replayed."""
    rows = list(rows)
    numbers = ["requests", "tokens", "memory", "capture", "replays"]
    with_lora = any(row.descriptor.has_lora for row in rows)
    left = ["role", "mode", "variant", "query"] + ["LoRA"] * with_lora
    table = plain_table(title, left, numbers)
    for row in rows:
        shape = row.descriptor
        query = f"1 + {shape.num_tokens // shape.num_reqs - 1}" if shape.uniform else "mixed"
        table.add_row(
            row.role,
            row.mode,
            row.variant,
            query,
            *(["yes" if shape.has_lora else "no"] * with_lora),
            str(shape.num_reqs),
            str(shape.num_tokens),
            format_bytes(row.num_bytes),
            f"{row.capture_seconds * 1000:.0f} ms",
            str(row.replays),
        )
    return table


def coverage(rows: Iterable[GraphRow]) -> str:
    """Up to how many requests each number of drafts has a FULL graph, and what that cost."""
    rows = list(rows)
    widest: dict[int, int] = {}
    for row in rows:
        shape = row.descriptor
        if row.mode == "FULL" and shape.uniform and row.role in {"step", "target"}:
            num_drafts = shape.num_tokens // shape.num_reqs - 1
            widest[num_drafts] = max(widest.get(num_drafts, 0), shape.num_reqs)
    if not widest:
        return "no FULL graph: every step runs without one"
    reach = ", ".join(f"{count} at k={k}" for k, count in sorted(widest.items()))
    seconds = sum(row.capture_seconds for row in rows)
    memory = format_bytes(sum(row.num_bytes for row in rows))
    cost = f"{len(rows)} graphs, {seconds:.1f} s, {memory}"
    return f"FULL graphs up to this many requests: {reach} ({cost})"


def stats_line(stats: "GenerationStats", num_tokens: int, seconds: float) -> str:
    """One line under a text."""
    return (
        f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s) | "
        f"{stats.steps} steps, {stats.drafted} drafted, {stats.accepted} accepted "
        f"({stats.acceptance_rate:.0%}), {stats.mean_tokens_per_step:.2f} tokens per step"
    )
