"""`python -m pipeline.audit RUN`: the labels that are probably wrong, from a model trained by any method.

Writes audit.parquet and audit.csv (every training sample), audit.html (all that is suspicious, to decide about) and, with
`apply`, a corrected label list for `shards.build source=list`. Labels are judged by models that have not learned them,
where features of a frozen backbone are stored. Where the true labels are known it prints how good the list is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from shards.base import cli
from shards.base.errors import UserError
from shards.base.files import output_folder
from shards.base.progress import Progress
from shards.base.settings import Settings

if TYPE_CHECKING:
    from pipeline.inference.open_run import OpenedRun
    from pipeline.reports.audit.decisions import Decisions
    from pipeline.reports.audit.findings import Findings
    from pipeline.reports.audit.issues import Issue
    from shards.features import FeatureSplit
    from shards.findings import PictureFindings
    from shards.reader import Split

Action = Literal["decisions", "relabel", "drop", "drop-outliers", "drop-duplicates", "drop-leaks", "drop-faulty"]
DECISIONS = "decisions.csv"  # the name under which the page exports
LOOK_UP_TO = 20_000  # pictures that are looked through unasked


def _words(value: Any) -> Any:
    """`drop,drop-leaks` as a list; `none` as an empty one."""
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",")]
    return [] if value in (None, ["none"], [""]) else value


class AuditConfig(Settings):
    run: str = Field(description="output folder, checkpoint, MLflow run id or MLflow model")
    out: str = Field("", description="folder for the results; empty = RUN/audit, or ./audit")
    threshold: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="suspicious: confidence in the given label at most this; none = the method's own rule"
    )
    shards: str = Field("", description="the run's training shards, if they have moved")
    per_class: PositiveInt = Field(12, description="thumbnails of each class on the page")
    features: str = Field("", description="stored features to judge by (folder or URL); empty = those of the run")
    simulations: Annotated[int, Field(ge=0)] = Field(
        6, description="simulated judgements, for the intervals; less than 2: no intervals, and apply does nothing"
    )
    pictures: bool | None = Field(
        None,
        description=f"look for copies, test pictures in train and faults, in one pass over all pictures; none: if there are at "
        f"most {LOOK_UP_TO:,} pictures, and they are local",
    )
    decisions: str = Field(
        "",
        description=f"what was decided on the page (.csv, .json); empty = {DECISIONS} in the folder of the results, if it is there",
    )
    apply: Annotated[list[Action], BeforeValidator(_words)] = Field(
        default=[],
        description="write a corrected label list: one or several of these, separated by commas, or a file of decisions; "
        "what people decided always counts, and what is not sure stays",
    )
    precision: Annotated[float, Field(ge=0.5, le=1)] = Field(
        0.9, description="apply acts on a label only if that is right with at least this probability"
    )
    best: bool = Field(False, description="the best checkpoint instead of the newest")
    uri: str = Field("", description="MLflow tracking URI, for run ids and MLflow models")
    export: Literal["none", "cleanlab", "fiftyone"] = Field(
        "none", description="also write the findings with cleanlab's column names, or as a data set that FiftyOne reads"
    )
    log: bool = Field(False, description="also store the results with the MLflow run")

    @model_validator(mode="before")
    @classmethod
    def _file_of_decisions(cls, values: Any) -> Any:
        """`apply=decisions.csv` names file and action at once."""
        named = values.get("apply") if isinstance(values, dict) else None
        if isinstance(named, str) and named.endswith((".csv", ".json")) and not values.get("decisions"):
            return {**values, "apply": "decisions", "decisions": named}
        return values


COMMAND = cli.Command(
    "python -m pipeline.audit", "Find the labels that are probably wrong.", AuditConfig, words=("run",)
)


def report(findings: Findings, classes: list[str]) -> None:
    """The share of wrong labels, in all and by class and, where the truth is known, how good the list is."""
    from rich.console import Console
    from rich.table import Table

    from pipeline.reports.audit.findings import detection_quality, rates, summary_line, wrong_share

    console = Console(width=None if Console().is_terminal else 100)
    by_class, everything = rates(findings, len(classes)), wrong_share(findings, len(classes))
    order = sorted(range(len(classes)), key=lambda k: -by_class[k].share if by_class[k].total else 1)
    grid = Table(title="wrong labels by class", title_justify="left")
    for name in ("class", "labels", "suspicious", "estimated wrong", "95 % interval"):
        grid.add_column(name, justify="left" if name == "class" else "right")
    for k in order[:20]:
        one = by_class[k]
        estimate = (f"{one.share:.1%}", f"{one.low:.1%} to {one.high:.1%}") if one.judged else ("not judged", "")
        grid.add_row(classes[k], str(one.total), str(one.flagged), *estimate)
    console.print(grid)
    if len(classes) > 20:
        console.print(f"... and {len(classes) - 20} more classes in audit.html")
    console.print(summary_line(findings, everything))
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
        for name in ("audit.html", "audit.csv", "audit.parquet", "audit.json"):
            client.log_artifact(opened.run_id, str(out / name), "audit")
    print(f"stored with MLflow run {opened.run_id}")


def features_of(opened: OpenedRun, split: Split, url: str) -> FeatureSplit | None:
    """The stored features of the training samples, given or the run's own; None if there are none."""
    from shards.features import FeatureSplit, read_features

    place = url or opened.features
    about = read_features(place) if place else None
    if about is not None and about.shards == split.manifest.hash and "train" in about.splits:
        return FeatureSplit(place, "train", about, opened.model.config.data.cache)
    if url:
        reason = "are none" if about is None else "are features of other shards"
        raise UserError(f"There {reason} at {url}. Compute them: python -m pipeline.embed {split.url} --config photos.")
    return None


def decisions_of(config: AuditConfig, out: Path, split: Split) -> Decisions | None:
    """What people decided: in the file that was named, or beside the page."""
    from pipeline.reports.audit.decisions import read_decisions

    path = Path(config.decisions) if config.decisions else out / DECISIONS
    if not config.decisions and not path.is_file():
        if "decisions" in config.apply:
            raise UserError(f"There is no {path}. Export it from audit.html, or name the file: apply=FILE.csv.")
        return None
    found = read_decisions(path, split)
    print(f"{path}: {found.decided} decisions")
    return found


def look_at_pictures(config: AuditConfig, splits: dict[str, Split]) -> PictureFindings | None:
    """Copies, leaks and faults, if they were asked for or take little time."""
    from pipeline.reports.audit.actions import OF_PICTURES
    from pipeline.reports.audit.pictures import audit_pictures

    total, split = sum(map(len, splits.values())), splits["train"]
    asked = config.pictures if config.pictures is not None or not set(OF_PICTURES) & set(config.apply) else True
    if not split.info.shards:
        if asked:
            raise UserError("pictures=true needs tars, and there are FFCV files only. Build with format=both.")
        return None
    if asked or (asked is None and split.store.root is not None and total <= LOOK_UP_TO):
        with Progress(total, "pictures", print, bar=True) as progress:
            return audit_pictures(splits, progress.step)
    return None


def write_corrections(
    config: AuditConfig,
    findings: Findings,
    pictures: PictureFindings | None,
    decisions: Decisions | None,
    opened: OpenedRun,
    splits: dict[str, Split],
    out: Path,
) -> None:
    import numpy as np

    from pipeline.reports.audit.actions import corrected_by, forecast
    from pipeline.reports.audit.corrections import write_list

    split = splits["train"]
    classes = len(split.classes)
    done = corrected_by(config.apply, findings, pictures, decisions, classes, config.precision)
    if text := forecast(config.apply, findings, classes, config.precision):
        print(text)
    if done.spared:
        names = ", ".join(split.classes[k] for k in done.spared[:10]) + (", ..." if len(done.spared) > 10 else "")
        print(f"nothing would be left of {names}: labels given as such are kept, but for what people decided")
    dropped, relabelled = int((~done.keep).sum()), int((done.label != findings.given)[done.keep].sum())
    print(f"{dropped} samples dropped, {relabelled} relabelled; {int(np.sum(done.keep)) - relabelled} as they were")
    command = write_list(done, opened, splits, out)
    print(f"wrote {out / 'labels.csv'}; build shards from it with\n  {command}")


def print_issues(issues: Sequence[Issue]) -> None:
    """How many samples each kind of trouble has."""
    print("; ".join(f"{issue.title.lower()}: {len(issue.samples)}" for issue in issues))


def main(argv: list[str]) -> int:
    config = COMMAND.load(argv)
    from pipeline.inference.open_run import open_run
    from pipeline.reports.audit import exports
    from pipeline.reports.audit.corrections import roots_of
    from pipeline.reports.audit.decisions import remembered
    from pipeline.reports.audit.findings import audit_labels
    from pipeline.reports.audit.issues import label_issues
    from pipeline.reports.audit.page import write_page
    from pipeline.reports.audit.pictures import columns, picture_issues
    from pipeline.reports.audit.tables import write_summary, write_tables

    opened = open_run(config.run, config.uri, config.best, config.shards, own_labels=True)
    if config.log and not opened.run_id:
        raise UserError(f"log=true: {opened.name} does not say which MLflow run it belongs to. Give the run id as RUN.")
    split = opened.split("train", config.shards)
    splits = {name: split if name == "train" else opened.split(name, config.shards) for name in split.manifest.splits}
    features = features_of(opened, split, config.features)
    run_folder = Path(config.run) if (Path(config.run) / "checkpoints").is_dir() else Path()
    out = output_folder(Path(config.out) if config.out else run_folder / "audit")
    decisions = decisions_of(config, out, split)
    with Progress(config.simulations + 1, "judgements", print, bar=True) as progress:
        findings = audit_labels(
            opened, split, config.threshold, features, config.simulations, done=lambda: progress.step(1)
        )
    if decisions is not None:
        findings.suspicious = remembered(findings.suspicious, decisions)
    pictures = look_at_pictures(config, splits)
    write_tables(findings, split, out, {} if pictures is None else columns(pictures))
    issues = label_issues(findings) + ([] if pictures is None else picture_issues(pictures, splits))
    name = opened.name + (f", MLflow run {opened.run_id}" if opened.run_id else "")
    write_page(findings, split, name, out / "audit.html", config.per_class, issues=issues, decisions=decisions)
    write_summary(findings, issues, split.classes, out)
    report(findings, list(split.classes))
    print_issues(issues)
    print(f"wrote audit.html, audit.csv, audit.parquet and audit.json to {out}")
    if config.export == "cleanlab":
        print(f"wrote {', '.join(map(str, exports.write_cleanlab(findings, split, out)))}")
    elif config.export == "fiftyone":
        root = (roots_of(opened.model.config.shards, split) or {}).get("train")
        print(f"wrote {', '.join(map(str, exports.write_fiftyone(findings, split, out, root)))}")
    if config.log:
        log_to_mlflow(opened, config.uri, out)
    if config.apply:
        write_corrections(config, findings, pictures, decisions, opened, splits, out)
    return 0


def start() -> None:
    cli.run(main)


if __name__ == "__main__":
    start()
