"""Reading finished shards: labels as arrays, pictures at random by byte offset through memory maps.

What is checked: at opening, the manifest, the sha256 of the table, and the size of every shard. The sha256 of
shards at opening too if a split has at most 1 GiB; of larger ones in the background, each shard from its
first use on, and the next read after a bad one fails. Copies of remote shards are checked before use.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import queue
import threading
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from shards import manifest
from shards.base.errors import UserError
from shards.base.redact import redact
from shards.base.storage import store_at
from shards.cache import Cache, NoRoom
from shards.config import CacheConfig
from shards.manifest import FileInfo, Manifest, ShardInfo
from shards.picture import pixel_limit

log = logging.getLogger(__name__)
EAGER_BYTES = 1 << 30
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
    """One split of finished shards, checked as far as that is cheap."""
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
        self._cache = Cache(self.store, cache, verify)
        self._maps: dict[int, mmap.mmap] = {}
        self._streamed: set[int] = set()  # shards no copy of which can be kept
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._unchecked: queue.SimpleQueue[tuple[str, FileInfo]] | None = None
        self._trouble: UserError | None = None
        self._eager = sum(shard.bytes for shard in self.info.shards) <= EAGER_BYTES
        self._check_sizes()
        columns = self._load_table()
        self.given: NDArray[np.int32] = columns["given"]
        self.true: NDArray[np.int32] = columns["true"]
        self._shard, self._offset, self._size = columns["shard"], columns["offset"], columns["size"]
        self._check_table()
        if verify and self.store.root and self._eager:
            for number in range(len(self.info.shards)):
                self._map(number)

    def __len__(self) -> int:
        return self.info.samples

    @property
    def clean_counts(self) -> NDArray[np.int64]:
        """Samples by class before noise; as given where the truth is unknown."""
        return np.array(self.info.clean_counts, np.int64)

    @property
    def max_pixels(self) -> int:
        """The pixel limit of the build: no sample should have more."""
        return pixel_limit(self.manifest.options)

    def read(self, index: int) -> memoryview:
        """The encoded picture of a sample."""
        if os.getpid() != self._process:
            self._after_fork()
        if self._trouble is not None:
            raise self._trouble
        shard = int(self._shard[index])
        offset = int(self._offset[index])
        end = offset + int(self._size[index])
        if shard not in self._streamed:
            try:
                return memoryview(self._maps.get(shard) or self._map(shard))[offset:end]
            except NoRoom as error:
                self._stream(shard, error)
        return memoryview(self.read_one(index))

    def read_one(self, index: int) -> bytes:
        """The same without its shard: for a few pictures among many, nothing large is fetched and nothing hashed."""
        offset = int(self._offset[index])
        return self.store.read_range(self._tar(int(self._shard[index])).name, offset, offset + int(self._size[index]))

    def prefetch(self, shards: Iterable[int]) -> None:
        """Remote shards in the order they will be used; they are fetched ahead."""
        if self.store.root is None:
            self._cache.prefetch([self.info.shards[number] for number in shards])

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
        path = self._cache.local(self.info.beton)
        self._check_digest(str(path), self.info.beton)
        return str(path)

    # ------------------------------------------------------------------------------------- inside

    def _check_sizes(self) -> None:
        if self.store.url.startswith("http"):  # no listings there; what is fetched is checked when it arrives
            return
        there = self.store.sizes()
        for file in filter(None, (*self.info.shards, self.info.table, self.info.beton)):
            if there.get(file.name) != file.bytes:
                self._refuse(file, there.get(file.name))

    def _shown(self, name: str) -> str:
        return redact(self.store.at(name))

    def _refuse(self, file: FileInfo, size: int | None) -> None:
        what = "is missing" if size is None else f"has {size} bytes instead of {file.bytes}"
        raise UserError(
            f"Shard {self._shown(file.name)} {what}. Copy it again from where it came, or remove the "
            "folder and build the shards anew."
        )

    def _altered(self, name: str) -> UserError:
        return UserError(
            f"Shard {self._shown(name)} was altered: its sha256 is not that of the manifest. Copy it again "
            "from where it came, or remove the folder and build the shards anew."
        )

    def _check_digest(self, path: str, file: FileInfo) -> None:
        if self.verify and self.store.root:  # copies of remote files were checked when they came
            with open(path, "rb") as handle:
                if hashlib.file_digest(handle, "sha256").hexdigest() != file.sha256:
                    raise self._altered(file.name)

    def _open_table(self) -> pa.NativeFile:
        """Opened anew each time: the cache may drop it, and an open file stays."""
        while True:
            path = str(self._cache.local(self.info.table))
            try:
                return pa.OSFile(path)
            except FileNotFoundError:
                if self.store.root:
                    raise
                # Else another process made room for its own copies just now: fetch it again.

    def _load_table(self) -> dict[str, NDArray[Any]]:
        if self.store.root:
            self._check_digest(str(self.store.root / self.info.table.name), self.info.table)
        columns: dict[str, NDArray[Any]] = {}
        table = pa.parquet.ParquetFile(self._open_table())
        if table.metadata.num_rows != len(self):
            raise self._altered(self.info.table.name)
        for name in _COLUMNS:  # one at a time into its final array: the peak is one column above the result
            out = np.empty(len(self), manifest.TABLE.field(name).type.to_pandas_dtype())
            place = 0
            for batch in table.iter_batches(1 << 16, columns=[name]):
                out[place : place + len(batch)] = batch.column(0).to_numpy()
                place += len(batch)
            columns[name] = out
        return columns

    def _check_table(self) -> None:
        """The table is data: nothing in it may point outside."""
        classes = len(self.classes)
        fine = bool(((self.given >= 0) & (self.given < classes)).all())
        fine = fine and bool(((self.true >= -1) & (self.true < classes)).all())
        if self.info.shards and fine:
            sizes = np.array([shard.bytes for shard in self.info.shards], np.int64)
            fine = bool(((self._shard >= 0) & (self._shard < len(sizes))).all())
            fine = fine and bool(((self._offset >= 0) & (self._size >= 0)).all())
            fine = fine and bool((self._offset + self._size <= sizes[self._shard]).all())
        if not fine:
            raise UserError(f"{self._shown(self.info.table.name)} is damaged: it points outside its shards or classes.")

    def _map(self, number: int) -> mmap.mmap:
        """The memory map of a shard; the first one to ask fetches and checks it."""
        with self._lock:
            if number in self._maps:
                return self._maps[number]
            view = self._open(self._tar(number))
            self._maps[number] = view
            if self.store.root is None:
                self._forget_maps()
            return view

    def _tar(self, number: int) -> ShardInfo:
        if not self.info.shards:
            raise UserError(f"{self.store} holds FFCV files only; build with format=tar or format=both to read tars.")
        return self.info.shards[number]

    def _stream(self, shard: int, why: NoRoom) -> None:
        """From now on picture by picture over the network: slow and without the shard's sha256, but it goes on."""
        if not self._streamed:
            log.warning("%s Until the next start pictures are read one by one from the store, which is slow.", why)
        self._streamed.add(shard)

    def _open(self, shard: ShardInfo) -> mmap.mmap:
        while True:
            path = self._cache.local(shard)
            try:
                if self._eager:  # through the file, not the map: what is hashed need not stay in memory
                    self._check_digest(str(path), shard)
                elif self.verify and self.store.root:
                    self._check_later(str(path), shard)
                with open(path, "rb") as file:
                    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except FileNotFoundError:
                if self.store.root:
                    self._refuse(shard, None)
                # Else another process made room for its own copies just now: fetch it again.

    def _check_later(self, path: str, shard: FileInfo) -> None:
        """Hash in the background: hundreds of GB must not hold up the first batch."""
        if self._unchecked is None:
            self._unchecked = queue.SimpleQueue()
            threading.Thread(target=self._check_all, args=(self._unchecked,), daemon=True).start()
        self._unchecked.put((path, shard))

    def _check_all(self, waiting: queue.SimpleQueue[tuple[str, FileInfo]]) -> None:
        while self._trouble is None:
            try:
                self._check_digest(*waiting.get())
            except UserError as error:
                self._trouble = error

    def _forget_maps(self) -> None:
        """A mapped copy keeps its disk space even if the cache drops it: hold no more than the cache may."""
        held = sum(self.info.shards[number].bytes for number in self._maps)
        while held > self._cache.config.max_gb * 1e9 and len(self._maps) > 1:
            oldest = next(iter(self._maps))
            held -= self.info.shards[oldest].bytes
            del self._maps[oldest]  # closed when the last view of it is gone

    def _after_fork(self) -> None:
        # Maps survive a fork, a lock held by another thread at that moment does not.
        self._lock = threading.Lock()
        self._unchecked = None
        self._cache = Cache(self.store, self._cache.config, self.verify)
        self._process = os.getpid()
