"""A label list (CSV or Parquet): path, given label, perhaps the true label, perhaps the split."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from shards.base.errors import UserError
from shards.base.progress import Log
from shards.config import BuildConfig
from shards.sources import Collection, SourceTable
from shards.sources.files import FileReader, drop_missing, first_true, refuse_shared
from shards.sources.folder import split_off
from shards.sources.labels import read_table, to_numbers

_TRAIN = {"train", "training", "0", "false"}
_TEST = {"test", "val", "valid", "validation", "1", "true"}
_OUTSIDE = r"^$|^([/\\]|[A-Za-z]:)|(^|[/\\])\.\.([/\\]|$)|\x00"
_NOT_PLAIN = r"(^|/)\.(/|$)|//|/$"


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
        splits = {"train": rows, "test": _with_true_labels(_rows(extra, classes, config.validation_path, config))}
    elif config.split_column in table.column_names:
        test = _is_test(table[config.split_column], config)
        splits = {"train": rows.take(~test), "test": _with_true_labels(rows.take(test))}
        if not test.any():
            raise UserError(f"{config.path}: column '{config.split_column}' names no test picture. Add some.")
    else:
        splits = split_off(rows, len(classes), config)
        splits["test"] = _with_true_labels(splits["test"])
    refuse_shared(splits["train"], splits["test"], roots)
    rejected: list[tuple[str, str, str]] = []
    for name, part in splits.items():
        splits[name], missing = drop_missing(part, roots[name], name)
        if 2 * len(missing) > len(part):
            _refuse_root(
                config.validation_path if name == "test" and extra else config.path, roots[name], missing, len(part)
            )
        rejected += missing
    return Collection("list", classes, splits, FileReader(roots, int(config.max_picture_mb * 1e6)), rejected)


def _read(path: str, config: BuildConfig) -> pa.Table:
    table = read_table(path, [config.path_column, config.label_column], (config.true_column, config.split_column))
    for setting, column, usual in (
        ("true_column", config.true_column, "true"),
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


def _refuse_root(where: str, root: str, missing: list[tuple[str, str, str]], total: int) -> None:
    """UserError: most files of a list are missing, so its paths start elsewhere."""
    first = missing[0][1]
    parent, here = Path(root).absolute(), Path(where).absolute().parent
    tried = [here, *here.parents[:2], parent, *parent.parents[:2]]
    found = next((str(folder) for folder in tried if (folder / first).is_file()), None)
    advice = f"Set root={found}" if found else "Set root to the folder that the paths of the list start from"
    raise UserError(
        f"{len(missing)} of {total} files of {where} are missing: the root is probably wrong. Tried, for example: "
        f"{Path(root) / first}. {advice}."
    )


def _classes(tables: list[pa.Table], config: BuildConfig) -> list[str]:
    """Every label in use; numbers in numerical order, names in alphabetical order."""
    labels: set[str] = set()
    for table in tables:
        for column in (config.label_column, config.true_column):
            if column in table.column_names:
                labels |= {value for value in table[column].unique().to_pylist() if value}
    if all(re.fullmatch(r"\d+", value) for value in labels):
        return sorted(labels, key=int)
    return sorted(labels)


def _rows(table: pa.Table, classes: list[str], where: str, config: BuildConfig) -> SourceTable:
    keys = _keys(_below(table[config.path_column].combine_chunks(), _root(where, config)), where)
    given = to_numbers(table[config.label_column].combine_chunks(), classes, where)
    if (given < 0).any():
        row = int(np.flatnonzero(given < 0)[0]) + 1
        raise UserError(f"{where}, row {row}: the label is empty. Fill it or drop the row.")
    true = np.full(len(given), -1, np.int32)
    if config.true_column in table.column_names:
        true = to_numbers(table[config.true_column].combine_chunks(), classes, where)
    return SourceTable(keys, given, true)


def _below(paths: pa.Array, root: str) -> pa.Array:
    """Absolute paths below the root, as relative ones. Others stay as they are."""
    absolute = pa.compute.starts_with(paths, "/")
    if first_true(absolute) is None:
        return paths
    tops = {os.path.abspath(root), os.path.realpath(root)}

    def relative(path: str) -> str:
        plain = posixpath.normpath(path)
        return next((plain[len(top) :].lstrip("/") for top in tops if plain.startswith(top.rstrip("/") + "/")), path)

    short: list[Any] = [relative(path) for path in paths.filter(absolute).to_pylist()]
    return pa.compute.replace_with_mask(paths, absolute, pa.array(short, pa.string()))


def _keys(paths: pa.Array, where: str) -> pa.Array:
    """The paths in their plain form, each below the root and each once."""
    bad = first_true(pa.compute.match_substring_regex(paths, _OUTSIDE))
    if bad is not None:
        raise UserError(
            f"{where}, row {bad + 1}: the path '{paths[bad]}' is not below the root folder. "
            "Paths must be relative, without '..', or absolute and below it."
        )
    odd = pa.compute.match_substring_regex(paths, _NOT_PLAIN)
    plain: list[Any] = [posixpath.normpath(path) for path in paths.filter(odd).to_pylist()]
    keys = pa.compute.replace_with_mask(paths, odd, pa.array(plain, pa.string()))
    encoded = keys.dictionary_encode()
    if len(encoded.dictionary) < len(keys):
        numbers = encoded.indices.to_numpy()
        _, first = np.unique(numbers, return_index=True)
        again = int(np.setdiff1d(np.arange(len(keys)), first)[0])
        before = int(np.flatnonzero(numbers == numbers[again])[0])
        raise UserError(f"{where}: rows {before + 1} and {again + 1} both name '{keys[again]}'. Keep one of them.")
    return keys


def _is_test(column: pa.ChunkedArray, config: BuildConfig) -> NDArray[np.bool_]:
    words = pa.compute.utf8_lower(pa.compute.utf8_trim_whitespace(column.fill_null("")))
    test = pa.compute.is_in(words, pa.array(sorted(_TEST)))
    unknown = first_true(pa.compute.invert(pa.compute.or_(test, pa.compute.is_in(words, pa.array(sorted(_TRAIN))))))
    if unknown is not None:
        raise UserError(
            f"{config.path}, row {unknown + 1}: '{column[unknown]}' in column '{config.split_column}' is no split. "
            "Write train or test."
        )
    is_test: NDArray[np.bool_] = test.to_numpy()
    return is_test


def _with_true_labels(rows: SourceTable) -> SourceTable:
    """In a test split true labels replace given ones where they are known."""
    return SourceTable(rows.keys, np.where(rows.true >= 0, rows.true, rows.given).astype(np.int32), rows.true)
