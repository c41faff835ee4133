"""`python -m pipeline.report [experiment=A,B] [uri=URI] [out=DIR]`: compare the runs in MLflow.

Writes report.html (one file that loads nothing), report.md and the figures, and prints the comparison. Every
number of ours is shown with the ids of its runs. A cell of the paper's tables without a run says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from pipeline.tracking.tracker import DEFAULT_URI, tracking_uri
from shards.base import cli
from shards.base.settings import Names, Settings

if TYPE_CHECKING:
    from pipeline.reports.run_table import Result


class ReportConfig(Settings):
    experiment: Names = Field([], description="MLflow experiments, separated by commas; none = all")
    uri: str = Field("", description=f"MLflow tracking URI; empty = MLFLOW_TRACKING_URI, then {DEFAULT_URI}")
    out: str = Field("report", min_length=1, description="folder for report.html and report.md")


COMMAND = cli.Command(
    "python -m pipeline.report", "Compare the runs in MLflow, beside the paper's tables.", ReportConfig
)


def print_comparison(runs: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.table import Table as Grid

    from pipeline.reports.report import comparison_table, variant_title
    from pipeline.reports.run_table import compare

    console = Console(width=None if sys.stdout.isatty() else 110)
    for variant, rows in compare(runs).items():
        header, body = comparison_table(rows)
        grid = Grid(title=variant_title(variant), title_justify="left")
        for column, name in enumerate(header):
            grid.add_column(name, justify="left" if column == 0 else "right", overflow="fold")
        for line in body:
            grid.add_row(*line)
        console.print(grid)
        for row in rows:
            console.print(f"{row.label}: run {', '.join(run.run_id for run in row.runs)}", style="dim", soft_wrap=True)


def main(argv: list[str]) -> int:
    config = COMMAND.load(argv)
    from pipeline.reports.report import write_report

    out = Path(config.out)
    runs = write_report(tracking_uri(config.uri), config.experiment, out)
    print_comparison(runs)
    print(f"wrote {out / 'report.html'} and {out / 'report.md'}")
    return 0


def start() -> None:
    cli.run(main)


if __name__ == "__main__":
    start()
