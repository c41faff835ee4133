"""The report: the comparison of runs, their figures, and the paper's tables beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.reports import figures
from pipeline.reports.document import DIFFERS, MARK, Document
from pipeline.reports.run_table import (
    Cell,
    Mean,
    Result,
    Row,
    Table,
    compare,
    mean_of,
    paper_tables,
    read_runs,
    titles,
)
from shards.base.errors import UserError
from shards.base.files import output_folder
from shards.base.redact import redact
from shards.names import few_in_words

# Column of the comparison -> metric. Percent, except clean F1 (0..1) and seconds.
COLUMNS = {
    "best": "final/best", "last": "final/last", "many": "test/many", "medium": "test/medium",
    "few": "test/few", "validation": "validation/top1", "validation few": "validation/few", "clean F1": "clean/f1",
    "seconds": "time/seconds",
}  # fmt: skip
FEW = {"few": "test", "validation few": "validation"}  # column -> split
MEANS = (
    "mean ± sample standard deviation over n seeds, or over n draws: the bias of the data drawn anew with every seed"
)
TITLES = {
    "accuracy": "Accuracy over epochs",
    "groups": "Many, medium and few",
    "cleaning": "Cleaning over epochs",
    "marginal": "Marginal likelihood by class",
    "confidence": "Confidence by class",
    "class_size": "Accuracy against class size",
}


def shown(column: str, mean: Mean | None) -> str:
    if mean is None:
        return "–"
    digits = {"clean F1": 3, "seconds": 0}.get(column, 2)
    text = f"{mean.value:.{digits}f}"
    return text + (f" ± {mean.spread:.{digits}f}" if mean.spread is not None else "")


def comparison(doc: Document, runs: Sequence[Result]) -> None:
    compared = compare(runs)
    named = titles(compared)
    for number, (variant, rows) in enumerate(compared.items()):
        doc.heading(2, named[variant])
        header, body = comparison_table(rows)
        doc.table(header, body)
        if any(len(row.runs) > 1 for row in rows):
            doc.text(f"{MEANS[0].upper()}{MEANS[1:]}.", note=True)
        columns = ["method", DIFFERS, "recipe", "epochs", "backbone", "seeds", "run ids"]
        lines = [[row.method, row.differs, *about(row)[1:]] for row in rows]
        doc.table(*_without_empty(columns, lines), left=7)
        repeated = [run.run_id for row in rows for run in row.repeated]
        if repeated:
            left_out = ", ".join(repeated)
            doc.text(f"Of runs with the same seed and settings the newest counts. Left out: {left_out}.", note=True)
        _pictures(doc, rows, f"compare{number}")


def comparison_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    metrics = {run_metric for row in rows for run in row.runs for run_metric in run.metrics}
    columns = {c: metric for c, metric in COLUMNS.items() if "validation" not in c or metric in metrics}
    header = ["method", DIFFERS, "n", *columns]
    body = []
    for row in rows:
        means = {column: mean_of(row.runs, metric) for column, metric in columns.items()}
        if not means["last"]:  # a run without a summary of its last epoch
            means["last"] = mean_of(row.runs, "test/top1")
        numbers = (shown(column, mean) + _size(column, mean, row) for column, mean in means.items())
        body.append([row.method, row.differs, row.count, *numbers])
    return _without_empty(header, body)


def _size(column: str, mean: Mean | None, row: Row) -> str:
    """On how little the rare classes' number of a single run stands."""
    return few_in_words(row.runs[0].tags, FEW[column]) if mean and column in FEW and len(row.runs) == 1 else ""


def _without_empty(header: list[str], body: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Without the column of what differs where nothing does."""
    at = header.index(DIFFERS)
    if any(line[at] for line in body):
        return header, body
    return header[:at] + header[at + 1 :], [line[:at] + line[at + 1 :] for line in body]


def about(row: Row) -> list[str]:
    first = row.runs[0]
    recipe = first.params.get("recipe", "?")
    backbone = first.params.get("model.backbone", "?")
    if backbone.startswith("preact"):
        backbone += f" width {first.params.get('model.width', '?')}"
    ids = ", ".join(run.run_id for run in row.runs)
    return [row.label, recipe, first.params.get("train.epochs", "?"), backbone, row.seeds, ids]


def legends(rows: Sequence[Row]) -> list[str]:
    """What tells the lines of a figure apart: the methods, and what differs inside one."""
    one_method = len({row.method for row in rows}) == 1
    said = [row.difference(longest=16) for row in rows]
    return [text if one_method and text else f"{row.method} {text}".strip() for row, text in zip(rows, said)]


def _pictures(doc: Document, rows: Sequence[Row], name: str) -> None:
    """Figures with one line per row, from its last seed; the caption names the runs."""
    names = legends(rows)
    drawn = [
        figures.Run(names[at], row.method, row.runs[-1].figures) for at, row in enumerate(rows) if row.runs[-1].figures
    ]
    if not drawn:
        return
    folder = doc.folder / "report_files"
    folder.mkdir(parents=True, exist_ok=True)
    images = []
    for key, plot in figures.COMPARISON_PLOTS.items():
        figure = plot(drawn)
        if figure is not None:
            images.append((figures.save(figure, folder / f"{name}-{key}.png"), TITLES[key]))
    doc.gallery(images)
    sources = "; ".join(f"{row.label}: {row.runs[-1].run_id}" for row in rows if row.runs[-1].figures)
    doc.text(f"Pictures from runs {sources}.", note=True)


def paper(doc: Document, runs: Sequence[Result]) -> None:
    """Only the tables that a run fits: nobody's own pictures are in the paper."""
    source, tables = paper_tables(runs)
    tables = [table for table in tables if table.run[0]]
    if not tables:
        return
    doc.heading(2, "The paper's tables beside ours")
    doc.text(f"{source}. Ours: {MEANS}.")
    doc.text(f"[{MARK}] marks a cell run at another scale than the paper's: its difference is no result.")
    for table in tables:
        run, every = table.run
        title = f"{_table_name(table.id)}: {table.title} ({run} of {every} cells run)"
        with doc.section(title, opened=True):
            _paper_table(doc, table)


def _paper_table(doc: Document, table: Table) -> None:
    doc.notes(table.notes)
    both = [f"{who} {column}" for who in ("paper", "ours") for column in table.columns]
    datasets = {cell.where.partition(" ")[0] for cell in table.cells}
    first = datasets.pop() if len(datasets) == 1 else "data"
    rows = [_cell(table, cell) for cell in table.cells]
    rows = [[row[0].removeprefix(f"{first} "), *row[1:]] for row in rows]
    doc.table([first, "method", *both, "n", "scale", "how, and run ids"], rows, left=2)


def _table_name(ident: str) -> str:
    return ident.replace("table", "Table ")


def _cell(table: Table, cell: Cell) -> list[str]:
    printed = [_percent(cell.paper.get(column)) for column in table.columns]
    if not cell.rows:
        return [cell.where, cell.shown, *printed, *("not run" for _ in table.columns), *[""] * 3]
    row = cell.rows[0]
    ours = [shown(column, cell.ours[column]) for column in table.columns]
    _, recipe, epochs, backbone, _, ids = about(row)
    scale = f"[{MARK}] {'; '.join(cell.reduced)}" if cell.reduced else "as in the paper"
    how = f"{recipe} recipe, {epochs} epochs, {backbone}: {ids}"
    return [cell.where, cell.shown, *printed, *ours, row.count, scale, how]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def unfinished(doc: Document, runs: Sequence[Result]) -> None:
    left = [run for run in runs if run.status != "FINISHED"]
    if left:
        doc.heading(2, "Runs that are not finished")
        doc.text("They count in no number above.")
        doc.table(["run", "status", "run id"], [[run.name, run.status, run.run_id] for run in left], left=3)


def write_report(uri: str, experiments: Sequence[str], out: Path) -> list[Result]:
    runs = read_runs(uri, experiments)
    if not runs:
        raise UserError(f"There are no runs at {redact(uri)}. Train something first, or name another experiment.")
    output_folder(out)
    doc = Document(out)
    title = "Evenhand report" + (f": {', '.join(experiments)}" if experiments else "")
    doc.heading(1, title)
    finished = sum(run.status == "FINISHED" for run in runs)
    doc.text(f"Finished runs: {finished} of {len(runs)}, at {redact(uri)}. Accuracies in percent on the test set.")
    comparison(doc, runs)
    unfinished(doc, runs)
    paper(doc, runs)
    doc.write(title)
    return runs
