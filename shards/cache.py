"""Local copies of remote shards: complete, verified, within a byte budget, shared by all processes of a machine.

A copy is named by the sha256 of its content, so it is never an old version; it may be damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
import uuid
from contextlib import AbstractContextManager
from pathlib import Path

from shards.base.errors import UserError
from shards.base.files import file_lock
from shards.base.redact import redact
from shards.base.storage import Store, with_retries
from shards.config import CacheConfig
from shards.manifest import FileInfo


class NoRoom(UserError):
    """No local copy can be kept; the file itself may be fine."""


class Cache:
    """Files of a store as local paths. For a local store these are the files themselves."""

    def __init__(self, store: Store, config: CacheConfig, verify: bool = True) -> None:
        self.store, self.config, self.verify = store, config, verify
        self.folder = Path(config.folder or Path.home() / ".cache" / "evenhand" / "shards")
        self._checked: set[str] = set()
        self._upcoming: list[FileInfo] = []
        self._next = 0  # position in _upcoming of the next shard to be used
        self._upcoming_changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def local(self, file: FileInfo) -> Path:
        """A local path of the file; downloads it if there is no copy."""
        if self.store.root is not None:
            return self.store.root / file.name
        path = self._fetch(file)
        with self._upcoming_changed:
            rest = [shard.sha256 for shard in self._upcoming[self._next :]]
            if file.sha256 in rest:
                self._next += rest.index(file.sha256) + 1
                self._upcoming_changed.notify()
        return path

    def prefetch(self, files: list[FileInfo]) -> None:
        """Download these in this order, a few ahead of the one in use."""
        if self.store.root is not None or not self.config.prefetch:
            return
        with self._upcoming_changed:
            self._upcoming, self._next = list(files), 0
            self._upcoming_changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._prefetch_loop, name="prefetch shards", daemon=True)
            self._thread.start()

    def _prefetch_loop(self) -> None:
        while True:
            with self._upcoming_changed:
                soon = self._upcoming[self._next : self._next + self.config.prefetch]
                todo = next((file for file in soon if file.sha256 not in self._checked), None)
                if todo is None:
                    self._upcoming_changed.wait()
                    continue
            try:
                self._fetch(todo)
            except Exception:  # the reader that needs the shard will get the same error and report it
                time.sleep(1)

    def _path(self, file: FileInfo) -> Path:
        return self.folder / f"{file.sha256}{Path(file.name).suffix}"

    def _fetch(self, file: FileInfo) -> Path:
        path = self._path(file)
        if file.sha256 in self._checked and self._is_complete(path, file):
            return path
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock(path):
                if not (self._is_complete(path, file) and self._has_digest(path, file)):
                    self._download(path, file)
        except OSError as error:
            raise NoRoom(
                f"No copy of {redact(self.store.at(file.name))} can be kept in {self.folder}: "
                f"{error.strerror or error}. Make room there, or set the cache's folder and max_gb (data.cache.* in training)."
            ) from None
        self._checked.add(file.sha256)
        with contextlib.suppress(OSError):
            os.utime(path)  # copies used longest ago are removed first
        return path

    def _lock(self, path: Path) -> AbstractContextManager[bool]:
        """One process of this machine downloads a shard; the others wait for it."""
        return file_lock(Path(f"{path}.lock"))

    def _is_complete(self, path: Path, file: FileInfo) -> bool:
        try:
            return path.stat().st_size == file.bytes
        except FileNotFoundError:
            return False

    def _has_digest(self, path: Path, file: FileInfo) -> bool:
        if not self.verify:
            return True
        try:
            with open(path, "rb") as handle:
                return hashlib.file_digest(handle, "sha256").hexdigest() == file.sha256
        except FileNotFoundError:  # another process has just removed it to make room
            return False

    def _download(self, path: Path, file: FileInfo) -> None:
        temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        name = redact(self.store.at(file.name))

        def attempt() -> None:
            self.store.fetch(file.name, temporary)
            got = temporary.stat().st_size
            if got != file.bytes:
                raise OSError(f"{got} of {file.bytes} bytes received")
            if not self._has_digest(temporary, file):
                raise OSError("its sha256 is not that of the manifest")

        reserved = self._reserve(path, file)
        try:
            with_retries(attempt, f"Shard {name}", self.config.deadline)
            with self._lock(self.folder / "room"):  # others count either the reservation or the copy
                os.replace(temporary, path)
                reserved.unlink()
        finally:
            temporary.unlink(missing_ok=True)
            reserved.unlink(missing_ok=True)

    def _reserve(self, path: Path, file: FileInfo) -> Path:
        """Reserve room for a download: other processes may download at the same time."""
        budget = int(self.config.max_gb * 1e9)
        if file.bytes > budget:
            raise UserError(
                f"A shard of {file.bytes / 1e9:.2f} GB does not fit a cache of {self.config.max_gb:g} GB. Raise max_gb."
            )
        end = time.monotonic() + self.config.deadline
        while True:
            with self._lock(self.folder / "room"):
                # If other downloads fill the budget, wait for them; after the deadline go beyond it.
                if self._make_room(file.bytes, budget) or time.monotonic() > end:
                    reserved = path.with_suffix(f".{uuid.uuid4().hex}.reserved")
                    with open(reserved, "wb") as handle:
                        handle.truncate(file.bytes)  # a sparse file takes no space on the disk
                    return reserved
            time.sleep(0.05)

    def _make_room(self, size: int, budget: int) -> bool:
        """Remove the copies used longest ago. A process that has mapped one can still read it."""
        copies: list[tuple[float, int, Path]] = []
        coming = 0
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                if path.suffix in (".tmp", ".reserved") and time.time() - about.st_mtime > 4 * self.config.deadline:
                    path.unlink()  # left by a process that was killed
                elif path.suffix == ".reserved":
                    coming += about.st_size
                elif path.suffix not in (".tmp", ".lock"):
                    copies.append((about.st_mtime, about.st_size, path))
        used = coming + sum(each for _, each, _ in copies)
        free = shutil.disk_usage(self.folder).free - int(self.config.reserve_gb * 1e9) - coming
        for _, each, path in sorted(copies):
            if used + size <= budget and free >= size:
                break
            path.unlink(missing_ok=True)
            used, free = used - each, free + each
        return used + size <= budget
