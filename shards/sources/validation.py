"""The split `validation`: a part of the training pictures, equally many of each class, cut before any bias is injected.

Methods and settings are chosen on it, so that the test set has no say. It depends on the pictures, `validation` and
`validation_seed`, and on nothing of the bias: all draws of a comparison are judged on the same pictures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from shards import bias
from shards.base.errors import UserError
from shards.config import VALIDATION, BuildConfig
from shards.sources import Collection, Reader, SourceTable


@dataclass(frozen=True)
class FromTrainingPool:
    """Reads validation pictures where the source has them: among the training pictures."""

    reader: Reader

    def read(self, split: str, row: int, key: str) -> bytes:
        return self.reader.read("train" if split == VALIDATION else split, row, key)


def with_validation(collection: Collection, config: BuildConfig) -> Collection:
    """The collection with the part cut off that `validation` asks for."""
    if not config.validation:
        return collection
    pool = collection.splits["train"]
    label = np.where(pool.true >= 0, pool.true, pool.given).astype(np.int32)
    counts = bias.counts_of(label, len(collection.classes))
    each = math.floor(Fraction(str(config.validation)) * int(counts.min()))
    if not each:
        k = int(counts.argmin())
        raise UserError(
            f"validation={config.validation:g} of the {counts[k]} training pictures of class '{collection.classes[k]}' "
            "is less than one picture, and every class gives equally many. Raise validation, add pictures, or leave it out."
        )
    shuffled = bias.generator(config.validation_seed, "validation").permutation(len(pool))
    rows = bias.keep_rows(label, np.arange(len(pool)), np.full(len(counts), each), shuffled)
    cut = np.zeros(len(pool), bool)
    cut[rows] = True
    held = SourceTable(pool.take(cut).keys, label[cut], pool.true[cut])
    splits = {"train": pool.take(~cut), VALIDATION: held}
    others = {name: rows for name, rows in collection.splits.items() if name != "train"}
    return replace(collection, splits=splits | others, reader=FromTrainingPool(collection.reader))
