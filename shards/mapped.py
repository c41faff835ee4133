"""Memory maps of the files of a store. A file is fetched and checked at its first use.

If all files together have at most 1 GiB, their sha256 is compared when they are opened. More are hashed in the background
from their first use on; if one is bad, the next use of any file fails. Copies of remote files are checked when they arrive.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import queue
import threading
from collections.abc import Iterable, Sequence

from shards.base.errors import UserError
from shards.base.redact import redact
from shards.base.storage import Store
from shards.cache import Cache
from shards.config import CacheConfig
from shards.manifest import FileInfo

EAGER_BYTES = 1 << 30


class MappedFiles:
    """Files by their number in the list. Safe to use from threads and after a fork."""

    def __init__(self, store: Store, files: Sequence[FileInfo], cache: CacheConfig, verify: bool = True) -> None:
        self.store, self.files, self.verify = store, files, verify
        self.cache = Cache(store, cache, verify)
        self.eager = sum(file.bytes for file in files) <= EAGER_BYTES
        self.failure: UserError | None = None  # found in the background
        self.maps: dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._unchecked: queue.SimpleQueue[tuple[str, FileInfo]] | None = None

    def open_all(self) -> None:
        """Open and check what is local and small now, so that a bad file is found before anything is computed."""
        if self.verify and self.store.root and self.eager:
            for number in range(len(self.files)):
                self.map(number)

    def map(self, number: int) -> mmap.mmap:
        """The memory map of a file. The first call downloads and checks it."""
        if os.getpid() != self._process:
            self._after_fork()
        if self.failure is not None:
            raise self.failure
        if (known := self.maps.get(number)) is not None:
            return known
        with self._lock:
            if number not in self.maps:
                self.maps[number] = self._open(self.files[number])
                if self.store.root is None:
                    self._drop_old_maps()
            return self.maps[number]

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Download remote files ahead, in the order in which they will be used."""
        if self.store.root is None:
            self.cache.prefetch([self.files[number] for number in numbers])

    def check_sizes(self, files: Iterable[FileInfo]) -> None:
        if self.store.url.startswith("http"):  # it has no listings; downloads are checked when they arrive
            return
        sizes = self.store.sizes()
        for file in files:
            if sizes.get(file.name) != file.bytes:
                self._raise_wrong_size(file, sizes.get(file.name))

    def check_digest(self, path: str, file: FileInfo) -> None:
        if self.verify and self.store.root:  # copies of remote files were checked when they arrived
            with open(path, "rb") as handle:
                if hashlib.file_digest(handle, "sha256").hexdigest() != file.sha256:
                    raise self.altered_error(file.name)

    def altered_error(self, name: str) -> UserError:
        return UserError(
            f"Shard {self.shown(name)} was altered: its sha256 is not that of the manifest. Copy it again "
            "from where it came, or remove the folder and build the shards anew."
        )

    def shown(self, name: str) -> str:
        return redact(self.store.at(name))

    def _raise_wrong_size(self, file: FileInfo, size: int | None) -> None:
        what = "is missing" if size is None else f"has {size} bytes instead of {file.bytes}"
        raise UserError(
            f"Shard {self.shown(file.name)} {what}. Copy it again from where it came, or remove the "
            "folder and build the shards anew."
        )

    def _open(self, file: FileInfo) -> mmap.mmap:
        while True:
            path = self.cache.local(file)
            try:
                if self.eager:  # by reading the file: hashing the map would keep its pages in memory
                    self.check_digest(str(path), file)
                elif self.verify and self.store.root:
                    self._check_in_background(str(path), file)
                with open(path, "rb") as handle:
                    return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            except FileNotFoundError:
                if self.store.root:
                    self._raise_wrong_size(file, None)
                # Else another process has just removed the copy to make room: download it again.

    def _check_in_background(self, path: str, file: FileInfo) -> None:
        """Hash in the background: hashing hundreds of GB must not delay the first batch."""
        if self._unchecked is None:
            self._unchecked = queue.SimpleQueue()
            threading.Thread(target=self._check_queued, args=(self._unchecked,), daemon=True).start()
        self._unchecked.put((path, file))

    def _check_queued(self, waiting: queue.SimpleQueue[tuple[str, FileInfo]]) -> None:
        while self.failure is None:
            try:
                self.check_digest(*waiting.get())
            except UserError as error:
                self.failure = error

    def _drop_old_maps(self) -> None:
        """A mapped copy keeps its disk space even if the cache removes it: map no more bytes than the cache may hold."""
        mapped = sum(self.files[number].bytes for number in self.maps)
        while mapped > self.cache.config.max_gb * 1e9 and len(self.maps) > 1:
            oldest = next(iter(self.maps))
            mapped -= self.files[oldest].bytes
            del self.maps[oldest]  # closed when its last view is gone

    def _after_fork(self) -> None:
        # Maps stay valid after a fork. A lock that another thread held at that moment would never be released.
        self._lock = threading.Lock()
        self._unchecked = None
        self.cache = Cache(self.store, self.cache.config, self.verify)
        self._process = os.getpid()
