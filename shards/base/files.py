"""Local files: folders for results, atomic writes, locks between processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from shards.base.errors import UserError

POLL_SECONDS = 0.1


def output_folder(path: Path) -> Path:
    """The folder for a command's results, created if it is missing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be a folder for results ({error.strerror}). Choose another.") from None
    return path


def atomic_write(path: Path, content: bytes | str) -> None:
    """Replace a small file: a reader sees the old content or the new, never half of it."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def try_lock(file: IO[Any], per_process: bool = False) -> bool:
    """Take an exclusive lock on an open file without waiting. The kernel releases it when the process is gone.

    An ordinary lock belongs to the open file: it also keeps threads of one process apart, and forked children inherit it.
    With `per_process` it belongs to the process, and children do not inherit it.
    Raises OSError on a file system without locks.
    """
    lock = fcntl.lockf if per_process else fcntl.flock
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


@contextlib.contextmanager
def file_lock(path: Path, give_up: Callable[[], bool] | None = None) -> Iterator[bool]:
    """Hold the lock file `path` during the block; yields whether we have it.

    Waits while another process has it, until `give_up()` is true. On a file system without locks we have it at once.
    """
    with path.open("a") as file:
        held = True
        with contextlib.suppress(OSError):
            if give_up is None:
                fcntl.flock(file, fcntl.LOCK_EX)
            else:
                while not (held := try_lock(file)) and not give_up():
                    time.sleep(POLL_SECONDS)
        yield held


@contextlib.contextmanager
def removed_lock(path: Path) -> Iterator[None]:
    """Hold a lock file that is removed after use."""
    while True:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # The process before us may have removed the file we waited for. Others then lock a new one.
            if not (path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
