"""The report of the conformance suite: cases run and refused, by backend."""

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: Counter[str] = Counter()
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            counts.update(value for name, value in report.user_properties if name == "attention")
    if counts:
        terminalreporter.section("attention conformance")
    for backend in sorted({" ".join(line.split()[:2]) for line in counts}):
        words = [f"{counts[f'{backend} {kind}']} {kind}" for kind in ("run", "refused", "left out")]
        terminalreporter.line(f"{backend}: {', '.join(words)}")
