"""The embedded default: 1 797 scanned digits, 8x8 grey, from scikit-learn. Test: a fixed stratified fifth."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from shards import bias
from shards.base.progress import Log
from shards.config import BuildConfig
from shards.sources import Collection, SourceTable
from shards.sources.labels import with_labels

TEST_FRACTION, TEST_SEED = 0.2, 0


@cache
def _digits() -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return np.rint(data.images * (255 / 16)).astype(np.uint8), data.target.astype(np.int32)


@dataclass(frozen=True)
class DigitsReader:
    def read(self, split: str, row: int, key: str) -> bytes:
        out = io.BytesIO()
        Image.fromarray(_digits()[0][int(key)]).save(out, "png")
        return out.getvalue()


def collect(config: BuildConfig, log: Log) -> Collection:
    _, labels = _digits()
    everything = np.arange(len(labels))
    shuffled = bias.generator(TEST_SEED, "digits test split").permutation(len(labels))
    test = bias.hold_out(labels, everything, 10, TEST_FRACTION, shuffled)
    train = np.setdiff1d(everything, test)
    splits = {
        name: SourceTable(pa.array([str(i) for i in rows]), labels[rows], labels[rows])
        for name, rows in (("train", train), ("test", test))
    }
    collection = Collection("digits", [str(k) for k in range(10)], splits, DigitsReader())
    return with_labels(collection, config)
