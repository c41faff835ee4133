"""Reading finished shards: labels as arrays, any picture by its byte offset through memory maps.

Checked at opening: the manifest, the sha256 of the table and the size of every shard; `mapped.py` checks their sha256.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from shards import manifest
from shards.base.errors import UserError
from shards.base.storage import store_at
from shards.cache import NoRoom
from shards.config import CacheConfig
from shards.manifest import Manifest, ShardInfo
from shards.mapped import MappedFiles
from shards.picture import pixel_limit

log = logging.getLogger(__name__)
_COLUMNS = ("shard", "offset", "size", "given", "true")


def read_manifest(url: str) -> Manifest:
    store = store_at(url)
    data = store.read(manifest.FILE, manifest.MAX_BYTES)
    if data is None:
        raise UserError(
            f"There are no finished shards at {store} (no {manifest.FILE}). Check the path, or build them "
            "with python -m shards.build."
        )
    return manifest.parse(data, repr(store))


def open_split(url: str, split: str = "train", cache: CacheConfig | None = None, verify: bool = True) -> Split:
    """One split of finished shards, with the quick checks done."""
    about = read_manifest(url)
    if split not in about.splits:
        raise UserError(f"{store_at(url)} has no split '{split}'; it has {', '.join(about.splits)}.")
    return Split(url, split, about, cache or CacheConfig(), verify)


class Split:
    """The samples of one split, by permanent index. Safe to use from threads and after a fork."""

    def __init__(self, url: str, name: str, about: Manifest, cache: CacheConfig, verify: bool) -> None:
        self.url, self.name, self.manifest, self.verify = url, name, about, verify
        self.store = store_at(url)
        self.info = about.splits[name]
        self.classes = about.classes
        self.shard_sizes = [shard.samples for shard in self.info.shards] or [self.info.samples]
        self.files = MappedFiles(self.store, self.info.shards, cache, verify)
        self._streamed: set[int] = set()  # shards for which the cache has no room
        self.files.check_sizes(filter(None, (*self.info.shards, self.info.table, self.info.beton)))
        columns = self._load_table()
        self.given: NDArray[np.int32] = columns["given"]
        self.true: NDArray[np.int32] = columns["true"]
        self._shard, self._offset, self._size = columns["shard"], columns["offset"], columns["size"]
        self._check_table()
        self.files.open_all()

    def __len__(self) -> int:
        return self.info.samples

    @property
    def clean_counts(self) -> NDArray[np.int64]:
        """Samples by class before noise; by given label where the true one is unknown."""
        return np.array(self.info.clean_counts, np.int64)

    @property
    def max_pixels(self) -> int:
        """The pixel limit of the build: no sample should have more."""
        return pixel_limit(self.manifest.options)

    def read(self, index: int) -> memoryview:
        """The encoded picture of a sample."""
        shard = int(self._shard[index])
        offset = int(self._offset[index])
        end = offset + int(self._size[index])
        if shard not in self._streamed:
            try:
                self._tar(shard)
                return memoryview(self.files.map(shard))[offset:end]
            except NoRoom as error:
                self._read_without_copy(shard, error)
        return memoryview(self.read_one(index))

    def read_one(self, index: int) -> bytes:
        """The same without downloading or hashing the shard: for a few pictures among many."""
        offset = int(self._offset[index])
        return self.store.read_range(self._tar(int(self._shard[index])).name, offset, offset + int(self._size[index]))

    def prefetch(self, shards: Iterable[int]) -> None:
        """Download remote shards ahead, in the order in which they will be used."""
        self.files.prefetch(shards)

    def keys(self, indices: Iterable[int] | None = None) -> list[str]:
        """Names of samples in the source."""
        wanted = np.arange(len(self)) if indices is None else np.asarray(list(indices), np.int64)
        names: list[Any] = self._keys.take(wanted).to_pylist()
        return names

    @property
    def flipped(self) -> NDArray[np.bool_]:
        """Where noise was injected."""
        flipped: NDArray[np.bool_] = self._column("flipped").to_numpy(zero_copy_only=False)
        return flipped

    @cached_property
    def _keys(self) -> pa.Array:
        return self._column("key")

    def _column(self, name: str) -> pa.Array:
        column = pa.parquet.read_table(self._open_table(), columns=[name])[name]
        return column.cast(pa.large_string()).combine_chunks() if name == "key" else column.combine_chunks()

    @cached_property
    def beton(self) -> str | None:
        """Local path of the FFCV file of this split, if one was built."""
        if self.info.beton is None:
            return None
        path = self.files.cache.local(self.info.beton)
        self.files.check_digest(str(path), self.info.beton)
        return str(path)

    def _open_table(self) -> pa.NativeFile:
        """Opened each time: the cache may remove the copy, but an open file stays readable."""
        while True:
            path = str(self.files.cache.local(self.info.table))
            try:
                return pa.OSFile(path)
            except FileNotFoundError:
                if self.store.root:
                    raise
                # Else another process has just removed the copy to make room: download it again.

    def _load_table(self) -> dict[str, NDArray[Any]]:
        if self.store.root:
            self.files.check_digest(str(self.store.root / self.info.table.name), self.info.table)
        columns: dict[str, NDArray[Any]] = {}
        table = pa.parquet.ParquetFile(self._open_table())
        if table.metadata.num_rows != len(self):
            raise self.files.altered_error(self.info.table.name)
        for name in _COLUMNS:  # one at a time: the peak of memory is one column above the result
            out = np.empty(len(self), manifest.TABLE.field(name).type.to_pandas_dtype())
            start = 0
            for batch in table.iter_batches(1 << 16, columns=[name]):
                out[start : start + len(batch)] = batch.column(0).to_numpy()
                start += len(batch)
            columns[name] = out
        return columns

    def _check_table(self) -> None:
        """The table is data: no number in it may point outside its shards or classes."""
        classes = len(self.classes)
        valid = bool(((self.given >= 0) & (self.given < classes)).all())
        valid = valid and bool(((self.true >= -1) & (self.true < classes)).all())
        if self.info.shards and valid:
            sizes = np.array([shard.bytes for shard in self.info.shards], np.int64)
            valid = bool(((self._shard >= 0) & (self._shard < len(sizes))).all())
            valid = valid and bool(((self._offset >= 0) & (self._size >= 0)).all())
            valid = valid and bool((self._offset + self._size <= sizes[self._shard]).all())
        if not valid:
            raise UserError(
                f"{self.files.shown(self.info.table.name)} is damaged: it points outside its shards or classes."
            )

    def _tar(self, number: int) -> ShardInfo:
        if not self.info.shards:
            raise UserError(f"{self.store} holds FFCV files only; build with format=tar or format=both to read tars.")
        return self.info.shards[number]

    def _read_without_copy(self, shard: int, why: NoRoom) -> None:
        """Read the pictures of this shard one by one over the network from now on: slow, and not checked by sha256."""
        if not self._streamed:
            log.warning("%s Until the next start pictures are read one by one from the store, which is slow.", why)
        self._streamed.add(shard)
