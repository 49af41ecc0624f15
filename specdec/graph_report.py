"""What an engine says about its graphs: a line, a progress bar at start-up, and a plot."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.graphs import Progress
    from specdec.verifier.graph import GraphRow

DECODE_ROLES = ("step", "target")


def start_up_line(rows: "Sequence[GraphRow]", seconds: float) -> str:
    """Up to where batches have graphs, and what capturing them took."""
    parts = _coverage([row for row in rows if not row.descriptor.has_lora])
    if not parts:
        return "no graphs were captured at start-up"
    adapted = _coverage([row for row in rows if row.descriptor.has_lora])
    if adapted == parts:
        parts.append("all of it with adapters too")
    elif adapted:
        parts.append(f"with adapters {', '.join(adapted)}")
    num_bytes = sum(row.num_bytes for row in rows)
    return "; ".join([*parts, f"{seconds:.1f} s", f"{num_bytes / 2**20:.0f} MiB"])


def _coverage(rows: "Sequence[GraphRow]") -> list[str]:
    reach: dict[int, list[int]] = {}
    for k, counts in sorted(uniform_counts(rows).items()):
        reach.setdefault(max(counts), []).append(k)
    parts = [
        f"FULL up to {most} requests at {' and '.join(f'k={k}' for k in ks)}"
        for most, ks in sorted(reach.items(), reverse=True)
    ]
    for mode in ("FULL", "PIECEWISE"):
        sizes = [r.descriptor.num_tokens for r in rows if r.mode == mode and is_flat(r)]
        if sizes:
            parts.append(f"{mode} with prompts up to {max(sizes)} tokens")
    return parts


def uniform_counts(rows: "Iterable[GraphRow]") -> dict[int, list[int]]:
    """Request counts of the FULL graphs of decode steps, ascending, by k."""
    counts: dict[int, set[int]] = {}
    for row in rows:
        if row.mode == "FULL" and row.role in DECODE_ROLES and row.descriptor.uniform:
            counts.setdefault(row.descriptor.query_len - 1, set()).add(row.descriptor.num_reqs)
    return {k: sorted(found) for k, found in counts.items()}


def is_flat(row: "GraphRow") -> bool:
    """It holds batches with prompts."""
    return row.role == "target" and not row.descriptor.uniform


@contextmanager
def start_progress(doing: str) -> "Iterator[Progress | None]":
    """A progress bar on standard error at start-up, "loading" or "capturing" what is named to it;
    None where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    with progress.Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None)

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{doing} {name}")

        yield show


def plot_graphs(rows: "Sequence[GraphRow]", path: Path) -> None:
    """Write a PNG: per kind of batch, the graph each size takes and the share that is padding.

    Raises ValueError where there are no graphs, and ImportError where matplotlib is not installed.
    """
    kinds = {f"decode, k={k}": (counts, "requests") for k, counts in uniform_counts(rows).items()}
    for mode in ("FULL", "PIECEWISE"):
        sizes = sorted({r.descriptor.num_tokens for r in rows if r.mode == mode and is_flat(r)})
        if sizes:
            kinds[f"with prompts, {mode}"] = (sizes, "tokens")
    if not kinds:
        raise ValueError("no graphs were captured, so there is nothing to plot")

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(kinds), figsize=(4.4 * len(kinds), 6), layout="constrained"
    )
    columns = axes.T if len(kinds) > 1 else [axes]
    for (name, (sizes, unit)), (above, below) in zip(kinds.items(), columns, strict=True):
        live = range(1, sizes[-1] + 1)
        padded = [padded_size(sizes, size) for size in live]
        above.plot(live, live, ":", color="0.6", label="no padding")
        above.step(live, padded, where="mid", label=f"graph ({len(sizes)} of them)")
        above.set_title(f"{name}: covered up to {sizes[-1]}", fontsize=10)
        above.set_ylabel(f"{unit} of the graph")
        above.legend(fontsize=8)
        waste = [1 - size / graph for size, graph in zip(live, padded, strict=True)]
        below.fill_between(live, waste, step="mid", alpha=0.5)
        below.set_ylim(0, 1)
        below.set_xlabel(f"{unit} of the batch")
        below.set_ylabel(f"padding, mean {sum(waste) / len(waste):.0%}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def padded_size(sizes: Sequence[int], size: int) -> int:
    """The smallest of the ascending ``sizes`` that holds ``size``."""
    return next(graph for graph in sizes if graph >= size)
