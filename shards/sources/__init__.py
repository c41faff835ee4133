"""Where pictures come from: a source lists its pictures and labels, its reader reads one picture at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.base.errors import UserError
from shards.base.progress import Log
from shards.config import BuildConfig


class Reader(Protocol):
    """Reads encoded pictures. It is sent to writer processes, so it must be small."""

    def read(self, split: str, row: int, key: str) -> bytes: ...


class Rejected(Exception):
    """This one picture cannot be used; the message is the reason."""


@dataclass(frozen=True)
class SourceTable:
    """One split in the source, by row."""

    keys: pa.Array  # name of the picture in the source, for people and for the reader
    given: NDArray[np.int32]
    true: NDArray[np.int32]  # -1: unknown

    def __len__(self) -> int:
        return len(self.given)

    def names(self) -> Iterator[str]:
        """The keys as text, some at a time: millions of Python strings take much memory."""
        for start in range(0, len(self), 1 << 16):
            names: list[Any] = self.keys.slice(start, 1 << 16).to_pylist()
            yield from names

    def take(self, chosen: NDArray[np.bool_]) -> SourceTable:
        return SourceTable(self.keys.filter(pa.array(chosen)), self.given[chosen], self.true[chosen])


@dataclass(frozen=True)
class Collection:
    """All pictures of a source, before bias."""

    name: str
    classes: list[str]
    splits: dict[str, SourceTable]
    reader: Reader
    # (split, key, reason) of pictures that cannot be used
    rejected: list[tuple[str, str, str]] = field(default_factory=list)


_MODULES = {
    "digits": "digits",
    "cifar10": "cifar",
    "cifar100": "cifar",
    "fashion_mnist": "fashion_mnist",
    "webvision": "webvision",
    "folder": "folder",
    "list": "listing",
}


def collect(config: BuildConfig, log: Log) -> Collection:
    """The pictures of the configured source, after the checks common to all sources."""
    from shards.sources.validation import with_validation

    collection: Collection = import_module(f"shards.sources.{_MODULES[config.source]}").collect(config, log)
    classes = len(collection.classes)
    if classes < 2:
        raise UserError(
            f"{config.path or config.source} holds {classes} class{'' if classes == 1 else 'es'}; "
            "a classifier needs at least two. Check path and the labels."
        )
    empty = np.flatnonzero(np.bincount(collection.splits["train"].given, minlength=classes) == 0)
    if len(empty):
        names = ", ".join(f"'{collection.classes[k]}'" for k in empty[:5]) + (", ..." if len(empty) > 5 else "")
        raise UserError(
            f"{len(empty)} of {classes} classes have no training picture: {names}. Add pictures, or take the class out."
        )
    for split, rows in collection.splits.items():
        if not len(rows):
            raise UserError(
                f"No picture of {config.path or config.source} is for the split '{split}'. Add some; to hold out a "
                "part, a class with two pictures is needed."
            )
    return with_validation(collection, config)
