"""The findings in the layouts that other programs read: cleanlab's columns, FiftyOne's labels."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.reports.audit.findings import Findings

if TYPE_CHECKING:
    from shards.reader import Split


def write_cleanlab(findings: Findings, split: Split, out: Path) -> list[Path]:
    """cleanlab.csv and cleanlab.parquet: the columns of Datalab.get_issues("label"), and the key of each sample."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    names = np.asarray(split.classes, dtype=object)
    table = pa.table(
        {
            "key": pa.array(split.keys(range(len(findings.given))), pa.string()),
            "is_label_issue": pa.array(findings.suspicious),
            "label_score": pa.array(findings.score.astype(np.float32)),
            "given_label": pa.array(names[findings.given], pa.string()),
            "predicted_label": pa.array(names[findings.suggested], pa.string()),
        }
    )
    pa.parquet.write_table(table, out / "cleanlab.parquet")
    pa.csv.write_csv(table, out / "cleanlab.csv")
    return [out / "cleanlab.csv", out / "cleanlab.parquet"]


def write_fiftyone(findings: Findings, split: Split, out: Path, root: Path | None = None) -> list[Path]:
    """labels.json in the layout of FiftyOneImageClassificationDataset, in the folder `out`/fiftyone.

    FiftyOne names a picture by its path without the ending. With `root`, the folder that keys start from, data.json
    says where the pictures are; without, put them into `out`/fiftyone/data.
    """
    folder = out / "fiftyone"
    folder.mkdir(parents=True, exist_ok=True)
    classes = list(split.classes)
    labels: dict[str, dict[str, Any]] = {}
    files: dict[str, str] = {}
    for index, key in enumerate(split.keys(range(len(findings.given)))):
        path = PurePosixPath(key)
        name = str(path.with_suffix("")) if path.suffix else key
        if name in labels:  # the same name with another ending
            name += f"_{index}"
        attributes: dict[str, Any] = {
            "index": index,
            "suspicious": bool(findings.suspicious[index]),
            "suggested": classes[findings.suggested[index]],
            "suggested_confidence": round(float(findings.suggested_score[index]), 4),
        }
        if findings.true[index] >= 0:
            attributes["true"] = classes[findings.true[index]]
        labels[name] = {
            "label": classes[findings.given[index]],
            "confidence": round(float(findings.score[index]), 4),
            "attributes": attributes,
        }
        if root is not None:
            files[name + path.suffix] = str((root / key).absolute())
    written = [folder / "labels.json"]
    _write(written[0], {"classes": classes, "labels": labels})
    if root is not None:
        written.append(folder / "data.json")
        _write(written[1], files)
    return written


def _write(path: Path, tree: object) -> None:
    path.write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")
