"""The plots of a report: acceptance against latency, the crossover, acceptance by position."""

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.bench.report import (
    Point,
    Report,
    caption,
    first_groups,
    groups,
    k_label,
    requests,
    series_label,
)

PLOTS = ("latency", "speedup", "positions")
PANELS_A_ROW = 4


def plot_report(report: Report, stem: Path) -> dict[str, Path]:
    """Write STEM-latency.png, STEM-speedup.png and STEM-positions.png; {plot: path}.

    Raises ImportError where matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = {}
    for name, draw in zip(PLOTS, (_latency, _speedup, _positions), strict=True):
        figure = draw(report, pyplot)
        figure.suptitle(caption(report), fontsize=8, wrap=True)
        drawn[name] = stem.with_name(f"{stem.name}-{name}.png")
        figure.savefig(drawn[name], dpi=110, metadata={"Source": points_digest(report)})
        pyplot.close(figure)
    return drawn


def points_digest(report: Report) -> str:
    """A short name for a report's points, which its plots carry as the PNG text ``Source``."""
    points = json.dumps(report["points"], sort_keys=True)
    return hashlib.sha256(points.encode()).hexdigest()[:16]


def _latency(report: Report, pyplot: Any) -> Any:
    """Tokens per step against ms per token: one panel per number of requests, a curve a drafter."""
    panels: dict[tuple, list[list[Point]]] = {}
    for points in groups(report).values():
        point = points[0]
        key = (point["num_reqs"], point["context"], point["temperature"])
        panels.setdefault(key, []).append(points)
    wide = min(len(panels), PANELS_A_ROW)
    high = -(-len(panels) // PANELS_A_ROW)
    figure = pyplot.figure(figsize=(max(5.5 * wide, 6.5), 4.4 * high), layout="constrained")
    for panel, ((num_reqs, context, temperature), curves) in enumerate(panels.items(), start=1):
        axis = figure.add_subplot(high, wide, panel)
        for number, points in enumerate(curves):
            real = points[0]["simulated"] is None
            xs = [point["mean_tokens_per_step"] for point in points]
            ys = [point["ms_per_token"]["mean"] for point in points]
            fixed = [i for i, point in enumerate(points) if point["k"] != "auto"]
            style = "o-" if real else "s--"
            line = [xs[i] for i in fixed], [ys[i] for i in fixed]
            axis.plot(*line, style, color=f"C{number}", label=series_label(points[0]), ms=4)
            if len(fixed) < len(points):
                axis.plot(xs[-1], ys[-1], "*", color=f"C{number}", ms=10)
            for point, x, y in zip(points, xs, ys, strict=True):
                place = {"xytext": (3, 4), "textcoords": "offset points", "fontsize": 7}
                axis.annotate(f"k={k_label(point)}", (x, y), **place)
        plain = curves[0][0]["ms_per_token"]["mean"]
        axis.axhline(plain, color="0.6", linestyle=":")
        axis.margins(x=0.1, y=0.1)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("tokens per step")
        axis.set_ylabel("ms per token and user (dotted: k=0)")
        title = [requests(num_reqs)] + [f"prompts of {context}"] * (context is not None)
        title += [f"temperature {temperature:g}"] * bool(temperature)
        axis.set_title(", ".join(title), fontsize=10)
        axis.legend(fontsize=7)
    return figure


def crossover(counts: Sequence[int], speedups: Sequence[float]) -> float | None:
    """The number of requests from which on speculation no longer pays, None where it never turns.

    Where it pays again later, it is the last turn that counts, or none if that is upwards.
    Between two measured counts the speed-up is taken as a line over the logarithm of the count.
    """
    pairs = list(zip(counts, speedups, strict=True))
    for (low, before), (high, after) in reversed(list(itertools.pairwise(pairs))):
        if after >= 1:
            return None
        if before >= 1:
            share = (before - 1) / (before - after)
            return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return None


def _speedup(report: Report, pyplot: Any) -> Any:
    """Speed-up over k=0 against the number of requests, a line per drafter and k."""
    lines: dict[str, list[Point]] = {}
    for point in report["points"]:
        if point["k"] != 0:
            words = [series_label(point), f"k={point['k']}"]
            words += [f"prompts of {point['context']}"] * (point["context"] is not None)
            words += [f"t={point['temperature']:g}"] * bool(point["temperature"])
            lines.setdefault(", ".join(words), []).append(point)
    figure, axis = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    for number, (label, points) in enumerate(lines.items()):
        counts = [point["num_reqs"] for point in points]
        speedups = [point["speedup"] for point in points]
        real = points[0]["simulated"] is None
        axis.plot(counts, speedups, "o-" if real else "s--", color=f"C{number}", label=label, ms=4)
        turn = crossover(counts, speedups)
        if turn is not None:
            axis.plot([turn], [1], "X", color=f"C{number}", ms=9, zorder=5)
            place = {"xytext": (0, 7), "textcoords": "offset points", "fontsize": 7}
            axis.annotate(f"{turn:.1f}", (turn, 1), ha="center", **place)
    axis.axhline(1, color="0.5", linestyle=":")
    counts = sorted({point["num_reqs"] for point in report["points"]})
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("requests side by side")
    axis.set_ylabel("tokens/s per user against k=0 (below 1 is slower)")
    axis.set_title("Speed-up, and the crossover (X) where it no longer pays", fontsize=10)
    if lines:
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _positions(report: Report, pyplot: Any) -> Any:
    """Share of drafts accepted at each position, for the widest draft of every curve."""
    figure, axis = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for number, points in enumerate(first_groups(report).values()):
        point = max(points, key=lambda point: len(point["acceptance_by_position"]))
        rates = point["acceptance_by_position"]
        if not rates:
            continue
        lows, highs = zip(*point["acceptance_intervals"], strict=True)
        bars = [
            [rate - low for rate, low in zip(rates, lows, strict=True)],
            [high - rate for rate, high in zip(rates, highs, strict=True)],
        ]
        positions = [position + 0.06 * number for position in range(1, len(rates) + 1)]
        style = "o-" if point["simulated"] is None else "s--"
        axis.errorbar(
            positions, rates, yerr=bars, fmt=style, capsize=3, ms=4, color=f"C{number}",
            label=f"{series_label(point)}, k={point['k']}",
        )  # fmt: skip
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("position in the draft")
    axis.set_ylabel("share accepted, with 95% interval (Wilson)")
    axis.set_title("Accepted, by position", fontsize=10)
    if axis.has_data():
        axis.legend(fontsize=7)
        axis.xaxis.get_major_locator().set_params(integer=True)
    return figure
