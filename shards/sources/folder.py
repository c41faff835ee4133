"""One folder for each class, pictures anywhere below it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards import bias
from shards.base.errors import UserError
from shards.base.progress import Log
from shards.config import BuildConfig
from shards.sources import Collection, SourceTable
from shards.sources.files import FileReader, entries_of, is_folder, is_text, printable, refuse_shared, walk

SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test"}


def class_folders(root: Path) -> list[str]:
    """Names of the class folders, sorted."""
    if not root.is_dir():
        raise UserError(f"There is no folder {root}. path must name a folder with one folder for each class.")
    names = sorted(entry.name for entry in entries_of(str(root)) if is_folder(entry))
    for name in names:
        if not is_text(name):
            raise UserError(f"The class folder '{printable(name)}' in {root} has a name that is not UTF-8. Rename it.")
    return names


def scan(root: Path, classes: list[str], split: str, log: Log) -> tuple[SourceTable, list[tuple[str, str, str]]]:
    """The pictures of the given class folders."""
    keys: list[pa.Array] = []
    labels: list[NDArray[np.int32]] = []
    rejected: list[tuple[str, str, str]] = []
    ignored = 0
    for number, name in enumerate(classes):
        files = walk(root, name) if (root / name).is_dir() else None
        if files is None:
            continue
        keys.append(pa.array(files.keys, pa.string()))
        labels.append(np.full(len(files.keys), number, np.int32))
        rejected += [(split, key, reason) for key, reason in files.rejected]
        ignored += files.ignored
    if ignored:
        log(f"{root}: {ignored} files are not JPEG, PNG or WebP by name and were left out.")
    given = np.concatenate([*labels, np.zeros(0, np.int32)])
    joined = pa.concat_arrays([*keys, pa.array([], pa.string())])
    return SourceTable(joined, given, np.full(len(given), -1, np.int32)), rejected


def split_off(rows: SourceTable, classes: int, config: BuildConfig) -> dict[str, SourceTable]:
    """Hold out a stratified, seeded part as the test split."""
    shuffled = bias.generator(config.validation_seed, "held out").permutation(len(rows))
    test = bias.hold_out(rows.given, np.arange(len(rows)), classes, config.validation_fraction, shuffled)
    held = np.isin(np.arange(len(rows)), test)
    return {"train": rows.take(~held), "test": rows.take(held)}


def collect(config: BuildConfig, log: Log) -> Collection:
    root = Path(config.path)
    own = os.path.realpath(os.path.expanduser(config.output)) if config.output else ""
    classes = [
        name for name in class_folders(root) if os.path.realpath(root / name) != own
    ]  # the output of this build may be among the pictures
    if len(classes) > 1 and set(classes) <= SPLIT_NAMES:
        first = next((name for name in classes if name.startswith("train")), classes[0])
        other = next(name for name in classes if name != first)
        raise UserError(
            f"{root} holds the folders {', '.join(classes)}: these look like splits, not classes. "
            f"Set path={root / first} validation_path={root / other}."
        )
    rows, rejected = scan(root, classes, "train", log)
    roots = {"train": str(root), "test": config.validation_path or str(root)}
    if config.validation_path:
        unknown = set(class_folders(Path(config.validation_path))) - set(classes)
        if unknown:
            raise UserError(
                f"{config.validation_path} holds the class '{min(unknown)}', which {root} does not have. "
                "Both need the same class folders."
            )
        test, more = scan(Path(config.validation_path), classes, "test", log)
        if not len(test):
            raise UserError(
                f"{config.validation_path} holds no picture of a class. Like {root} it must hold one folder for each."
            )
        refuse_shared(rows, test, roots)
        splits, rejected = {"train": rows, "test": test}, rejected + more
    else:
        splits = split_off(rows, len(classes), config)
    return Collection("folder", classes, splits, FileReader(roots, int(config.max_picture_mb * 1e6)), rejected)
