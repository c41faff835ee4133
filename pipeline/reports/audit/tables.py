"""The table of an audit, a row for every training sample, and its numbers in all and by class."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.reports.audit.findings import Findings, rates, wrong_share
from pipeline.reports.audit.issues import Issue
from pipeline.reports.audit.shares import Share
from shards.base.files import atomic_write

if TYPE_CHECKING:
    from shards.reader import Split


def write_tables(findings: Findings, split: Split, out: Path, more: Mapping[str, np.ndarray] = {}) -> None:
    """`more`: further columns, a value for each sample."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    names = np.asarray(split.classes, dtype=object)
    known = findings.true >= 0
    columns: dict[str, Any] = {
        "index": pa.array(np.arange(len(split)), pa.int64()),
        "key": pa.array(split.keys(), pa.string()),
        "given": pa.array(names[findings.given], pa.string()),
        "suggested": pa.array(names[findings.suggested], pa.string()),
        "suspicious": pa.array(findings.suspicious),
        "score": pa.array(findings.score.astype(np.float32)),
        "suggested_score": pa.array(findings.suggested_score.astype(np.float32)),
        "weight": pa.array(np.ones(len(split), np.float32) if findings.weight is None else findings.weight),
        "epochs_flagged": pa.array(findings.epochs_flagged),
        "neighbours": pa.array(findings.neighbours, pa.list_(pa.int64())),
    }
    if findings.training_score is not None:
        columns["training_score"] = pa.array(findings.training_score.astype(np.float32))
    if findings.typicality is not None and findings.outlier is not None:
        columns["typicality"] = pa.array(findings.typicality.astype(np.float32))
        columns["outlier"] = pa.array(findings.outlier)
    columns |= {name: pa.array(values) for name, values in more.items()}
    if known.any():
        columns["true"] = pa.array([name if k else None for name, k in zip(names[findings.true], known)], pa.string())
    table = pa.table(columns)
    pa.parquet.write_table(table, out / "audit.parquet")
    column = table.column_names.index("neighbours")
    joined = pa.array([" ".join(map(str, few)) for few in findings.neighbours], pa.string())
    pa.csv.write_csv(table.set_column(column, "neighbours", joined), out / "audit.csv")


def write_summary(findings: Findings, issues: Sequence[Issue], classes: Sequence[str], out: Path) -> None:
    """`audit.json`: what the audit prints, for programs."""
    by_class = rates(findings, len(classes))
    summary = {
        "labels": _numbers(wrong_share(findings, len(classes))),
        "classes": {name: _numbers(share) for name, share in zip(classes, by_class)},
        "issues": {issue.id: len(issue.samples) for issue in issues},
    }
    atomic_write(out / "audit.json", json.dumps(summary, indent=1, ensure_ascii=False) + "\n")


def _numbers(share: Share) -> dict[str, Any]:
    """Without an estimate where nothing is judged: the part that is suspicious is none."""
    numbers: dict[str, Any] = {"samples": share.total, "suspicious": share.flagged, "judged": share.judged}
    return numbers | ({"wrong": share.share, "low": share.low, "high": share.high} if share.judged else {})
