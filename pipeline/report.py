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

from pipeline.config import tracking_environment
from pipeline.tracking.tracker import DEFAULT_URI, tracking_uri
from shards.base import cli
from shards.base.settings import Names, Settings

if TYPE_CHECKING:
    from pipeline.reports.run_table import Result


class ReportConfig(Settings):
    experiment: Names = Field(
        [],
        description="MLflow experiments, separated by commas; none = MLFLOW_EXPERIMENT_NAME, then all; `experiment=` = all",
    )
    uri: str = Field("", description=f"MLflow tracking URI; empty = MLFLOW_TRACKING_URI, then {DEFAULT_URI}")
    out: str = Field("report", min_length=1, description="folder for report.html and report.md")


COMMAND = cli.Command(
    "python -m pipeline.report", "Compare the runs in MLflow, beside the paper's tables.", ReportConfig
)


def print_comparison(runs: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.table import Table as Grid

    from pipeline.reports.document import DIFFERS
    from pipeline.reports.report import comparison_table
    from pipeline.reports.run_table import compare, titles

    console = Console(width=None if sys.stdout.isatty() else 110)
    compared = compare(runs)
    named = titles(compared)
    for variant, rows in compared.items():
        header, body = comparison_table(rows)
        grid = Grid(title=named[variant], title_justify="left")
        for column, name in enumerate(header):
            grid.add_column(name, justify="left" if column == 0 or name == DIFFERS else "right", overflow="fold")
        for line in body:
            grid.add_row(*line)
        console.print(grid)
        for row in rows:
            console.print(f"{row.label}: run {', '.join(run.run_id for run in row.runs)}", style="dim", soft_wrap=True)


def main(argv: list[str]) -> int:
    config = COMMAND.load(argv)
    from pipeline.reports.report import write_report
    from pipeline.tracking.ui import ui_line_of_id

    out = Path(config.out)
    uri, experiments = tracking_uri(config.uri), config.experiment
    if "experiment" not in config.model_fields_set:
        experiments = [name for key, name in tracking_environment().items() if key == "experiment"]
    runs = write_report(uri, experiments, out)
    print_comparison(runs)
    print(f"wrote {out / 'report.html'} and {out / 'report.md'}")
    found = {run.experiment_id for run in runs}
    print(f"the runs in MLflow: {ui_line_of_id(uri, found.pop() if len(found) == 1 else '')}")
    return 0


def start() -> None:
    cli.run(main)


if __name__ == "__main__":
    start()
