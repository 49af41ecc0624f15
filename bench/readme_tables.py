"""Write the README's tables from recorded results: ``python bench/readme_tables.py [--check]``.

A table stands between ``<!-- table: bench/results/FILE.json k=0,4 -->`` (the choice of k is
optional) and ``<!-- end of table -->``.
"""

import argparse
import re
import sys
from pathlib import Path

from specdec.bench.report import markdown, read_report

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"(?P<head><!-- table: (?P<file>\S+)(?: k=(?P<ks>[\d,]+))? -->\n)"
    r".*?(?P<end><!-- end of table -->)",
    re.DOTALL,
)


def updated(text: str) -> str:
    """The document with every table made anew."""

    def table(match: re.Match[str]) -> str:
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
