"""Picture files below one folder: listing and reading them without leaving the folder."""

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

LEAVES_FOLDER = "link leaves the folder"
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: opening a pipe must not block


@functools.lru_cache(maxsize=1 << 16)
def _inside(root: str, folder: str) -> bool:
    """Whether a folder, all links followed, is the root or below it."""
    real = os.path.realpath(root)
    return os.path.commonpath([real, os.path.realpath(folder)]) == real


def read_below(root: str, key: str, limit: int) -> bytes:
    """The bytes of a regular file below `root`; Rejected for anything else, OSError if it is not there."""
    path = f"{root}/{key}"
    if not _inside(root, path.rpartition("/")[0]):
        raise Rejected(LEAVES_FOLDER)
    try:
        handle = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        real = os.path.realpath(path)  # the file itself is a link
        if not _inside(root, os.path.dirname(real)):
            raise Rejected(LEAVES_FOLDER) from None
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
class FoundFiles:
    """The files below a folder."""

    keys: list[str]
    rejected: list[tuple[str, str]]  # (key, reason)
    ignored: int = 0  # files that are no pictures by name


def walk(root: Path, below: str = "") -> FoundFiles:
    """All pictures below a folder, sorted, as paths relative to `root` with forward slashes."""
    files = FoundFiles([], [])
    real = os.path.realpath(root)
    _walk(real, below, files, {os.path.realpath(os.path.join(real, below))})
    files.keys.sort()
    return files


def entries_of(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder, except hidden ones."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except PermissionError:
        raise UserError(f"The folder {printable(folder)} may not be read. Change its rights.") from None


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _walk(root: str, below: str, files: FoundFiles, seen: set[str]) -> None:
    for entry in entries_of(os.path.join(root, below)):
        key = f"{below}/{entry.name}" if below else entry.name
        if not is_text(entry.name):
            files.rejected.append((printable(key), "name is not UTF-8"))
        elif is_folder(entry):
            real = os.path.realpath(entry.path)
            if not _inside(root, real):
                files.rejected.append((key, LEAVES_FOLDER))
            elif real not in seen:  # links may form a cycle
                seen.add(real)
                _walk(root, key, files, seen)
        elif entry.name.lower().endswith(SUFFIXES):
            files.keys.append(key)
        else:
            files.ignored += 1


def is_text(name: str) -> bool:
    """Whether the bytes of a file name were UTF-8."""
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(name: str) -> str:
    """Any file name in a form that can be printed and stored."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def refuse_shared(train: SourceTable, test: SourceTable, roots: dict[str, str]) -> None:
    """UserError if a picture is in the training and in the test split."""
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
    """Index of the first true value, or None."""
    index: int = pa.compute.index(flags, True).as_py()
    return index if index >= 0 else None


def present(root: str, keys: Iterable[str]) -> NDArray[np.bool_]:
    """Which keys exist. Lists each folder once: on a network disk that is faster than looking up every file."""

    @functools.lru_cache(maxsize=256)
    def names(folder: str) -> frozenset[str]:
        try:
            return frozenset(os.listdir(os.path.join(root, folder)))
        except OSError:
            return frozenset()

    def exist() -> Iterator[bool]:
        for key in keys:
            folder, _, name = key.rpartition("/")
            yield name in names(folder)

    return np.fromiter(exist(), bool)
