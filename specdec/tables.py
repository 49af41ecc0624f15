"""What the engine counts, as lines and tables for a terminal."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from specdec.drafters.adaptive import CrossoverRow
    from specdec.outputs import GenerationStats
    from specdec.verifier.graph import GraphRow


def format_bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def plain_table(
    title: str, left: Sequence[str], right: Sequence[str], *, dense: bool = False
) -> Table:
    """A table without lines; ``left`` and ``right`` name the columns and say how they align."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 0 if dense else 1, 0, 0),
    )
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def graph_table(rows: "Iterable[GraphRow]", title: str = "Captured graphs") -> Table:
    """One line per captured graph: what it holds, what it cost, how often it was replayed."""
    rows = list(rows)
    numbers = ["requests", "tokens", "memory", "capture", "replays"]
    with_lora = any(row.descriptor.has_lora for row in rows)
    left = ["role", "mode", "variant", "query"] + ["LoRA"] * with_lora
    table = plain_table(title, left, numbers, dense=True)
    for row in rows:
        shape = row.descriptor
        query = f"1 + {shape.num_tokens // shape.num_reqs - 1}" if shape.uniform else "mixed"
        table.add_row(
            row.role,
            row.mode,
            row.variant,
            query,
            *(["yes" if shape.has_lora else "no"] * with_lora),
            str(shape.num_reqs or "any"),
            str(shape.num_tokens),
            format_bytes(row.num_bytes),
            f"{row.capture_seconds * 1000:.0f} ms",
            str(row.replays),
        )
    return table


def crossover_table(rows: "Sequence[CrossoverRow]") -> Table:
    """With k="auto": which k wins, and the tokens/s of each request that every k promises."""
    widths = sorted({k for row in rows for k in row.tokens_per_second})
    title = "k=auto: tokens/s of each request by k, from measured costs and the acceptance so far"
    with_lora = any(row.has_lora for row in rows)
    names = ["requests", "context", "best k", *(f"k={k}" for k in widths)]
    table = plain_table(title, ["LoRA"] * with_lora, names)
    for row in rows:
        table.add_row(
            *(["yes" if row.has_lora else "no"] * with_lora),
            str(row.num_reqs),
            str(row.context),
            str(row.best_k),
            *(f"{row.tokens_per_second[k]:.1f}" for k in widths),
        )
    return table


def stats_line(stats: "GenerationStats", num_tokens: int, seconds: float) -> str:
    """One line under a text."""
    return (
        f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s) | "
        f"{stats.steps} steps, {stats.drafted} drafted, {stats.accepted} accepted "
        f"({stats.acceptance_rate:.0%}), {stats.mean_tokens_per_step:.2f} tokens per step"
    )
