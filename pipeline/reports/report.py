"""The report: the comparison of runs, their figures, and the paper's tables beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.reports import figures
from pipeline.reports.document import MARK, Document
from pipeline.reports.run_table import Cell, Mean, Result, Row, Table, compare, mean_of, paper_tables, read_runs
from shards.base.errors import UserError
from shards.base.files import output_folder
from shards.base.redact import redact

# Column of the comparison -> metric. Percent, except clean F1 (0..1) and seconds.
COLUMNS = {
    "best": "final/best", "last": "final/last", "many": "test/many", "medium": "test/medium",
    "few": "test/few", "clean F1": "clean/f1", "seconds": "time/seconds",
}  # fmt: skip
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


def variant_title(variant: tuple[str, float, float]) -> str:
    return f"{variant[0]}, rho={variant[1]:g}, noise={variant[2]:g}"


def comparison(doc: Document, runs: Sequence[Result]) -> None:
    for number, (variant, rows) in enumerate(compare(runs).items()):
        doc.heading(2, variant_title(variant))
        header, body = comparison_table(rows)
        doc.table(header, body)
        doc.table(
            ["method", "recipe", "epochs", "backbone", "seeds", "run ids"],
            [about(row) for row in rows],
            left=6,
        )
        repeated = [run.run_id for row in rows for run in row.repeated]
        if repeated:
            left_out = ", ".join(repeated)
            doc.text(f"Of runs with the same seed and settings the newest counts. Left out: {left_out}.", note=True)
        _pictures(doc, rows, f"compare{number}")


def comparison_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    header = ["method", "n", *COLUMNS]
    body = []
    for row in rows:
        means = {column: mean_of(row.runs, metric) for column, metric in COLUMNS.items()}
        if not means["last"]:  # a run without a summary of its last epoch
            means["last"] = mean_of(row.runs, "test/top1")
        body.append([row.label, str(len(row.runs)), *(shown(column, mean) for column, mean in means.items())])
    return header, body


def about(row: Row) -> list[str]:
    first = row.runs[0]
    recipe = first.params.get("recipe", "?")
    backbone = first.params.get("model.backbone", "?")
    if backbone.startswith("preact"):
        backbone += f" width {first.params.get('model.width', '?')}"
    seeds = ", ".join(run.seed for run in row.runs)
    ids = ", ".join(run.run_id for run in row.runs)
    return [row.label, recipe, first.params.get("train.epochs", "?"), backbone, seeds, ids]


def _pictures(doc: Document, rows: Sequence[Row], name: str) -> None:
    """Figures with one line per row, from its last seed; the caption names the runs."""
    drawn = [figures.Run(row.label, row.method, row.runs[-1].figures) for row in rows if row.runs[-1].figures]
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
    source, tables = paper_tables(runs)
    doc.heading(2, "The paper's tables beside ours")
    doc.text(f"{source}. Ours: mean ± sample standard deviation over n seeds.")
    doc.text(f"[{MARK}] marks a cell run at another scale than the paper's: its difference is no result.")
    for table in tables:
        run, every = table.run
        title = f"{_table_name(table.id)}: {table.title} ({run} of {every} cells run)"
        with doc.section(title, opened=run > 0):
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
    return [cell.where, cell.shown, *printed, *ours, str(len(row.runs)), scale, how]


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
