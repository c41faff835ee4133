"""`python -m pipeline.report [--experiment NAME ...] [--uri URI] [--out DIR]`: what the runs in MLflow
amount to.

Writes report.html (one file, nothing loaded from anywhere), report.md and the pictures, and prints the
comparison. Every number of ours stands with the ids of the runs it comes from; a cell of the paper's tables
that nobody ran says so.
"""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.tracking.tracker import DEFAULT_URI, tracking_uri
from shards.base import cli
from shards.base.errors import UserError
from shards.base.files import output_folder
from shards.base.redact import redact

if TYPE_CHECKING:
    from pipeline.reports.run_table import Cell, Mean, Result, Row, Table

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
MARK = "reduced"
TEXT_COLUMNS = ("scale", "how, and run ids", "recipe", "backbone", "seeds", "run ids", "status", "run id")
WRAPPED = ("scale", "how, and run ids", "run ids")


def shown(column: str, mean: Mean | None) -> str:
    if mean is None:
        return "–"
    digits = {"clean F1": 3, "seconds": 0}.get(column, 2)
    text = f"{mean.value:.{digits}f}"
    return text + (f" ± {mean.spread:.{digits}f}" if mean.spread is not None else "")


def bias_text(bias: tuple[str, float, float]) -> str:
    return f"{bias[0]}, rho={bias[1]:g}, noise={bias[2]:g}"


def _marked(text: str) -> str:
    return escape(text).replace(f"[{MARK}]", f"<span class='mark'>{MARK}</span>")


# -- one document, two spellings -------------------------------------------------------------------


class Document:
    """Builds the same report as HTML and as Markdown."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.html: list[str] = []
        self.markdown: list[str] = []

    def heading(self, level: int, text: str) -> None:
        self.html.append(f"<h{level}>{escape(text)}</h{level}>")
        self.markdown += [f"{'#' * level} {text}", ""]

    def text(self, text: str, css: str = "") -> None:
        self.html.append(f'<p class="{css}">{_marked(text)}</p>')
        self.markdown += [text, ""]

    def notes(self, notes: Sequence[str]) -> None:
        if notes:
            self.html.append("<ul class='note'>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>")
            self.markdown += [f"- {note}" for note in notes] + [""]

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
        """The first `left` columns are text, the rest numbers; a cell `not run` and marks get their own
        look.
        """
        self.html.append("<div class='scroll'><table><thead><tr>")
        text = [place < left or name in TEXT_COLUMNS for place, name in enumerate(header)]
        self.html += [f"<th class='{'left' if t else ''}'>{escape(name)}</th>" for t, name in zip(text, header)]
        self.html.append("</tr></thead><tbody>")
        for row in rows:
            cells = []
            for place, cell in enumerate(row):
                css = "left" if text[place] else ""
                css += f" wrap {'ids' if 'run ids' in header[place] else ''}" if header[place] in WRAPPED else ""
                css += " missing" if cell in ("not run", "–") else ""
                cells.append(f"<td class='{css}'>{_marked(cell)}</td>")
            self.html.append(f"<tr>{''.join(cells)}</tr>")
        self.html.append("</tbody></table></div>")
        self.markdown.append("| " + " | ".join(header) + " |")
        self.markdown.append("|" + "|".join(" --- " if t else " ---: " for t in text) + "|")
        self.markdown += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows] + [""]

    def picture(self, path: Path, title: str) -> None:
        data = base64.b64encode(path.read_bytes()).decode()
        image = f"<img alt='{escape(title)}' src='data:image/png;base64,{data}'>"
        wide = int.from_bytes(path.read_bytes()[16:20], "big") > 900  # a PNG's width
        self.html.append(f"<figure class='{'wide' if wide else ''}'>{image}</figure>")
        self.markdown += [f"![{title}]({path.relative_to(self.folder)})", ""]

    def open(self, title: str, opened: bool) -> None:
        self.html.append(f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>")
        self.markdown += [f"### {title}", ""]

    def close(self) -> None:
        self.html.append("</details>")

    def write(self, title: str) -> None:
        page = (Path(__file__).parent / "reports/templates/report.html").read_text(encoding="utf-8")
        page = page.replace("{{title}}", escape(title)).replace("{{body}}", "\n".join(self.html))
        (self.folder / "report.html").write_text(page, encoding="utf-8")
        (self.folder / "report.md").write_text("\n".join(self.markdown), encoding="utf-8")


# -- the parts of the report -----------------------------------------------------------------------


def comparison(doc: Document, runs: Sequence[Result]) -> None:
    from pipeline.reports.run_table import compare

    for number, (bias, rows) in enumerate(compare(runs).items()):
        doc.heading(2, bias_text(bias))
        header, body = comparison_table(rows)
        doc.table(header, body)
        doc.table(
            ["method", "recipe", "epochs", "backbone", "seeds", "run ids"],
            [about(row) for row in rows],
            left=6,
        )
        repeated = [run.run_id for row in rows for run in row.repeated]
        if repeated:
            doc.text(
                f"Of runs with the same seed and settings the newest counts. Left out: {', '.join(repeated)}.", "note"
            )
        _pictures(doc, rows, f"compare{number}")


def comparison_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    from pipeline.reports.run_table import mean_of

    header = ["method", "n", *COLUMNS]
    body = []
    for row in rows:
        means = {column: mean_of(row.runs, metric) for column, metric in COLUMNS.items()}
        if not means["last"]:  # a run from before its last epoch was summarised
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
    """The last seed of every row in one picture each; the caption names the runs."""
    from pipeline.reports import figures

    drawn = [figures.Run(row.label, row.method, row.runs[-1].figures) for row in rows if row.runs[-1].figures]
    if not drawn:
        return
    folder = doc.folder / "report_files"
    folder.mkdir(parents=True, exist_ok=True)
    doc.html.append("<div class='gallery'>")
    for key, draw in figures.PICTURES.items():
        figure = draw(drawn)
        if figure is not None:
            doc.picture(figures.save(figure, folder / f"{name}-{key}.png"), TITLES[key])
    doc.html.append("</div>")
    sources = "; ".join(f"{row.label}: {row.runs[-1].run_id}" for row in rows if row.runs[-1].figures)
    doc.text(f"Pictures from runs {sources}.", "note")


def paper(doc: Document, runs: Sequence[Result]) -> None:
    from pipeline.reports.run_table import paper_tables

    source, tables = paper_tables(runs)
    doc.heading(2, "The paper's tables beside ours")
    doc.text(f"{source}. Ours: mean ± sample standard deviation over n seeds.")
    doc.text(f"[{MARK}] marks a cell run at another scale than the paper's: its difference is no result.")
    for table in tables:
        run, every = table.run
        doc.open(f"{_table_name(table.id)}: {table.title} ({run} of {every} cells run)", run > 0)
        doc.notes(table.notes)
        both = [f"{who} {column}" for who in ("paper", "ours") for column in table.columns]
        datasets = {cell.where.partition(" ")[0] for cell in table.cells}
        first = datasets.pop() if len(datasets) == 1 else "data"
        rows = [_cell(table, cell) for cell in table.cells]
        rows = [[row[0].removeprefix(f"{first} "), *row[1:]] for row in rows]
        doc.table([first, "method", *both, "n", "scale", "how, and run ids"], rows, left=2)
        doc.close()


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


# -- the command -----------------------------------------------------------------------------------


def write_report(uri: str, experiments: Sequence[str], out: Path) -> list[Result]:
    from pipeline.reports.run_table import read_runs

    output_folder(out)
    runs = read_runs(uri, experiments)
    if not runs:
        raise UserError(f"There are no runs at {redact(uri)}. Train something first, or name another experiment.")
    doc = Document(out)
    title = "Evenhand report" + (f": {', '.join(experiments)}" if experiments else "")
    doc.heading(1, title)
    finished = sum(run.status == "FINISHED" for run in runs)
    doc.text(f"{finished} finished runs of {len(runs)} at {redact(uri)}. Accuracies in percent on the test set.")
    comparison(doc, runs)
    unfinished(doc, runs)
    paper(doc, runs)
    doc.write(title)
    return runs


def print_comparison(runs: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.table import Table as Grid

    from pipeline.reports.run_table import compare

    console = Console(width=None if sys.stdout.isatty() else 110)
    for bias, rows in compare(runs).items():
        header, body = comparison_table(rows)
        grid = Grid(title=bias_text(bias), title_justify="left")
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
    runs = write_report(tracking_uri(options.uri), options.experiment, options.out)
    print_comparison(runs)
    print(f"wrote {options.out / 'report.html'} and {options.out / 'report.md'}")
    return 0


if __name__ == "__main__":
    cli.run(main)
