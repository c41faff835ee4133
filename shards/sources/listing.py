"""A label list (CSV or Parquet): path, label, perhaps the true label, perhaps the split."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.config import BuildConfig
from shards.settings import UserError
from shards.sources import Collection, Log, Rows
from shards.sources.files import FileReader, drop_missing, refuse_shared
from shards.sources.folder import split_off
from shards.sources.labels import read_table, to_numbers

_TRAIN = {"train", "training", "0", "false"}
_TEST = {"test", "val", "valid", "validation", "1", "true"}
_OUTSIDE = re.compile(r"^([/\\]|[A-Za-z]:)|(^|[/\\])\.\.([/\\]|$)|\0")


def collect(config: BuildConfig, log: Log) -> Collection:
    table = _read(config.path, config)
    extra = _read(config.validation_path, config) if config.validation_path else None
    classes = _classes([table, *([extra] if extra else [])], config)
    rows = _rows(table, classes, config.path, config)
    roots = {"train": _root(config.path, config)}
    roots["test"] = _root(config.validation_path, config) if extra else roots["train"]
    if extra:
        if config.split_column in table.column_names:
            raise UserError(
                f"{config.path} has the column '{config.split_column}', and validation_path names a second list. "
                "Leave out one of the two."
            )
        splits = {"train": rows, "test": _trusted(_rows(extra, classes, config.validation_path, config))}
    elif config.split_column in table.column_names:
        test = _is_test(table[config.split_column].to_pylist(), config)
        splits = {"train": rows.take(~test), "test": _trusted(rows.take(test))}
        if not test.any():
            raise UserError(f"{config.path}: column '{config.split_column}' names no test picture. Add some.")
    else:
        splits = split_off(rows, len(classes), config)
        splits["test"] = _trusted(splits["test"])
    refuse_shared(splits["train"], splits["test"], roots)
    rejected: list[tuple[str, str, str]] = []
    for name, part in splits.items():
        splits[name], missing = drop_missing(part, roots[name], name)
        rejected += missing
    return Collection("list", classes, splits, FileReader(roots, int(config.max_picture_mb * 1e6)), rejected)


def _read(path: str, config: BuildConfig) -> pa.Table:
    table = read_table(path, [config.path_column, config.label_column], (config.true_column, config.split_column))
    for setting, column, usual in (
        ("true_column", config.true_column, "true_label"),
        ("split_column", config.split_column, "split"),
    ):
        if column != usual and column not in table.column_names:
            raise UserError(f"{path} has no column '{column}', which {setting} names. Correct the name.")
    if not len(table):
        raise UserError(f"{path} is empty. A label list needs a header line and one row for each picture.")
    return table


def _root(path: str, config: BuildConfig) -> str:
    root = config.root or str(Path(path).parent)
    if not os.path.isdir(root):
        raise UserError(f"There is no folder {root}, where the paths of {path} should start. Set root.")
    return root


def _classes(tables: list[pa.Table], config: BuildConfig) -> list[str]:
    """Every label in use; numbers in numerical order, names in alphabetical order."""
    found: set[str] = set()
    for table in tables:
        for column in (config.label_column, config.true_column):
            if column in table.column_names:
                found |= {value for value in table[column].unique().to_pylist() if value}
    if all(re.fullmatch(r"\d+", value) for value in found):
        return sorted(found, key=int)
    return sorted(found)


def _rows(table: pa.Table, classes: list[str], where: str, config: BuildConfig) -> Rows:
    paths: list[Any] = table[config.path_column].to_pylist()
    keys = [_key(path, row, where) for row, path in enumerate(paths, 1)]
    first: dict[str, int] = {}
    for row, key in enumerate(keys, 1):
        if first.setdefault(key, row) != row:
            raise UserError(f"{where}: rows {first[key]} and {row} both name '{key}'. Keep one of them.")
    given = to_numbers(table[config.label_column].combine_chunks(), classes, where)
    if (given < 0).any():
        row = int(np.flatnonzero(given < 0)[0]) + 1
        raise UserError(f"{where}, row {row}: the label is empty. Fill it or drop the row.")
    true = np.full(len(given), -1, np.int32)
    if config.true_column in table.column_names:
        true = to_numbers(table[config.true_column].combine_chunks(), classes, where)
    return Rows(pa.array(keys, pa.string()), given, true)


def _key(path: str, row: int, where: str) -> str:
    if not path or _OUTSIDE.search(path):
        raise UserError(
            f"{where}, row {row}: the path '{path}' is not below the root folder. Paths must be relative, without '..'."
        )
    return posixpath.normpath(path)


def _is_test(values: list[str | None], config: BuildConfig) -> NDArray[np.bool_]:
    out = np.zeros(len(values), bool)
    for row, value in enumerate(values):
        word = (value or "").strip().lower()
        if word not in _TRAIN | _TEST:
            raise UserError(
                f"{config.path}, row {row + 1}: '{value}' in column '{config.split_column}' is no split. "
                "Write train or test."
            )
        out[row] = word in _TEST
    return out


def _trusted(rows: Rows) -> Rows:
    """A test split is judged by true labels where they are known."""
    return Rows(rows.keys, np.where(rows.true >= 0, rows.true, rows.given).astype(np.int32), rows.true)
