"""`python -m pipeline.audit RUN`: the labels that are probably wrong, from a model trained by any method.

Writes audit.parquet and audit.csv (every training sample), audit.html (the most suspicious ones of each
class, with thumbnails and a filter) and, with apply=relabel or apply=drop, a corrected label list for `shards.build source=list`.
Where the true labels are known it prints how good the list is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from shards.base import cli
from shards.base.errors import UserError
from shards.base.files import output_folder
from shards.base.settings import Settings

if TYPE_CHECKING:
    from pipeline.inference.open_run import OpenedRun
    from pipeline.reports.audit import Findings


class AuditConfig(Settings):
    run: str = Field(description="output folder, checkpoint, MLflow run id or MLflow model")
    out: str = Field("", description="folder for the results; empty = RUN/audit, or ./audit")
    threshold: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="suspicious: confidence in the given label at most this; none = the method's own rule"
    )
    shards: str = Field("", description="the run's training shards, if they have moved")
    per_class: PositiveInt = Field(12, description="thumbnails of each class on the page")
    apply: Literal["none", "relabel", "drop"] = Field(
        "none", description="write a label list with suspicious labels corrected, or without their samples"
    )
    best: bool = Field(False, description="the best checkpoint instead of the newest")
    uri: str = Field("", description="MLflow tracking URI, for run ids and MLflow models")
    log: bool = Field(False, description="also store the results with the MLflow run")


COMMAND = cli.Command(
    "python -m pipeline.audit", "Find the labels that are probably wrong.", AuditConfig, words=("run",)
)


def report(findings: Findings, classes: list[str]) -> None:
    """The rates by class and, where the truth is known, how good the list is."""
    from rich.console import Console
    from rich.table import Table

    from pipeline.reports.audit import detection_quality, rates

    console = Console(width=None if Console().is_terminal else 100)
    by_class = rates(findings, len(classes))
    order = sorted(range(len(classes)), key=lambda k: -by_class[k].share if by_class[k].total else 1)
    grid = Table(title="labels that look wrong, by class", title_justify="left")
    for name in ("class", "given", "suspicious", "share", "95 % interval"):
        grid.add_column(name, justify="left" if name == "class" else "right")
    for k in order[:20]:
        low, high = by_class[k].interval
        grid.add_row(
            classes[k],
            str(by_class[k].total),
            str(by_class[k].flagged),
            f"{by_class[k].share:.1%}",
            f"{low:.1%} to {high:.1%}",
        )
    console.print(grid)
    if len(classes) > 20:
        console.print(f"... and {len(classes) - 20} more classes in audit.html")
    quality = detection_quality(findings)
    if quality:
        console.print("against the true labels: " + ", ".join(f"{name} {value:.3f}" for name, value in quality.items()))


def log_to_mlflow(opened: OpenedRun, uri: str, out: Path) -> None:
    """Store tables and page among the artifacts of the run."""
    from pipeline.tracking.mlflow_sync import mlflow_client
    from pipeline.tracking.tracker import tracking_uri

    own = opened.model.config.tracking.uri
    uri = uri or (own if own and "***" not in own else tracking_uri())
    with mlflow_client(uri) as client:
        for name in ("audit.html", "audit.csv", "audit.parquet"):
            client.log_artifact(opened.run_id, str(out / name), "audit")
    print(f"stored with MLflow run {opened.run_id}")


def main(argv: list[str]) -> int:
    config = COMMAND.load(argv)
    from pipeline.inference.open_run import open_run
    from pipeline.reports.audit import apply, audit_labels, write_tables
    from pipeline.reports.audit_page import write_page

    opened = open_run(config.run, config.uri, config.best, config.shards, own_labels=True)
    if config.log and not opened.run_id:
        raise UserError(f"log=true: {opened.name} does not say which MLflow run it belongs to. Give the run id as RUN.")
    split = opened.split("train", config.shards)
    run_folder = Path(config.run) if (Path(config.run) / "checkpoints").is_dir() else Path()
    out = output_folder(Path(config.out) if config.out else run_folder / "audit")
    findings = audit_labels(opened, split, config.threshold)
    write_tables(findings, split, out)
    name = opened.name + (f", MLflow run {opened.run_id}" if opened.run_id else "")
    write_page(findings, split, name, out / "audit.html", config.per_class)
    report(findings, list(split.classes))
    print(f"wrote audit.html, audit.csv and audit.parquet to {out}")
    if config.log:
        log_to_mlflow(opened, config.uri, out)
    if config.apply != "none":
        test = opened.split("test", config.shards) if "test" in split.manifest.splits else None
        command = apply(findings, opened, split, test, out, config.apply)
        print(f"wrote {out / 'labels.csv'}; build shards from it with\n  {command}")
    return 0


def start() -> None:
    cli.run(main)


if __name__ == "__main__":
    start()
