"""The journal of a run: an append-only file of JSON lines with everything that was measured.

The training only appends. Another thread sends the lines to MLflow; it can fail, wait and start again without any
effect on the training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from shards.base.files import atomic_write, file_lock
from shards.base.redact import redact_all

Record = dict[str, Any]
log = logging.getLogger(__name__)


class Journal:
    """Appends records; never raises and waits for nothing but the local file system.

    If the disk is full, lines stay in memory and are written with the next record that fits.
    """

    def __init__(self, path: Path, keep: int | None = None) -> None:
        """Open for appending; with `keep`, the file is first cut to that many bytes."""
        self.path = path
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.size = os.fstat(self._file).st_size
        keep = self._last_line_end() if keep is None else min(keep, self.size)
        if keep < self.size:
            os.ftruncate(self._file, keep)
            self.size = keep

    def append(self, record: Record) -> None:
        line = json.dumps(redact_all(record), separators=(",", ":"), default=str).encode() + b"\n"
        with self._lock:
            self._waiting.append(line)
            self._write()

    def _write(self) -> None:
        data = b"".join(self._waiting)
        try:
            written = os.pwrite(self._file, data, self.size)
            if written < len(data):
                raise OSError(28, "No space left on device")
        except OSError as error:
            if len(self._waiting) == 1:
                log.warning("%s cannot be written (%s); its lines stay in memory.", self.path, error.strerror)
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)  # leave no partial line
            return
        self.size += len(data)
        self._waiting.clear()

    def fsync(self) -> None:
        """Flush to the disk; not called by the training thread."""
        with contextlib.suppress(OSError):
            os.fsync(self._file)

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._waiting:
                self._write()
            os.close(self._file)
            self._file = -1  # the number may be reused for another file

    def _last_line_end(self) -> int:
        """Where the last complete line ends; a process that died may have left a partial one."""
        tail = os.pread(self._file, 1 << 20, max(0, self.size - (1 << 20)))
        return self.size - len(tail) + tail.rfind(b"\n") + 1


def read(path: Path, offset: int = 0) -> Iterator[tuple[int, Record]]:
    """(end of the line, record) of every complete line from `offset` on. A line that is not JSON is skipped."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                log.warning("%s: the line that ends at byte %d is not JSON and is skipped.", path, offset)
                continue
            if isinstance(record, dict):
                yield offset, record


# -- how far the journal has been sent (the file keeps its name, .shipped) --------------------------


def pending(path: Path) -> int:
    """Number of records that no server has acknowledged."""
    cursor = read_cursor(path)
    return sum(1 for _ in read(path, cursor.get("offset", 0))) + len(cursor.get("deferred", []))


def read_cursor(path: Path) -> Record:
    return next((record for _, record in read(Path(f"{path}.shipped"))), {})


def write_cursor(path: Path, cursor: Record) -> None:
    atomic_write(Path(f"{path}.shipped"), json.dumps(cursor) + "\n")


def rewind(path: Path, size: int) -> None:
    """After the journal was cut: what follows is sent again."""
    cursor = read_cursor(path)
    if cursor.get("offset", 0) > size:
        write_cursor(path, {**cursor, "offset": size, "deferred": []})


def lock(path: Path, stop: threading.Event | None = None) -> AbstractContextManager[bool]:
    """One process at a time sends a journal: the job or a replay. With `stop`, wait for the lock until it is set."""
    return file_lock(Path(f"{path}.lock"), stop.is_set if stop else lambda: True)
