"""The audit page in a real browser: what people decide by keys, keep, export, and apply.

`make test` installs chromium on Debian as root. Without chromium these tests are skipped.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from audit_samples import made_up
from browser import CHROMIUM, Browser

from pipeline.reports.audit.decisions import read_decisions
from pipeline.reports.audit.issues import Issue, label_issues
from pipeline.reports.audit.page import write_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
STRANGE = "<script>alert(1)</script>"
CLASSES = ["cat", "dog", STRANGE, "a, \"b\"\n'c'"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("browser")
    with Browser(folder / "profile", folder / "downloads") as one:
        yield one


def focused(browser: Browser) -> int:
    found: int = browser.run("+document.querySelector('.focused').dataset.index")
    return found


def exported(browser: Browser, folder: Path, kind: str) -> Path:
    file = folder / f"decisions.{kind}"
    browser.click(f"#{kind}")
    browser.until(lambda: browser.text("#status").startswith("exported"))
    file.write_text(browser.run("asCsv()" if kind == "csv" else "asJson()"), newline="", encoding="utf-8")
    return file


def test_keys_decide_and_the_export_is_what_the_audit_reads(browser: Browser, tmp_path: Path) -> None:
    findings, split = made_up(60, CLASSES, suspicious=9, side=90)
    write_page(findings, split, "run", tmp_path / "audit.html", 12)  # type: ignore[arg-type]
    browser.problems.clear()
    browser.open(tmp_path / "audit.html")
    assert browser.text("#progress") == "0 of 9 decided"
    order = [browser.run(f"+document.querySelectorAll('.card')[{k}].dataset.index") for k in range(9)]
    assert sorted(order) == list(range(9))
    browser.press("k", "r")
    browser.press("d")
    browser.press("s", "t")
    for letter in "cat":
        browser.send("Input.insertText", text=letter)
    browser.press("Enter")
    browser.press("d", "u")  # and back
    decided = exported(browser, tmp_path, "csv")
    rows = {int(row["index"]): row for row in csv.DictReader(decided.open(newline="", encoding="utf-8"))}
    given = [CLASSES[int(findings.given[index])] for index in order]
    last = "keep" if given[4] == "cat" else "relabel"  # to cat
    assert {index: (row["decision"], row["given"]) for index, row in rows.items()} == {
        order[0]: ("keep", given[0]),
        order[1]: ("relabel", given[1]),
        order[2]: ("drop", given[2]),
        order[4]: (last, given[4]),
    }
    assert rows[order[1]]["label"] == CLASSES[int(findings.suggested[order[1]])]
    read = read_decisions(decided, split)  # type: ignore[arg-type]
    same = read_decisions(exported(browser, tmp_path, "json"), split)  # type: ignore[arg-type]
    assert np.array_equal(read.action, same.action)
    assert np.array_equal(read.label, same.label)
    assert read.decided == 4
    browser.open(tmp_path / "audit.html")  # the browser has kept them
    assert browser.text("#progress") == "4 of 9 decided"
    browser.run("localStorage.clear()")
    write_page(findings, split, "run", tmp_path / "again.html", 12, decisions=read)  # type: ignore[arg-type]
    browser.open(tmp_path / "again.html")  # and the next audit takes them in
    assert browser.text("#progress") == "4 of 9 decided"
    assert browser.text("#precision").startswith("Precision: of 4 decided cards")
    assert browser.problems == []


def give(browser: Browser, file: Path) -> None:
    """To the page's own file input, as its import button does."""
    browser.run("say('')")
    found = browser.send("Runtime.evaluate", expression="document.getElementById('file')")["result"]["objectId"]
    browser.send("DOM.setFileInputFiles", files=[str(file)], objectId=found)
    browser.until(lambda: browser.text("#status") != "")


def test_an_export_is_taken_in_again_and_a_foreign_file_changes_nothing(browser: Browser, tmp_path: Path) -> None:
    findings, split = made_up(60, CLASSES, suspicious=9, side=90)
    write_page(findings, split, "run", tmp_path / "audit.html", 12)  # type: ignore[arg-type]
    browser.open(tmp_path / "audit.html")
    browser.run("localStorage.clear()")
    browser.open(tmp_path / "audit.html")
    browser.press("k", "r", "d")
    files = [exported(browser, tmp_path, kind) for kind in ("csv", "json")]
    for file in files:
        content = file.read_bytes().decode()
        browser.run("localStorage.clear()")
        browser.open(tmp_path / "audit.html")
        assert browser.text("#progress") == "0 of 9 decided"
        give(browser, file)
        assert browser.text("#status") == "imported 3 decisions"
        assert browser.text("#progress") == "3 of 9 decided"
        assert browser.run("asCsv()" if file.suffix == ".csv" else "asJson()") == content
    foreign = tmp_path / "foreign.csv"
    foreign.write_text("index,key,given,decision,label\n7,photos/000007.jpg,dog,keep,\n0,other.jpg,cat,drop,\n")
    give(browser, foreign)
    assert "belongs to other shards" in browser.text("#status")
    assert browser.text("#progress") == "3 of 9 decided"
    browser.run("localStorage.clear()")


def test_the_precision_of_the_list_is_that_of_a_random_draw(browser: Browser, tmp_path: Path) -> None:
    findings, split = made_up(300, CLASSES, suspicious=200, side=90)
    write_page(findings, split, "run", tmp_path / "audit.html", 12)  # type: ignore[arg-type]
    browser.open(tmp_path / "audit.html")
    browser.press("d")  # picked, not drawn
    browser.click("#random")
    drawn = browser.run("draws[issue.id]")
    assert len(set(drawn)) == 50
    shown = browser.run("[...document.querySelectorAll('.card')].map(card => +card.dataset.index)")
    assert shown == drawn[:48]
    chosen = browser.run("D.index[view.find(card => decisionOf(card))]")  # the one picked before
    for number in range(50 - (chosen in drawn)):
        browser.press("k" if number % 5 == 0 else "d")
    kept, text = browser.run("[...decided].filter(one => one[1][0] === 'keep').length"), browser.text("#precision")
    assert f"Of the 50 drawn at random 50 are decided: {100 - 2 * kept} %" in text
    assert "unbiased" in text
    browser.run("localStorage.clear()")


def test_tabs_filters_and_strange_names(browser: Browser, tmp_path: Path) -> None:
    findings, split = made_up(40, CLASSES, suspicious=8, keys=[f"{STRANGE}/{k}.jpg" for k in range(40)], side=90)
    findings.outlier = np.arange(40) < 2
    copies = Issue(
        "duplicates", "Copies", "The same.", np.array([30, 31, 20]), np.zeros(3), [[30, 31, 20]], ["x", "y", "z"]
    )
    issues = [*label_issues(findings), copies]
    write_page(findings, split, "run", tmp_path / "audit.html", 12, issues=issues)  # type: ignore[arg-type]
    browser.problems.clear()
    browser.open(tmp_path / "audit.html")
    tabs = browser.run("[...document.querySelectorAll('#tabs button')].map(b => b.textContent)")
    assert tabs == ["Wrong labels (6)", "Pictures of no class (2)", "Copies (3)"]
    assert STRANGE in browser.text("#cards")
    browser.run("(() => { const s = document.getElementById('given'); s.value = '2'; s.onchange(); })()")
    assert browser.text("#shown") == "2 of 6 pictures"
    browser.run("document.querySelectorAll('#tabs button')[2].click()")
    browser.run("(() => { const s = document.getElementById('given'); s.value = ''; s.onchange(); })()")
    cards = browser.run(
        "[...document.querySelectorAll('.card')].map(c => [+c.dataset.index, c.querySelector('.reason').textContent])"
    )
    assert cards == [[30, "x"], [31, "y"], [20, "z"]]  # group by group, the one to keep first
    assert browser.run("document.querySelectorAll('.card')[2].querySelectorAll('.near img').length") == 1
    assert browser.problems == []


def test_a_hundred_thousand_cards_open_and_turn_quickly(browser: Browser, tmp_path: Path) -> None:
    findings, split = made_up(100_000, [f"class {k}" for k in range(500)], side=0)
    write_page(findings, split, "run", tmp_path / "audit.html", 12)  # type: ignore[arg-type]
    browser.problems.clear()
    assert (tmp_path / "audit.html").stat().st_size < 100_000 * 200
    browser.open(tmp_path / "audit.html")
    assert browser.run("document.querySelectorAll('.card').length") == 48
    browser.press(*["ArrowRight"] * 48)
    assert browser.text("#page") == "page 2 of 2084"
    assert browser.run("document.querySelectorAll('.card').length") == 48  # no more than one page is drawn
    browser.press("d")
    assert browser.text("#progress") == "1 of 100000 decided"
    assert browser.problems == []


def test_many_pictures_are_files_beside_the_page(browser: Browser, tmp_path: Path) -> None:
    findings, split = made_up(60, ["a", "b"], suspicious=30, side=200)
    write_page(findings, split, "run", tmp_path / "audit.html", 12, inline=20_000)  # type: ignore[arg-type]
    assert len(list((tmp_path / "audit_pictures").iterdir())) == 60  # cards and their neighbours
    data = json.loads((tmp_path / "audit.html").read_text().split('id="data">')[1].split("</script>")[0])
    assert data["pictures"] == {}
    browser.problems.clear()
    browser.open(tmp_path / "audit.html")
    browser.until(lambda: browser.run("document.querySelector('.card img').naturalWidth > 0"))
    assert browser.problems == []
