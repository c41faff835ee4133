"""One document in two forms, HTML and Markdown."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import ClassVar

from pipeline.reports.pages import render

MARK = "reduced"
DIFFERS = "what differs"
TEXT_COLUMNS = (DIFFERS, "scale", "how, and run ids", "recipe", "backbone", "seeds", "run ids", "status", "run id")
WRAPPED = (DIFFERS, "scale", "how, and run ids", "run ids")


@dataclass(frozen=True)
class Heading:
    kind: ClassVar[str] = "heading"
    level: int
    text: str

    def markdown(self) -> list[str]:
        return [f"{'#' * self.level} {plain(self.text)}", ""]


@dataclass(frozen=True)
class Paragraph:
    kind: ClassVar[str] = "paragraph"
    text: str
    note: bool = False

    def markdown(self) -> list[str]:
        return [plain(self.text), ""]


@dataclass(frozen=True)
class Notes:
    kind: ClassVar[str] = "notes"
    notes: Sequence[str]

    def markdown(self) -> list[str]:
        return [*(f"- {plain(note)}" for note in self.notes), ""]


@dataclass(frozen=True)
class Column:
    name: str
    text: bool  # to the left; numbers stand to the right

    @property
    def wrapped(self) -> bool:
        return self.name in WRAPPED

    @property
    def ids(self) -> bool:
        return self.name in WRAPPED and "run ids" in self.name


@dataclass(frozen=True)
class Table:
    kind: ClassVar[str] = "table"
    columns: list[Column]
    cells: Sequence[Sequence[str]]

    @property
    def rows(self) -> list[list[tuple[Column, str]]]:
        return [list(zip(self.columns, row)) for row in self.cells]

    def markdown(self) -> list[str]:
        header = "| " + " | ".join(plain(column.name) for column in self.columns) + " |"
        rule = "|" + "|".join(" --- " if column.text else " ---: " for column in self.columns) + "|"
        rows = ["| " + " | ".join(plain(cell).replace("|", "\\|") for cell in row) + " |" for row in self.cells]
        return [header, rule, *rows, ""]


@dataclass(frozen=True)
class Image:
    path: Path
    title: str
    folder: Path  # that the document lies in

    @property
    def base64(self) -> str:
        return base64.b64encode(self.path.read_bytes()).decode()

    @property
    def wide(self) -> bool:
        return int.from_bytes(self.path.read_bytes()[16:20], "big") > 900  # a PNG's width


@dataclass(frozen=True)
class Gallery:
    kind: ClassVar[str] = "gallery"
    images: Sequence[Image]

    def markdown(self) -> list[str]:
        lines = [f"![{plain(image.title)}]({image.path.relative_to(image.folder)})" for image in self.images]
        return [part for line in lines for part in (line, "")]


@dataclass(frozen=True)
class Section:
    """A part that can be folded away."""

    kind: ClassVar[str] = "section"
    title: str
    opened: bool
    blocks: list[Block] = field(default_factory=list)

    def markdown(self) -> list[str]:
        return [f"### {plain(self.title)}", "", *(line for block in self.blocks for line in block.markdown())]


Block = Heading | Paragraph | Notes | Table | Gallery | Section


def plain(text: str) -> str:
    """Text that no Markdown reader takes for HTML or for a link."""
    return escape(" ".join(text.splitlines()), quote=False).replace("](", "]\\(")


class Document:
    """Builds the same report as HTML and as Markdown."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blocks: list[Block] = []

    def heading(self, level: int, text: str) -> None:
        self.blocks.append(Heading(level, text))

    def text(self, text: str, note: bool = False) -> None:
        self.blocks.append(Paragraph(text, note))

    def notes(self, notes: Sequence[str]) -> None:
        if notes:
            self.blocks.append(Notes(notes))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
        """The first `left` columns are text, the rest numbers. A cell `not run` and marks have their own style."""
        columns = [Column(name, place < left or name in TEXT_COLUMNS) for place, name in enumerate(header)]
        self.blocks.append(Table(columns, rows))

    def gallery(self, images: Sequence[tuple[Path, str]]) -> None:
        """Pictures (file, title) side by side."""
        self.blocks.append(Gallery([Image(path, title, self.folder) for path, title in images]))

    @contextmanager
    def section(self, title: str, opened: bool) -> Iterator[None]:
        """What is added inside belongs to a part that can be folded away."""
        outside, section = self.blocks, Section(title, opened)
        self.blocks = section.blocks
        try:
            yield
        finally:
            self.blocks = outside
            self.blocks.append(section)

    @property
    def markdown(self) -> list[str]:
        return [line for block in self.blocks for line in block.markdown()]

    def write(self, title: str) -> None:
        page = render("report.html", title=title, mark=MARK, blocks=self.blocks)
        (self.folder / "report.html").write_text(page, encoding="utf-8")
        (self.folder / "report.md").write_text("\n".join(self.markdown), encoding="utf-8")
