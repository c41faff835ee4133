"""WebVision 1.0 as published: lists in `info/`, pictures in `google/`, `flickr/` and `val_images_256/`.

`classes=50` gives mini-WebVision. The ILSVRC-2012 validation pictures of the same classes (a folder for each
WordNet id) become the split 'imagenet'.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from shards.base.errors import UserError
from shards.base.progress import Log
from shards.config import BuildConfig
from shards.sources import Collection, SourceTable
from shards.sources.files import FileReader, drop_missing, first_true, walk

FIRST = "n01440764"
VALIDATION_OF_A_CLASS = 50  # pictures, in both validation sets
_LAYOUT = "path must hold info/, google/ or flickr/, and val_images_256/, as WebVision 1.0 is published."


def collect(config: BuildConfig, log: Log) -> Collection:
    root = Path(config.path)
    classes = _classes(root, config)
    wanted = ("google", "flickr") if config.parts == "both" else (config.parts,)
    lists = [_list(root, f"train_filelist_{part}.txt", len(classes), "", not config.classes) for part in wanted]
    splits = {
        "train": _join(lists),
        "test": _list(root, "val_filelist.txt", len(classes), "val_images_256/", not config.classes),
    }
    roots = {"train": str(root), "test": str(root)}
    missing: list[tuple[str, str, str]] = []
    for name in splits:
        splits[name], missing_here = drop_missing(splits[name], roots[name], name)
        missing += missing_here
    rejected = list(missing)
    if config.imagenet:
        splits["imagenet"], unusable = _imagenet(Path(config.imagenet), classes)
        rejected += unusable
        roots["imagenet"] = config.imagenet
    train = len(splits["train"])
    log(f"WebVision {' and '.join(wanted)}: {train} training pictures of {len(classes)} classes.")
    expected = VALIDATION_OF_A_CLASS * len(classes)
    for name, title in (("test", "WebVision"), ("imagenet", "ILSVRC-2012")):
        if name in splits:
            count = len(splits[name])
            short = "" if count == expected else f"; {expected} were published, figures will not be comparable"
            log(f"{title} validation: {count} pictures{short}.")
    if missing:
        log(f"{len(missing)} listed files are missing, the first: {missing[0][1]}")
    return Collection("webvision", classes, splits, FileReader(roots, int(config.max_picture_mb * 1e6)), rejected)


def _text(root: Path, name: str) -> Path:
    file = root / "info" / name
    if not file.is_file():
        raise UserError(f"There is no {file}. {_LAYOUT}")
    return file


def _classes(root: Path, config: BuildConfig) -> list[str]:
    """'n01440764 tench' and so on: WordNet id and first name, in the order of the published list."""
    file = _text(root, "synsets.txt")
    lines = [line.split(maxsplit=1) for line in file.read_text("utf-8", "replace").splitlines() if line.strip()]
    if not lines or lines[0][0] != FIRST:
        first = lines[0][0] if lines else "nothing"
        raise UserError(
            f"{file}: class 0 must be {FIRST} (tench), but it is {first}. Take synsets.txt of WebVision 1.0."
        )
    if config.classes > len(lines):
        raise UserError(f"classes={config.classes}, but {file} lists {len(lines)}. Lower classes.")
    count = config.classes or len(lines)
    return [" ".join([line[0], *line[1:2]]).split(",")[0] for line in lines[:count]]


def _list(root: Path, name: str, classes: int, prefix: str, whole: bool) -> SourceTable:
    """The lines `path class` of a published list that belong to the first classes."""
    file = _text(root, name)
    try:
        table = pa.csv.read_csv(
            file,
            read_options=pa.csv.ReadOptions(column_names=["path", "label"]),
            parse_options=pa.csv.ParseOptions(delimiter=" ", quote_char=False),
            convert_options=pa.csv.ConvertOptions(column_types={"path": pa.string(), "label": pa.int32()}),
        )
    except pa.ArrowException as error:
        raise UserError(
            f"{file} cannot be read ({str(error).strip()}). Its lines must be 'path class-number'."
        ) from None
    labels = table["label"].to_numpy()
    paths = table["path"].filter(pa.array(labels < classes)).combine_chunks()
    bad = first_true(pa.compute.match_substring_regex(paths, r"^/|(^|/)\.\.(/|$)"))
    if bad is not None:
        raise UserError(f"{file}: the path '{paths[bad]}' is not below the folder. Take the list as it was published.")
    if whole and len(labels) and labels.max() >= classes:
        raise UserError(
            f"{file}: class {labels.max()} is not in synsets.txt, which has {classes}. Take the lists of one release."
        )
    kept = labels[labels < classes].astype(np.int32)
    if len(kept) and kept.min() < 0:
        raise UserError(f"{file}: a class number is negative. Take the list as it was published.")
    keys = pa.compute.binary_join_element_wise(prefix, paths, "")
    return SourceTable(keys, kept, np.full(len(kept), -1, np.int32))


def _join(lists: list[SourceTable]) -> SourceTable:
    return SourceTable(
        pa.concat_arrays([part.keys for part in lists]),
        np.concatenate([part.given for part in lists]),
        np.concatenate([part.true for part in lists]),
    )


def _imagenet(root: Path, classes: list[str]) -> tuple[SourceTable, list[tuple[str, str, str]]]:
    """ILSVRC-2012 validation: the id comes from WebVision's own list, so numbers cannot be mixed up."""
    keys: list[str] = []
    labels: list[int] = []
    rejected: list[tuple[str, str, str]] = []
    for number, name in enumerate(classes):
        folder = name.split()[0]
        if not (root / folder).is_dir():
            raise UserError(
                f"{root} has no folder {folder}. imagenet must name the ILSVRC-2012 validation pictures "
                "sorted into one folder for each WordNet id."
            )
        files = walk(root, folder)
        keys += files.keys
        labels += [number] * len(files.keys)
        rejected += [("imagenet", key, reason) for key, reason in files.rejected]
    given = np.array(labels, np.int32)
    return SourceTable(pa.array(keys, pa.string()), given, np.full(len(given), -1, np.int32)), rejected
