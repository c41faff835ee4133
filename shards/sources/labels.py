"""Tables of labels, CSV or Parquet. Everything is read as text; errors name the row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from shards.base.errors import UserError
from shards.config import OLD_COLUMNS, BuildConfig
from shards.sources import Collection
from shards.sources.files import first_true


def read_table(path: str, columns: list[str], optional: tuple[str, ...] = ()) -> pa.Table:
    """The named columns as text; a missing one of `columns` is an error, of `optional` is not.

    `given` and `true` may be called `label` and `true_label` in the file.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"There is no label list {file}. Check the path.")
    parquet = file.suffix == ".parquet"
    try:
        names = pa.parquet.read_schema(file).names if parquet else pa.csv.open_csv(file).schema.names
        chosen = _chosen(file, names, columns, optional)
        in_file = [*chosen.values()]
        if parquet:
            table = pa.parquet.read_table(file, columns=in_file)
        else:
            # Read as text: class '007' must not become 7, and 'NA' must not become empty.
            types = pa.csv.ConvertOptions(
                include_columns=in_file, column_types=dict.fromkeys(in_file, pa.string()), strings_can_be_null=False
            )
            table = pa.csv.read_csv(
                file, convert_options=types, parse_options=pa.csv.ParseOptions(newlines_in_values=True)
            )
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise UserError(
            f"{file} cannot be read as {'Parquet' if parquet else 'CSV'} ({str(error).strip()}). "
            "Write it as CSV in UTF-8 with a header line, or as .parquet."
        ) from None
    out = {}
    for name, written in chosen.items():
        column = table[written]
        try:
            if isinstance(column.type, pa.DictionaryType):
                column = column.cast(column.type.value_type)
            text = column.cast(pa.string()).combine_chunks()
        except pa.ArrowException:
            raise UserError(
                f"{file}: column '{written}' ({column.type}) is not text or numbers. Write it as text."
            ) from None
        empty = first_true(text.is_null()) if name in columns else None
        if empty is not None:
            raise UserError(f"{file}, row {empty + 1}: column '{written}' is empty. Fill it or drop the row.")
        out[name] = text
    return pa.table(out)


def _chosen(file: Path, names: list[str], columns: list[str], optional: tuple[str, ...]) -> dict[str, str]:
    """The wanted columns and what the file calls them. Only they are read; the file may hold others."""
    old = {new: old for new, old in OLD_COLUMNS.items() if new not in names and old in names}
    missing = [name for name in columns if name not in names and name not in old]
    if missing:
        raise UserError(
            f"{file} has no column '{missing[0]}'; its first line has {', '.join(map(repr, names[:9]))}. "
            "It must name the columns, with commas between them; path_column, label_column, true_column and "
            "split_column say which is which."
        )
    chosen = {name: old.get(name, name) for name in (*columns, *optional) if name in names or name in old}
    for name in chosen.values():
        if names.count(name) > 1:
            raise UserError(f"{file} has two columns '{name}'. Rename one of them.")
    return chosen


def to_numbers(column: pa.Array, classes: list[str], where: str) -> NDArray[np.int32]:
    """Class numbers of labels written as class names or as numbers; an empty one is -1."""
    by_name = {name: k for k, name in enumerate(classes)} | {
        str(k): k for k in range(len(classes)) if str(k) not in classes
    }
    encoded = column.dictionary_encode()
    numbers = []
    for value in encoded.dictionary.to_pylist():
        if value and value not in by_name:
            row = column.index(value).as_py() + 1
            shown = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
            raise UserError(f"{where}, row {row}: there is no class '{value}'. Classes are {shown}. Correct the label.")
        numbers.append(by_name[value] if value else -1)
    indices: NDArray[np.int32] = encoded.indices.fill_null(len(numbers)).to_numpy(zero_copy_only=False)
    return np.array([*numbers, -1], np.int32)[indices]


def with_labels(collection: Collection, config: BuildConfig) -> Collection:
    """The collection with the given training labels replaced by a published list (CIFAR-N style)."""
    if not config.labels:
        return collection
    train = collection.splits["train"]
    if Path(config.labels).suffix == ".pt":
        from shards.sources.cifar_n import read_cifar_n

        given = read_cifar_n(config.labels, config.label_column, train.true, len(collection.classes))
    else:
        given = _from_table(config, collection)
    return replace(collection, splits=collection.splits | {"train": replace(train, given=given)})


def _from_table(config: BuildConfig, collection: Collection) -> NDArray[np.int32]:
    column = read_table(config.labels, [config.label_column])[config.label_column].combine_chunks()
    pictures = len(collection.splits["train"])
    if len(column) != pictures:
        raise UserError(
            f"{config.labels} has {len(column)} labels, {collection.name} has {pictures} training pictures. "
            "One row for each, in the original order, is needed."
        )
    given = to_numbers(column, collection.classes, config.labels)
    if (given < 0).any():
        row = int(np.flatnonzero(given < 0)[0]) + 1
        raise UserError(f"{config.labels}, row {row}: the label is empty. Fill it.")
    return given
