"""Picture files below one folder: found, and read without ever leaving it."""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from shards.base.errors import UserError
from shards.config import SUFFIXES
from shards.sources import Rejected, SourceTable

LEAVES = "link leaves the folder"
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: a pipe must not hold us up


@functools.lru_cache(maxsize=1 << 16)
def _inside(root: str, folder: str) -> bool:
    """Whether a folder, all links followed, is the root or below it."""
    real = os.path.realpath(root)
    return os.path.commonpath([real, os.path.realpath(folder)]) == real


def read_below(root: str, key: str, limit: int) -> bytes:
    """The bytes of a regular file below `root`; Rejected for anything else, OSError if it is not there."""
    path = f"{root}/{key}"
    if not _inside(root, path.rpartition("/")[0]):
        raise Rejected(LEAVES)
    try:
        handle = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        real = os.path.realpath(path)  # the file itself is a link
        if not _inside(root, os.path.dirname(real)):
            raise Rejected(LEAVES) from None
        handle = os.open(real, _FLAGS)
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise Rejected("not a regular file")
        if about.st_size > limit:
            raise Rejected(f"larger than {limit / 1e6:g} MB")
        data = os.read(handle, about.st_size + 1)
        while len(data) < about.st_size and (more := os.read(handle, about.st_size)):
            data += more
        return data
    finally:
        os.close(handle)


@dataclass(frozen=True)
class FileReader:
    """Reads keys as paths below the folder of their split."""

    roots: dict[str, str]
    limit: int

    def read(self, split: str, row: int, key: str) -> bytes:
        return read_below(self.roots[split], key, self.limit)


@dataclass
class FileEntry:
    """What a walk came across."""

    keys: list[str]
    rejected: list[tuple[str, str]]  # (key, reason)
    ignored: int = 0  # files that are no pictures by name


def walk(root: Path, below: str = "") -> FileEntry:
    """All pictures below a folder, sorted, as paths relative to `root` with forward slashes."""
    found = FileEntry([], [])
    real = os.path.realpath(root)
    _walk(real, below, found, {os.path.realpath(os.path.join(real, below))})
    found.keys.sort()
    return found


def entries_of(folder: str) -> list[os.DirEntry[str]]:
    """What a folder holds, except what is hidden."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except PermissionError:
        raise UserError(f"The folder {shown(folder)} may not be read. Change its rights.") from None


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _walk(root: str, below: str, found: FileEntry, seen: set[str]) -> None:
    for entry in entries_of(os.path.join(root, below)):
        key = f"{below}/{entry.name}" if below else entry.name
        if not is_text(entry.name):
            found.rejected.append((shown(key), "name is not UTF-8"))
        elif is_folder(entry):
            real = os.path.realpath(entry.path)
            if not _inside(root, real):
                found.rejected.append((key, LEAVES))
            elif real not in seen:  # links may form a ring
                seen.add(real)
                _walk(root, key, found, seen)
        elif entry.name.lower().endswith(SUFFIXES):
            found.keys.append(key)
        else:
            found.ignored += 1


def is_text(name: str) -> bool:
    """Whether the bytes of a file name were UTF-8."""
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(name: str) -> str:
    """Any file name in a form that can be printed and stored."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def refuse_shared(train: SourceTable, test: SourceTable, roots: dict[str, str]) -> None:
    """A picture to learn from must not be one to be judged by."""
    if os.path.realpath(roots["train"]) != os.path.realpath(roots["test"]):
        return
    shared = test.keys.filter(pa.compute.is_in(test.keys, value_set=train.keys))
    if len(shared):
        raise UserError(
            f"{len(shared)} pictures are for training and for validation, the first: {shared[0].as_py()}. "
            "Leave them out of one of the two."
        )


def drop_missing(rows: SourceTable, root: str, split: str) -> tuple[SourceTable, list[tuple[str, str, str]]]:
    """The rows whose files exist, and the others as rejected."""
    there = present(root, rows.names())
    return rows.take(there), [(split, key, "missing file") for key in rows.take(~there).names()]


def first_true(flags: pa.Array | pa.ChunkedArray) -> int | None:
    """Where the first true stands; None: nowhere."""
    place = pa.compute.index(flags, True).as_py()
    return place if place >= 0 else None


def present(root: str, keys: Iterable[str]) -> NDArray[np.bool_]:
    """Which keys exist, by listing each folder once: cheaper than asking for every file of a network disk."""

    @functools.lru_cache(maxsize=256)
    def names(folder: str) -> frozenset[str]:
        try:
            return frozenset(os.listdir(os.path.join(root, folder)))
        except OSError:
            return frozenset()

    def look() -> Iterator[bool]:
        for key in keys:
            folder, _, name = key.rpartition("/")
            yield name in names(folder)

    return np.fromiter(look(), bool)
