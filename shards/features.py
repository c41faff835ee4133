"""Stored features: what a frozen backbone makes of every sample, computed once and read like shards.

features.json         shards, backbone, weights, preprocessing, files with size and sha256; written last
train-000000.npy      float16 (views, rows, D) of consecutive samples: test view first, then weak and strong ones
test-000000.npy       other splits have the test view only
backbone.safetensors  the backbone itself, so that a model trained on its features can classify pictures
"""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from shards.base.errors import UserError
from shards.base.settings import Settings
from shards.base.storage import store_at
from shards.config import CacheConfig
from shards.manifest import Digest, FileInfo, ShardInfo
from shards.mapped import MappedFiles

FILE = "features.json"
BACKBONE = "backbone.safetensors"
TEST = "test"  # the view without chance
MAX_BYTES = 256 << 20
DTYPE = np.dtype("<f2")


class FeatureSplitInfo(Settings):
    samples: NonNegativeInt
    views: list[str] = Field(min_length=1)
    blocks: list[ShardInfo]
    bad: dict[int, str]  # samples whose picture did not decode, and why


class FeaturesManifest(Settings):
    format: Literal["evenhand-features"] = "evenhand-features"
    version: Literal[1] = 1
    made_by: str
    shards: Digest  # of the shards' manifest
    recipe: dict[str, Any]  # everything else that decides the numbers
    width: PositiveInt  # D
    backbone: FileInfo
    splits: dict[str, FeatureSplitInfo]

    @property
    def digest(self) -> str:
        """Equal for equal features."""
        return recipe_digest(self.shards, self.recipe)


def recipe_digest(shards: str, recipe: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([shards, recipe], sort_keys=True).encode()).hexdigest()


def block_rows(samples: int) -> int:
    """Samples in a file: few enough for many ranks to share the work, and for a file to fit in memory."""
    return min(8192, max(64, -(-samples // 64)))


def npy_header(views: int, rows: int, width: int) -> bytes:
    out = io.BytesIO()
    shape = (views, rows, width)
    np.lib.format.write_array_header_1_0(
        out, {"descr": np.lib.format.dtype_to_descr(DTYPE), "fortran_order": False, "shape": shape}
    )
    return out.getvalue()


def read_features(url: str) -> FeaturesManifest | None:
    """The manifest of stored features; None if there are none."""
    store = store_at(url)
    data = store.read(FILE, MAX_BYTES)
    if data is None:
        return None
    try:
        about = FeaturesManifest.model_validate(json.loads(data))
    except (ValueError, RecursionError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "it is not JSON"
        raise UserError(
            f"{store}/{FILE} is damaged: {reason}. Remove that folder; the features are computed again."
        ) from None
    for name, split in about.splits.items():
        if sum(block.samples for block in split.blocks) != split.samples:
            raise UserError(
                f"{store}/{FILE} is damaged: the files of '{name}' do not add up to its samples. Remove that folder; "
                "the features are computed again."
            )
    return about


class FeatureSplit:
    """The stored features of one split, by permanent index."""

    def __init__(self, url: str, name: str, about: FeaturesManifest, cache: CacheConfig | None = None) -> None:
        self.url, self.info, self.width = url, about.splits[name], about.width
        self.bad = self.info.bad
        self.views = {view: number for number, view in enumerate(self.info.views)}
        self.shard_sizes = [block.samples for block in self.info.blocks]
        self._ends = np.cumsum(np.array(self.shard_sizes, np.int64))
        self.files = MappedFiles(store_at(url), self.info.blocks, cache or CacheConfig())
        for block in self.info.blocks:
            header = npy_header(len(self.views), block.samples, self.width)
            if block.bytes != len(header) + len(self.views) * block.samples * self.width * DTYPE.itemsize:
                raise self.files.altered_error(block.name)
        self.files.check_sizes(self.info.blocks)
        self.files.open_all()

    def count(self, kind: str) -> int:
        """How many views of a kind (weak, strong) are stored."""
        return sum(view.startswith(kind) for view in self.views)

    def prefetch(self, blocks: Any) -> None:
        self.files.prefetch(blocks)

    def read(self, view: NDArray[np.int64], index: NDArray[np.int64], out: NDArray[np.float16]) -> None:
        """Write row i of view[i] (a number of `views`) and sample index[i] into out (n, D)."""
        blocks = np.searchsorted(self._ends, index, side="right")
        for number in np.unique(blocks).tolist():
            rows = np.flatnonzero(blocks == number)
            first = int(self._ends[number]) - self.shard_sizes[number]
            out[rows] = self._block(number)[view[rows], index[rows] - first]

    def _block(self, number: int) -> NDArray[np.float16]:
        """(views, rows, D)"""
        samples = self.shard_sizes[number]
        header = npy_header(len(self.views), samples, self.width)
        numbers = np.frombuffer(self.files.map(number), DTYPE, offset=len(header))
        return numbers.reshape(len(self.views), samples, self.width)
