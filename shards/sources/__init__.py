"""Where pictures come from: a source lists what there is, its reader fetches one picture at a time."""

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
    """Fetches encoded pictures; small enough to be sent to a writer process."""

    def read(self, split: str, row: int, key: str) -> bytes: ...


class Rejected(Exception):
    """This one picture cannot be used; the message is the reason."""


@dataclass(frozen=True)
class SourceTable:
    """One split as the source has it, by row."""

    keys: pa.Array  # what names the picture in the source, for people and for the reader
    given: NDArray[np.int32]
    true: NDArray[np.int32]  # -1: unknown

    def __len__(self) -> int:
        return len(self.given)

    def names(self) -> Iterator[str]:
        """The keys as text, some at a time: millions of Python strings are heavy."""
        for start in range(0, len(self), 1 << 16):
            names: list[Any] = self.keys.slice(start, 1 << 16).to_pylist()
            yield from names

    def take(self, chosen: NDArray[np.bool_]) -> SourceTable:
        return SourceTable(self.keys.filter(pa.array(chosen)), self.given[chosen], self.true[chosen])


@dataclass(frozen=True)
class Collection:
    """Everything a source has to offer, before bias."""

    name: str
    classes: list[str]
    splits: dict[str, SourceTable]
    reader: Reader
    # (split, key, reason) of what was seen but cannot be used
    rejected: list[tuple[str, str, str]] = field(default_factory=list)


_MODULES = {
    "digits": "digits",
    "cifar10": "cifar",
    "cifar100": "cifar",
    "webvision": "webvision",
    "folder": "folder",
    "list": "listing",
}


def collect(config: BuildConfig, log: Log) -> Collection:
    """What the configured source holds, checked for the mistakes all sources share."""
    found: Collection = import_module(f"shards.sources.{_MODULES[config.source]}").collect(config, log)
    classes = len(found.classes)
    if classes < 2:
        raise UserError(
            f"{config.path or config.source} holds {classes} class{'' if classes == 1 else 'es'}; "
            "a classifier needs at least two. Check path and the labels."
        )
    empty = np.flatnonzero(np.bincount(found.splits["train"].given, minlength=classes) == 0)
    if len(empty):
        names = ", ".join(f"'{found.classes[k]}'" for k in empty[:5]) + (", ..." if len(empty) > 5 else "")
        raise UserError(
            f"{len(empty)} of {classes} classes have no training picture: {names}. Add pictures, or take the class out."
        )
    for split, rows in found.splits.items():
        if not len(rows):
            raise UserError(
                f"No picture of {config.path or config.source} is for the split '{split}'. Add some; to hold out a "
                "part, a class with two pictures is needed."
            )
    return found
