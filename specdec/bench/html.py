"""One self-contained HTML page of a report, its plots inline."""

import base64
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from specdec.bench import report as words
from specdec.bench.report import Report
from specdec.bench.tables import LEGEND, share_cell

TITLES = {
    "latency": "Acceptance against latency",
    "speedup": "Speed-up against requests",
    "positions": "Acceptance by position",
}


def html_report(report: Report, plots: Mapping[str, Path]) -> str:
    """``plots``: the PNG files to show, {name: path}."""
    import jinja2

    template = files("specdec.bench").joinpath("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(
        report=report,
        caption=words.caption(report),
        differing=words.differing(report),
        repeated=words.repeated_prompts(report),
        simulated=any(point["simulated"] is not None for point in report["points"]),
        images={name: base64.b64encode(path.read_bytes()).decode() for name, path in plots.items()},
        titles=TITLES,
        groups=words.groups(report),
        firsts=words.first_groups(report),
        columns=words.COLUMNS,
        speedup_column=words.SPEEDUP,
        same_column=words.SAME,
        cells=words.cells,
        digits=words.digits,
        k_label=words.k_label,
        share_cell=share_cell,
        widest=lambda points: max(len(p["acceptance_by_position"]) for p in points),
        legend=LEGEND,
        startup=words.startup_lines(report),
    )
