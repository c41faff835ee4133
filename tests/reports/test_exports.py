"""The findings as cleanlab and FiftyOne have them."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from audit_samples import made_up

from pipeline.reports.audit.exports import write_cleanlab, write_fiftyone

CLASSES = ["cat", "dog", "cow, brown"]


def test_cleanlabs_columns_say_what_was_found(tmp_path: Path) -> None:
    findings, split = made_up(30, CLASSES, suspicious=4)
    written = write_cleanlab(findings, split, tmp_path)  # type: ignore[arg-type]
    assert written == [tmp_path / "cleanlab.csv", tmp_path / "cleanlab.parquet"]
    table = parquet.read_table(written[1])
    assert table.column_names == ["key", "is_label_issue", "label_score", "given_label", "predicted_label"]
    rows = table.to_pylist()
    assert [row["is_label_issue"] for row in rows] == [True] * 4 + [False] * 26
    assert [row["label_score"] for row in rows] == pytest.approx(findings.score, abs=1e-6)
    assert [row["given_label"] for row in rows[:3]] == CLASSES
    assert [row["predicted_label"] for row in rows[:3]] == [*CLASSES[1:], CLASSES[0]]
    with written[0].open(newline="") as file:
        assert [row["given_label"] for row in csv.DictReader(file)] == [row["given_label"] for row in rows]


def test_fiftyone_finds_every_picture_and_its_label(tmp_path: Path) -> None:
    """It names a picture by its path without the ending, in labels.json and, after it has cut it off, in data.json."""
    keys = ["a/1.jpg", "a/1.png", "b/2.jpg", "b/no ending", "b.c/3.d/x"]
    findings, split = made_up(5, CLASSES, suspicious=2, keys=keys)
    findings.true[2] = 1
    root = tmp_path / "pictures"
    for key in keys:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(key.encode())
    labels_file, data_file = write_fiftyone(findings, split, tmp_path, root)  # type: ignore[arg-type]
    assert {labels_file.parent.name, labels_file.name, data_file.name} == {"fiftyone", "labels.json", "data.json"}
    read = json.loads(labels_file.read_text())
    files = {os.path.splitext(name)[0]: path for name, path in json.loads(data_file.read_text()).items()}
    assert read["classes"] == CLASSES
    assert len(read["labels"]) == len(files) == 5
    by_key = {Path(files[name]).read_text(): label for name, label in read["labels"].items()}
    assert set(by_key) == set(keys)
    first, third = by_key["a/1.jpg"], by_key["b/2.jpg"]
    assert (first["label"], first["attributes"]["suggested"]) == ("cat", "dog")
    assert (first["attributes"]["suspicious"], third["attributes"]["suspicious"]) == (True, False)
    assert first["confidence"] == pytest.approx(findings.score[0], abs=1e-4)
    assert (third["attributes"]["true"], "true" in first["attributes"]) == ("dog", False)
