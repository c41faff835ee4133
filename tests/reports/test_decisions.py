"""Decisions read from a file: what is decided about which sample, and what is said about a file that does not fit."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audit_samples import MadeUpSplit

from pipeline.reports.audit.decisions import COLUMNS, read_decisions, remembered
from shards.base.errors import UserError

CLASSES = ["cat", "dog", 'a "b", </script>\n🦊']
ROWS = [
    [2, "z\u2028,\r\n.jpg", CLASSES[2], "relabel", "dog"],
    [0, "x.jpg", "cat", "keep", "cat"],
    [1, "y.jpg", "dog", "drop", ""],
    [3, "x2.jpg", "cat", "relabel", CLASSES[2]],
]


def split(keys: list[str] | None = None) -> Any:
    keys = keys or ["x.jpg", "y.jpg", "z\u2028,\r\n.jpg", "x2.jpg", "undecided.jpg"]
    return MadeUpSplit(np.arange(5) % 3, CLASSES, keys)


def write(folder: Path, rows: list[list[Any]], kind: str = "csv", columns: tuple[str, ...] = COLUMNS) -> Path:
    path = folder / f"decisions.{kind}"
    if kind == "json":
        path.write_text(json.dumps([dict(zip(columns, row)) for row in rows]), encoding="utf-8")
    else:
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file).writerows([columns, *rows])
    return path


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_both_formats_say_the_same(tmp_path: Path, kind: str) -> None:
    found = read_decisions(write(tmp_path, ROWS, kind), split())
    assert found.action.tolist() == [1, 3, 2, 2, 0]
    assert found.label.tolist() == [0, 1, 1, 2, 1]
    assert (found.action.dtype, found.label.dtype, found.decided) == (np.int8, np.int64, 4)


def test_a_sample_is_found_by_its_key_wherever_it_stands(tmp_path: Path) -> None:
    moved = [[row[0] + 100, *row[1:]] for row in ROWS]
    assert read_decisions(write(tmp_path, moved), split()).action.tolist() == [1, 3, 2, 2, 0]


def test_where_a_key_is_there_twice_the_index_decides(tmp_path: Path) -> None:
    same = split(["x", "y", "x", "x", "z"])
    found = read_decisions(write(tmp_path, [[3, "x", "cat", "drop", ""]]), same)
    assert found.action.tolist() == [0, 0, 0, 3, 0]
    with pytest.raises(UserError, match=r"3 samples are called 'x', and none of them has the index '1'.*0, 2, 3"):
        read_decisions(write(tmp_path, [[1, "x", "cat", "drop", ""]]), same)


def test_relabelled_to_what_it_was_is_kept(tmp_path: Path) -> None:
    assert read_decisions(write(tmp_path, [[0, "x.jpg", "cat", "relabel", "cat"]]), split()).action[0] == 1


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ([0, "x.jpg", "cat", "relabel", "dgo"], r"line 2: these shards have no class 'dgo'; did you mean 'dog'\?"),
        ([0, "x.jpg", "cat", "relabel", ""], "says relabel but has no label"),
        ([0, "x.jpg", "cat", "keep", "dog"], "keeps 'cat' but has the label 'dog'"),
        ([0, "x.jpg", "cat", "delete", ""], "Write keep, relabel or drop"),
        ([0, "x.jpg", "cat", "", ""], "Write keep, relabel or drop"),
        ([0, "w.jpg", "cat", "keep", ""], "no sample 'w.jpg'"),
        ([0, "x.jpg", "dog", "keep", ""], "here it is 'cat'. The file belongs to other shards"),
        ([0, "x.jpg", "cat", "keep"], "has 4 cells, not 5"),
    ],
)
def test_a_row_that_does_not_fit_is_named(tmp_path: Path, row: list[Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        read_decisions(write(tmp_path, [row]), split())


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_two_decisions_about_one_sample_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match=r"decides about sample 0 \('x.jpg'\) again, after .* (line 2|decision 1)"):
        read_decisions(write(tmp_path, [ROWS[1], ROWS[1]], kind), split())


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_missing_columns_are_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match=r"no column label\. It needs index, key, given, decision, label"):
        read_decisions(write(tmp_path, [ROWS[1]], kind, ("index", "key", "given", "decision", "new")), split())


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.json", b"[{", "is not JSON"),
        ("a.json", b'{"a": 1}', "is not a list of decisions"),
        ("a.json", b'[{"index": 0, "key": 5, "given": "cat", "decision": "keep", "label": ""}]', "must be text"),
        ("a.csv", b"\xff\xfe\x00", "is not UTF-8"),
        ("a.csv", b"", "no column index, key"),
    ],
)
def test_a_file_that_is_something_else_is_told(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=told):
        read_decisions(tmp_path / name, split())


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_decisions(tmp_path / "nothing.csv", split())


def test_what_was_kept_is_not_suspicious_any_more(tmp_path: Path) -> None:
    found = read_decisions(write(tmp_path, ROWS), split())
    assert remembered(np.array([True, True, True, False, True]), found).tolist() == [False, True, True, False, True]
