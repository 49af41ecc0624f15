"""What the doctor finds: facts, checks and measurements, for people and for programs."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

OK, WARNING, FAULT, UNSEEN = "ok", "warning", "fault", "unseen"
STYLES = {OK: "green", WARNING: "yellow", FAULT: "bold red", UNSEEN: "dim"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """Something that is used, and why."""

    name: str
    value: str
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One question, what was found, and one line of what to do.

    ``status``: "ok", "warning" (it works, and something is lost), "fault" (it does not work as it
    must) or "unseen" (nothing here can tell, and ``found`` says why).
    """

    name: str
    status: str
    found: str
    todo: str = ""

    def __post_init__(self) -> None:
        assert self.status in STYLES, self.status
        assert self.todo or self.status in (OK, UNSEEN), f"{self.name}: what is to be done?"


@dataclass(kw_only=True, slots=True)
class Report:
    """All that one run of the doctor has to say."""

    model: str
    draft: str
    k: str
    device: str
    plan: list[Fact] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    acceptance: dict[str, Any] | None = None  # figures of the acceptance test
    lossless: dict[str, Any] | None = None  # figures of --verify-lossless

    def add(self, checks: Iterable[Check]) -> None:
        self.checks.extend(checks)

    def count(self, status: str) -> int:
        return sum(check.status == status for check in self.checks)

    @property
    def exit_code(self) -> int:
        return int(self.count(FAULT) > 0)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"exit_code": self.exit_code}

    def write(self, path: str | Path) -> None:
        text = json.dumps(self.as_dict(), indent=2, ensure_ascii=False)
        Path(path).write_text(text + "\n", encoding="utf-8")


def show(report: Report, console: Console) -> None:
    """Print the report for people."""
    line = f"{report.model}, draft {report.draft}, k={report.k}, on {report.device}"
    console.print(Text(line, style="bold"), soft_wrap=True)
    if report.plan:
        console.print("\nWhat is used", style="bold")
        console.print(_fact_table(report.plan))
    console.print("\nChecks", style="bold")
    console.print(_check_table(report.checks))
    console.print(Text(f"\n{_summary(report)}", style="bold"), soft_wrap=True)


def _fact_table(facts: Iterable[Fact]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for fact in facts:
        value = Text(fact.value)
        if fact.why:
            value.append(f"  ({fact.why})", style="dim")
        table.add_row(Text(f"  {fact.name}"), value)
    return table


def _check_table(checks: Iterable[Check]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        found = Text(check.found)
        if check.todo:
            found.append(f"\n-> {check.todo}", style=STYLES[check.status])
        table.add_row(
            Text(f"  {check.status}", style=STYLES[check.status]), Text(check.name), found
        )
    return table


def _summary(report: Report) -> str:
    counts = [(report.count(FAULT), "fault"), (report.count(WARNING), "warning")]
    parts = [f"{count} {name}{'s' * (count != 1)}" for count, name in counts]
    unseen = report.count(UNSEEN)
    return ", ".join(parts) + (f"; {unseen} not seen" if unseen else "")
