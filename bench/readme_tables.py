"""Write the README's tables from recorded results: ``python bench/readme_tables.py [--check]``.

A table stands between ``<!-- table: bench/results/FILE.json k=0,4 -->`` (the choice of k is
optional) and ``<!-- end of table -->``.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from specdec.bench.report import markdown, read_report

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"(?P<head><!-- table: (?P<file>\S+)(?: k=(?P<ks>[\d,]+))? -->\n)"
    r".*?(?P<end><!-- end of table -->)",
    re.DOTALL,
)


def full_graphs(path: Path, source: str) -> str:
    """The table of ``bench/full_graphs.py``: each case with its drafter and without.

    A model that was measured twice without a drafter is compared with the faster of the two.
    """
    report = json.loads(path.read_text(encoding="utf-8"))
    environment, rows = report["environment"], report["results"]
    plain: dict[tuple[str, int], float] = {}
    for row in rows:
        if row["k"] == 0:
            key = _model(row), row["num_reqs"]
            plain[key] = max(plain.get(key, 0.0), row["tokens_per_second_and_user"])
    lines = [
        f"One {environment['device']['name']}, bfloat16, greedy; every decode step replays a FULL "
        "graph. Tokens per second for each user:",
        "",
        "| model, drafter | requests | k=0 | k=4 | gain | ms a step (weights alone) | same text |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if row["k"] == 0:
            continue
        assert not row["decode_steps_by_mode"]["NONE"] + row["decode_steps_by_mode"]["PIECEWISE"]
        without = plain[_model(row), row["num_reqs"]]
        cells = [
            row["case"],
            str(row["num_reqs"]),
            f"{without:.0f}",
            f"{row['tokens_per_second_and_user']:.0f}",
            f"{row['tokens_per_second_and_user'] / without:.2f}x",
            f"{row['ms_per_step']:.2f} ({row['floor_ms_per_step']:.2f})",
            "yes" if row["texts_equal_without_drafter"] else "NO",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    versions = environment["versions"]
    date = environment["date"][:10]
    lines += [
        "",
        f"From `{source}`: {date}, torch {versions['torch']}, Triton {versions['triton']}.",
    ]
    return "\n".join(lines)


def _model(row: dict[str, Any]) -> str:
    return str(row["case"]).partition(", ")[0]


def updated(text: str) -> str:
    """The document with every table made anew."""

    def table(match: re.Match[str]) -> str:
        if Path(match["file"]).name.startswith("full_graphs"):
            made = full_graphs(ROOT / match["file"], match["file"])
            return f"{match['head']}{made}\n{match['end']}"
        report = read_report(ROOT / match["file"])
        if match["ks"]:
            wanted = {int(k) for k in match["ks"].split(",")}
            report["points"] = [p for p in report["points"] if p["k"] in wanted]
        return f"{match['head']}{markdown(report, match['file'])}\n{match['end']}"

    return BLOCK.sub(table, text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the README's tables from their files.")
    parser.add_argument("--check", action="store_true", help="only say whether they agree")
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = updated(before)
    if parser.parse_args().check:
        sys.exit("README.md differs from bench/results" if before != after else 0)
    readme.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
