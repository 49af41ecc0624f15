"""Acceptance against latency, for every k: ``python bench/acceptance_vs_latency.py --help``."""

import typer

from specdec.bench.command import bench
from specdec.cli import run

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(bench)
    run(app)
