"""`python -m pipeline.audit RUN`: the labels that are probably wrong, from a model trained by any method.

Writes audit.parquet and audit.csv (every training sample), audit.html (the most suspicious ones of each
class, with thumbnails and a filter) and, with --apply, a corrected label list for `shards.build source=list`.
Where the true labels are known it says how good the list is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shards.base import cli
from shards.base.errors import UserError
from shards.base.files import output_folder

if TYPE_CHECKING:
    from pipeline.inference.open_run import OpenedRun
    from pipeline.reports.audit import Findings


def report(findings: Findings, classes: list[str]) -> None:
    """The rates by class and, where the truth is known, how good the list is."""
    from rich.console import Console
    from rich.table import Table

    from pipeline.reports.audit import detection_quality, rates

    console = Console(width=None if Console().is_terminal else 100)
    found = rates(findings, len(classes))
    order = sorted(range(len(classes)), key=lambda k: -found[k].share if found[k].total else 1)
    grid = Table(title="labels that look wrong, by class", title_justify="left")
    for name in ("class", "given", "suspicious", "share", "95 % interval"):
        grid.add_column(name, justify="left" if name == "class" else "right")
    for k in order[:20]:
        low, high = found[k].interval
        grid.add_row(
            classes[k],
            str(found[k].total),
            str(found[k].flagged),
            f"{found[k].share:.1%}",
            f"{low:.1%} to {high:.1%}",
        )
    console.print(grid)
    if len(classes) > 20:
        console.print(f"... and {len(classes) - 20} more classes in audit.html")
    judged = detection_quality(findings)
    if judged:
        console.print("against the true labels: " + ", ".join(f"{name} {value:.3f}" for name, value in judged.items()))


def log_to_mlflow(opened: OpenedRun, uri: str, out: Path) -> None:
    """Store tables and page among the artifacts of the run."""
    from pipeline.tracking.mlflow_sync import mlflow_client
    from pipeline.tracking.tracker import tracking_uri

    own = opened.model.config.tracking.uri
    uri = uri or (own if own and "***" not in own else tracking_uri())
    with mlflow_client(uri) as client:
        for name in ("audit.html", "audit.csv", "audit.parquet"):
            client.log_artifact(opened.run_id, str(out / name), "audit")
    print(f"kept with MLflow run {opened.run_id}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.audit", description="Find the labels that are probably wrong."
    )
    parser.add_argument("run", metavar="RUN", help="output folder, checkpoint, MLflow run id or MLflow model")
    parser.add_argument("--out", type=Path, help="folder for the results (default: RUN/audit, or ./audit)")
    parser.add_argument(
        "--threshold",
        type=float,
        help="suspicious: confidence in the given label at most this; default: the method's own rule",
    )
    parser.add_argument("--shards", default="", help="the run's training shards, if they have moved")
    parser.add_argument("--per-class", type=int, default=12, help="thumbnails of each class on the page (default 12)")
    parser.add_argument(
        "--apply",
        nargs="?",
        const="relabel",
        choices=["relabel", "drop"],
        help="write a label list with suspicious labels corrected (or their samples dropped)",
    )
    parser.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
    parser.add_argument("--uri", default="", help="MLflow tracking URI, for run ids and MLflow models")
    parser.add_argument("--log", action="store_true", help="also keep the results with the MLflow run")
    options = parser.parse_args(argv)
    if options.threshold is not None and not 0 <= options.threshold <= 1:
        raise UserError("--threshold is a confidence: give a number from 0 to 1.")
    from pipeline.inference.open_run import open_run
    from pipeline.reports.audit import apply, audit_labels, write_tables
    from pipeline.reports.audit_page import write_page

    opened = open_run(options.run, options.uri, options.best, options.shards, own_labels=True)
    if options.log and not opened.run_id:
        raise UserError(f"--log: {opened.name} does not say which MLflow run it belongs to. Give the run id as RUN.")
    split = opened.split("train", options.shards)
    inside = Path(options.run) if (Path(options.run) / "checkpoints").is_dir() else Path()
    out = output_folder(options.out or inside / "audit")
    findings = audit_labels(opened, split, options.threshold)
    write_tables(findings, split, out)
    name = opened.name + (f", MLflow run {opened.run_id}" if opened.run_id else "")
    write_page(findings, split, name, out / "audit.html", options.per_class)
    report(findings, list(split.classes))
    print(f"wrote audit.html, audit.csv and audit.parquet to {out}")
    if options.log:
        log_to_mlflow(opened, options.uri, out)
    if options.apply:
        test = opened.split("test", options.shards) if "test" in split.manifest.splits else None
        command = apply(findings, opened, split, test, out, options.apply)
        print(f"wrote {out / 'labels.csv'}; build shards from it with\n  {command}")
    return 0


if __name__ == "__main__":
    cli.run(main)
