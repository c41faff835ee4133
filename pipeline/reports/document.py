"""One document in two forms, HTML and Markdown."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

MARK = "reduced"
TEXT_COLUMNS = ("scale", "how, and run ids", "recipe", "backbone", "seeds", "run ids", "status", "run id")
WRAPPED = ("scale", "how, and run ids", "run ids")


def _marked(text: str) -> str:
    return escape(text).replace(f"[{MARK}]", f"<span class='mark'>{MARK}</span>")


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
        page = (Path(__file__).parent / "templates/report.html").read_text(encoding="utf-8")
        page = page.replace("{{title}}", escape(title)).replace("{{body}}", "\n".join(self.html))
        (self.folder / "report.html").write_text(page, encoding="utf-8")
        (self.folder / "report.md").write_text("\n".join(self.markdown), encoding="utf-8")
