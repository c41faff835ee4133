"""`python -m pipeline.report [--experiment NAME ...] [--uri URI] [--out DIR]`: what the runs in MLflow
amount to.

Writes report.html (one file, nothing loaded from anywhere), report.md and the pictures, and prints the
comparison. Every number of ours stands with the ids of the runs it comes from; a cell of the paper's tables
that nobody ran says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.tracking.tracker import DEFAULT_URI, tracking_uri
from shards.base import cli

if TYPE_CHECKING:
    from pipeline.reports.run_table import Result


def print_comparison(runs: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.table import Table as Grid

    from pipeline.reports.report import comparison_table, variant_title
    from pipeline.reports.run_table import compare

    console = Console(width=None if sys.stdout.isatty() else 110)
    for variant, rows in compare(runs).items():
        header, body = comparison_table(rows)
        grid = Grid(title=variant_title(variant), title_justify="left")
        for place, name in enumerate(header):
            grid.add_column(name, justify="left" if place == 0 else "right", overflow="fold")
        for line in body:
            grid.add_row(*line)
        console.print(grid)
        for row in rows:
            console.print(f"{row.label}: run {', '.join(run.run_id for run in row.runs)}", style="dim", soft_wrap=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.report", description="Compare the runs in MLflow, beside the paper's tables."
    )
    parser.add_argument(
        "--experiment",
        action="append",
        default=[],
        help="MLflow experiment; may be given several times; default: all",
    )
    parser.add_argument(
        "--uri", default="", help=f"MLflow tracking URI; default: MLFLOW_TRACKING_URI, then {DEFAULT_URI}"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report"),
        help="folder for report.html and report.md (default: report)",
    )
    options = parser.parse_args(argv)
    from pipeline.reports.report import write_report

    runs = write_report(tracking_uri(options.uri), options.experiment, options.out)
    print_comparison(runs)
    print(f"wrote {options.out / 'report.html'} and {options.out / 'report.md'}")
    return 0


if __name__ == "__main__":
    cli.run(main)
