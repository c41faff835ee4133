"""Finished runs of sweeps in one file, and the table made from them.

The file is JSON: `runs` has a line for each run, with the settings that decide its result, the hash of its shards and its
summary; `rows` has means and spreads over them. A run that stands there need not be trained again, on any machine.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from pipeline.checkpoints.upgrade import upgrade_config
from pipeline.config import Config
from pipeline.tracking.tracker import DRAW
from shards.base.errors import UserError
from shards.base.files import atomic_write, removed_lock
from shards.base.redact import redact, redact_all
from shards.base.settings import Effect, effect_of, flatten
from shards.build import ensure
from shards.config import VALIDATION, BuildConfig
from shards.names import few_in_words
from shards.reader import read_manifest

Record = dict[str, Any]  # one finished run
Row = dict[str, Any]

RESULTS = ("best", "last", "mean_last10", "many", "medium", "few")
ON_VALIDATION = tuple(f"{VALIDATION}_{name}" for name in RESULTS)
COLUMNS = (*RESULTS, *ON_VALIDATION, "clean_f1", "clean_auc", "seconds")
OPTIONAL = (*ON_VALIDATION, "clean_auc")  # columns that are left out where no run has them
FEW = {"few": "test", f"{VALIDATION}_few": VALIDATION}  # column -> split
DIGITS = {"clean_f1": 3, "clean_auc": 3, "seconds": 0}  # of other columns: 2
REPEATED = ("seed", DRAW)  # what runs of one row differ in
DIFFERS = "what differs"
LEFT_OUT = {"shards", "tracking", "checkpoint", "output", "table_cell"}  # settings that a record has no use for
PLACES = ("data.features",)  # where something lies, not what it is
NOTES = (
    "few: mean over classes with fewer than 20 training samples. clean_f1: F1 of finding the right labels; methods that "
    "select no samples have none. clean_auc: chance that a right label scores higher than a wrong one. "
)
ABOUT_BEST = "best is chosen on the test set, so it is too high; last is the final epoch."
ABOUT_VALIDATION = "best is the epoch that was best on the validation part; validation_...: the same numbers there."


# -- one run ---------------------------------------------------------------------------------------


def deciding(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide a result, by dotted name. Those of the shards do not count: their hash does."""
    flat = flatten(upgrade_config(settings))
    return {k: v for k, v in flat.items() if effect_of(Config, k) is not Effect.NONE and k not in PLACES}


def record_of(name: str, choice: dict[str, str], config: Config, folder: Path) -> Record | None:
    """A run as it stands in the file; None if it has not finished."""
    file = folder / "summary.json"
    if not file.is_file():
        return None
    summary = json.loads(file.read_text(encoding="utf-8"))
    options = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["options"]
    return {
        "name": name, "choice": choice, "manifest": summary["manifest"], "summary": summary, "settings": _stored(config),
        "shards": options, "date": time.strftime("%Y-%m-%d"), **_machine(),
    }  # fmt: skip


def _stored(config: Config) -> dict[str, Any]:
    tree: dict[str, Any] = redact_all(config.model_dump(mode="json", exclude=LEFT_OUT))
    return tree


def same_run(one: Record, other: Record) -> bool:
    return bool(one["manifest"] == other["manifest"] and _asked(one) == _asked(other))


def _asked(record: Record) -> tuple[dict[str, Any], bool]:
    """A seed and a draw may be the same training, but stand in different rows of a table."""
    return deciding(record["settings"]), DRAW in record["choice"]


def find_finished(records: Sequence[Record], choice: dict[str, str], config: Config) -> Record | None:
    """The record with these settings and these shards, which are built to be compared where the settings are there."""
    wanted = _asked({"settings": _stored(config), "choice": choice})
    same = [record for record in records if _asked(record) == wanted]
    shards = _hash_of(config.shards) if same else ""
    return next((record for record in same if record["manifest"] == shards), None)


@cache
def _built(place: str, shards: str) -> str:
    return read_manifest(ensure(BuildConfig.model_validate_json(shards))).hash


def _hash_of(shards: BuildConfig) -> str:
    return _built(shards.place(), shards.model_dump_json())


def _machine() -> dict[str, str]:
    import torch

    device = "CUDA" if torch.cuda.is_available() else "no GPU"
    return {"torch": torch.__version__, "machine": f"{os.cpu_count()} cores, {platform.machine()}, {device}"}


# -- the file --------------------------------------------------------------------------------------


def read_runs(file: Path) -> list[Record]:
    """The runs in a file of results; none if there is no such file."""
    if not file.exists():
        return []
    try:
        runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
        if not all(isinstance(run[key], dict) for run in runs for key in ("choice", "settings", "shards", "summary")):
            raise TypeError
        if not all(isinstance(run[key], str) for run in runs for key in ("name", "manifest")):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{file} holds no runs with their settings: it is damaged, something else, or of an older version. Give rows= "
            "another file."
        ) from None
    return list(runs)


def add_run(file: Path, record: Record, command: str) -> None:
    """Add a run, or put it in the place of an older one of the same settings and shards. Several sweeps may do so at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with removed_lock(file.with_name(f".{file.name}.lock")):
        runs = [run for run in read_runs(file) if not same_run(run, record)]
        write_results(file, [*runs, record], command)


def write_results(file: Path, records: Sequence[Record], command: str) -> None:
    """The runs, the rows made from them, and the same rows as a table in Markdown beside the file."""
    made = {"command": command, "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), **_machine()}
    rows = rows_of(records)
    head = json.dumps({"made": made, "rows": rows}, indent=1)
    lines = ",\n".join(
        "  " + json.dumps(record) for record in records
    )  # a line each: files of two machines can be merged
    atomic_write(file, f'{head.removesuffix("}").rstrip()},\n "runs": [\n{lines}\n ]\n}}\n')
    atomic_write(file.with_suffix(".md"), as_markdown(rows, made))


# -- the table -------------------------------------------------------------------------------------


def rows_of(records: Sequence[Record]) -> list[Row]:
    """One row for all seeds on one set of shards, or for all draws."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(json.dumps(_group(record), sort_keys=True), []).append(record)
    keys = list(dict.fromkeys(key for record in records for key in record["choice"] if key not in REPEATED))
    rows = [_row(sorted(members, key=lambda record: record["summary"]["seed"]), keys) for members in groups.values()]
    _tell_apart(rows, [members[0] for members in groups.values()], keys)
    return rows


def _group(record: Record) -> dict[str, Any]:
    """What all runs of a row have in common."""
    settings = {k: v for k, v in deciding(record["settings"]).items() if k != "seed"}
    if DRAW not in record["choice"]:
        return {**settings, "manifest": record["manifest"]}
    shards = {k: v for k, v in record["shards"].items() if k != "bias_seed"}
    return {**settings, "shards": shards, DRAW: True}


def _settings_of(record: Record) -> dict[str, Any]:
    return {**flatten(record["settings"]), **{f"shards.{key}": value for key, value in record["shards"].items()}}


def _row(members: list[Record], keys: list[str]) -> Row:
    first, summaries = members[0], [record["summary"] for record in members]
    known = {**_settings_of(first), **first["choice"]}
    row: Row = {key: known.get(key, "") for key in keys}
    row["draws" if DRAW in first["choice"] else "seeds"] = len(members)
    for column in COLUMNS:
        values = [summary[column] for summary in summaries if summary.get(column) is not None]
        if values:
            spread = stdev(values) if len(values) > 1 else None
            row[column] = {"mean": mean(values), "spread": spread, "values": values}
    if len(members) == 1:
        row["few_of"] = {split: few_in_words(summaries[0], split) for split in FEW.values()}
    row["runs"] = {record["name"]: record["summary"].get("run_id") for record in members}
    row["epochs"], row["recipe"] = known.get("train.epochs"), known.get("recipe")
    return row


def _tell_apart(rows: list[Row], firsts: list[Record], keys: list[str]) -> None:
    """Rows of one name, from sweeps with other fixed settings, say in what they differ."""
    named: dict[str, list[int]] = {}
    for at, row in enumerate(rows):
        named.setdefault(json.dumps([row[key] for key in keys], default=str), []).append(at)
    for members in named.values():
        settings = {at: _settings_of(firsts[at]) for at in members}
        every = sorted({key for one in settings.values() for key in one} - {*REPEATED, "shards.bias_seed"})
        apart = [key for key in every if len({str(one.get(key)) for one in settings.values()}) > 1]
        for at in members if apart else ():
            rows[at][DIFFERS] = " ".join(f"{key}={settings[at].get(key)}" for key in apart)


def as_markdown(rows: list[Row], made: dict[str, str]) -> str:
    columns = [column for column in COLUMNS if column not in OPTIONAL or any(column in row for row in rows)]
    hidden = (*COLUMNS, "runs", "few_of")
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in hidden))
    on_validation = any(f"{VALIDATION}_last" in row for row in rows)
    over = {"draws": "draws of seed and bias together", "seeds": "seeds, on the same data"}
    said = " or over ".join(text for key, text in over.items() if key in keys)
    lines = [f"Made by `{made['command']}` on {made['date']}: {made['machine']}, torch {made['torch']}.", ""]
    lines += ["| " + " | ".join([*keys, *columns]) + " |", "|" + "---|" * (len(keys) + len(columns))]
    lines += [
        "| "
        + " | ".join([*(str(row.get(key, "")) for key in keys), *(_cell(row, column) for column in columns)])
        + " |"
        for row in rows
    ]
    lines += ["", f"Mean ± standard deviation over {said}. {NOTES}{ABOUT_VALIDATION if on_validation else ABOUT_BEST}"]
    lines += ["", "Runs in MLflow:", ""]
    for row in rows:
        ids = ", ".join(run_id for run_id in row["runs"].values() if run_id)
        lines.append(f"- {' '.join(str(row[key]) for key in keys if key in row)}: {ids or 'none'}")
    return "\n".join(lines) + "\n"


def _cell(row: Row, column: str) -> str:
    value = row.get(column)
    if value is None:
        return "-"
    digits = DIGITS.get(column, 2)
    spread = f" ± {value['spread']:.{digits}f}" if value["spread"] is not None else ""
    return f"{value['mean']:.{digits}f}{spread}{row.get('few_of', {}).get(FEW.get(column, ''), '')}"


def shown_command(prog: str, argv: list[str]) -> str:
    return redact(f"{prog} {shlex.join(argv)}")
