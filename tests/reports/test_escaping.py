"""Names of runs, classes and files come from outside: on the pages they are text, never markup."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.reports.audit.findings import Findings
from pipeline.reports.audit.page import write_page
from pipeline.reports.document import Document
from pipeline.reports.report import comparison, unfinished
from pipeline.reports.run_table import Result

SCRIPT = "<script>alert(1)</script>"
QUOTES = """"'&"""
HANDLER = """x" onload='alert(1)' y="""
NAMES = [SCRIPT, QUOTES, HANDLER]


class Page(HTMLParser):
    """What a browser makes of a page: tags, attributes by name, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, name: str) -> set[str]:
        return {value for key, value in self.attributes if key == name}


@pytest.fixture(params=NAMES)
def report_of_a_strange_name(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str, str]:
    name = request.param
    tags = {"dataset": name, "rho": "1", "noise": "0", "manifest": "a" * 8}
    runs = [
        Result(name, "n", "FINISHED", {"method.name": name, "model.backbone": name}, {"final/last": 1.0}, tags),
        Result("2", "n", "FINISHED", {"method.name": name, "method.preset": name}, {"final/last": 1.0}, tags),
        Result("3", name, "FAILED", {}, {}, tags),
    ]
    doc = Document(tmp_path)
    doc.heading(1, name)
    comparison(doc, runs)
    unfinished(doc, runs)
    with doc.section(name, opened=True):
        doc.notes([name])
    doc.write(name)
    return name, (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()


def test_the_report_shows_strange_names_as_they_are(report_of_a_strange_name: tuple[str, str, str]) -> None:
    name, html, _ = report_of_a_strange_name
    page = Page(html)
    assert "script" not in page.tags
    assert page.values("onload") == set()
    assert page.text.count(name) >= 10  # title, headings, labels, backbone, run ids, unfinished run, notes


def test_the_report_in_markdown_carries_no_html_and_no_link_from_a_name(
    report_of_a_strange_name: tuple[str, str, str], tmp_path: Path
) -> None:
    _, _, markdown = report_of_a_strange_name
    assert "<" not in markdown
    doc = Document(tmp_path)
    doc.table(["method"], [["a|b\n[c](javascript:alert(1))"]])
    assert doc.markdown[2] == "| a\\|b [c]\\(javascript:alert(1)) |"


def test_the_mark_of_a_smaller_run_is_markup_and_what_stands_beside_it_is_not(tmp_path: Path) -> None:
    doc = Document(tmp_path)
    doc.table(["scale"], [[f"[reduced] {SCRIPT}"]])
    doc.write("marks")
    html = (tmp_path / "report.html").read_text()
    assert '<span class="mark">reduced</span> &lt;script&gt;' in html


class StrangeSplit:
    """Samples whose classes and keys have strange names; no picture can be read."""

    classes = NAMES
    manifest = SimpleNamespace(hash="0123abcd")

    def keys(self, index: np.ndarray) -> list[str]:
        return [NAMES[k] for k in index]

    def read(self, index: int) -> bytes:
        return b"no picture"


def test_the_audit_page_shows_strange_classes_keys_and_runs_as_they_are(tmp_path: Path) -> None:
    given = np.arange(3)
    findings = Findings(
        given,
        true=given,
        suggested=np.array([1, 2, 0]),
        score=np.full(3, 0.1),
        suggested_score=np.full(3, 0.9),
        weight=None,
        epochs_flagged=np.ones(3, int),
        suspicious=np.ones(3, bool),
        rule=SCRIPT,
        neighbours=[[1], [2], [0]],
    )
    write_page(findings, StrangeSplit(), HANDLER, tmp_path / "audit.html", 5)  # type: ignore[arg-type]
    page = Page((tmp_path / "audit.html").read_text())
    assert page.tags.count("script") == 2  # the data and what draws them; test_audit_page.py sees what is drawn
    assert page.values("onload") == set()
    assert f"Judged: {HANDLER}. Suspicious: {SCRIPT}." in page.text
    for name in NAMES:
        assert name in page.text
