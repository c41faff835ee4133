"""What people decided on the audit page: read from the file that the page exports, CSV or JSON."""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shards.base.errors import UserError

if TYPE_CHECKING:
    from shards.reader import Split

COLUMNS = ("index", "key", "given", "decision", "label")
ACTIONS = ("", "keep", "relabel", "drop")  # by their number in Decisions.action
NONE, KEEP, RELABEL, DROP = range(4)
EXPORT = "Export the decisions again from audit.html"


@dataclass(frozen=True)
class Decisions:
    """By permanent index."""

    action: NDArray[np.int8]  # (N,) 0 none, 1 keep, 2 relabel, 3 drop
    label: NDArray[np.int64]  # (N,) the label after the decision; the given one where nothing is relabelled

    @property
    def decided(self) -> int:
        return int((self.action != NONE).sum())


def read_decisions(path: Path | str, split: Split) -> Decisions:
    """The decisions in a file, for the samples of this split. A sample is known by its key; by its index where several
    samples have that key."""
    rows = _rows(Path(path))
    given = np.asarray(split.given, np.int64)
    action, label = np.zeros(len(given), np.int8), given.copy()
    number = {name: k for k, name in enumerate(split.classes)}
    places = _places(split, {row["key"] for _, row in rows})
    seen: dict[int, str] = {}
    for where, row in rows:
        index = _sample(where, row, places)
        if index in seen:
            raise UserError(
                f"{where} decides about {_named(row, index)} again, after {seen[index]}. Delete one of the two."
            )
        seen[index] = where
        if row["given"] != split.classes[given[index]]:
            raise UserError(
                f"{where}: {_named(row, index)} was labelled '{row['given']}' when it was decided about, here it is "
                f"'{split.classes[given[index]]}'. The file belongs to other shards: give those, or audit again."
            )
        action[index], label[index] = _decision(where, row, number, int(given[index]))
    return Decisions(action, label)


def remembered(suspicious: NDArray[np.bool_], decisions: Decisions) -> NDArray[np.bool_]:
    """`suspicious` without the samples of which somebody said that their label is right."""
    out: NDArray[np.bool_] = suspicious & (decisions.action != KEEP)
    return out


def _decision(where: str, row: dict[str, str], number: dict[str, int], given: int) -> tuple[int, int]:
    word = row["decision"].strip().lower()
    if not word or word not in ACTIONS:
        raise UserError(
            f"{where}: the decision is '{row['decision']}'. Write keep, relabel or drop, or delete the row."
        )
    action, name = ACTIONS.index(word), row["label"]
    if action != RELABEL:
        if action == KEEP and name not in ("", row["given"]):
            raise UserError(f"{where} keeps '{row['given']}' but has the label '{name}'. Write relabel, or no label.")
        return action, given
    if not name:
        raise UserError(f"{where} says relabel but has no label. Write the name of a class, or keep or drop.")
    if name not in number:
        near = difflib.get_close_matches(name, number, n=1)
        hint = (
            f"did you mean '{near[0]}'?"
            if near
            else f"there are {len(number)} classes, such as '{next(iter(number))}'."
        )
        raise UserError(f"{where}: these shards have no class '{name}'; {hint}")
    return (RELABEL, number[name]) if number[name] != given else (KEEP, given)


# -- which sample a row is about -------------------------------------------------------------------


def _places(split: Split, wanted: set[str]) -> dict[str, list[int]]:
    """Indices of the samples with each wanted key."""
    places: dict[str, list[int]] = {}
    for index, key in enumerate(split.keys()):
        if key in wanted:
            places.setdefault(key, []).append(index)
    return places


def _sample(where: str, row: dict[str, str], places: dict[str, list[int]]) -> int:
    found = places.get(row["key"], [])
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(
            f"{where}: these shards have no sample '{row['key']}'. The file belongs to other shards: give those, "
            "or delete the row."
        )
    text = row["index"].strip()
    if text.isascii() and text.isdigit() and int(text) in found:
        return int(text)
    raise UserError(
        f"{where}: {len(found)} samples are called '{row['key']}', and none of them has the index '{text}'. "
        f"Write one of their indices: {', '.join(map(str, found[:5]))}{', ...' if len(found) > 5 else ''}."
    )


def _named(row: dict[str, str], index: int) -> str:
    return f"sample {index} ('{row['key']}')"


# -- the two formats -------------------------------------------------------------------------------


def _rows(path: Path) -> list[tuple[str, dict[str, str]]]:
    """(where it stands, for messages; its columns) of every row."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Give the file that audit.html exported.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text. Save it as UTF-8, or export it again from audit.html.") from None
    json_like = path.suffix.lower() == ".json" or text.lstrip()[:1] in ("[", "{")
    return _from_json(text, path) if json_like else _from_csv(text, path)


def _from_csv(text: str, path: Path) -> list[tuple[str, dict[str, str]]]:
    csv.field_size_limit(1 << 24)
    table = csv.reader(io.StringIO(text, newline=""))  # a key may hold a line break: ends of lines stay as they are
    rows = []
    try:
        header = next(table, [])
        _check_columns(header, path)
        for cells in table:
            if not any(cells):
                continue
            where = f"{path}, line {table.line_num}"
            if len(cells) != len(header):
                raise UserError(f"{where} has {len(cells)} cells, not {len(header)}. {EXPORT}, or correct the line.")
            rows.append((where, dict(zip(header, cells))))
    except csv.Error as error:
        raise UserError(f"{path}, line {table.line_num}, is not CSV ({error}). {EXPORT}.") from None
    return rows


def _from_json(text: str, path: Path) -> list[tuple[str, dict[str, str]]]:
    try:
        tree: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}). {EXPORT}.") from None
    if not isinstance(tree, list) or not all(isinstance(row, dict) for row in tree):
        raise UserError(f"{path} is not a list of decisions. {EXPORT}.")
    rows = []
    for number, row in enumerate(tree, 1):
        _check_columns(list(row), path, f", decision {number},")
        cells = {name: "" if row[name] is None else row[name] for name in COLUMNS}
        cells["index"] = str(cells["index"])
        if not all(isinstance(cell, str) for cell in cells.values()):
            raise UserError(f"{path}, decision {number}: key, given, decision and label must be text. {EXPORT}.")
        rows.append((f"{path}, decision {number}", cells))
    return rows


def _check_columns(found: Sequence[str], path: Path, where: str = "") -> None:
    missing = [name for name in COLUMNS if name not in found]
    if missing or len(set(found)) != len(found):
        wrong = f"no column {', '.join(missing)}" if missing else "a column twice"
        raise UserError(
            f"{path}{where} has {wrong}. It needs {', '.join(COLUMNS)}, separated by commas in CSV. {EXPORT}."
        )
