"""One job per output folder: the lock is held until the process is gone, however it ends."""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path
from typing import IO

from pipeline.distributed.world import World
from shards.base.errors import UserError
from shards.base.files import try_lock

log = logging.getLogger(__name__)
_held: list[IO[str]] = []  # closing a file would give up the lock on it


def lock(output: str | Path, world: World | None = None, timeout: float = 2.0) -> None:
    """Lock the output folder until this process is gone. UserError on all ranks if another running job has it."""
    world = world or World()
    problem: str | None = None
    if world.is_main:
        try:
            _acquire(Path(output), timeout)
        except UserError as error:
            problem = str(error)
    if problem := world.broadcast_object(problem):
        raise UserError(problem)


def _acquire(folder: Path, timeout: float) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "a+")  # noqa: SIM115
    except OSError as error:
        raise UserError(
            f"The output folder {folder} cannot be written ({error.strerror}). "
            "Make it writable, or set output to another folder."
        ) from None
    until = time.monotonic() + timeout  # a job that was just killed needs a moment to exit
    while not _try_lock(file):
        if time.monotonic() > until:
            file.seek(0)
            holder = file.read(200).strip() or "unknown"
            file.close()
            raise UserError(
                f"Another job ({holder}) is writing to {folder}. Wait for it, stop it, or set output to another folder."
            )
        time.sleep(0.1)
    _held.append(file)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()


def _try_lock(file: IO[str]) -> bool:
    try:
        return try_lock(file, per_process=True)  # forked children may outlive the job and must not keep the lock
    except OSError as error:
        log.warning("%s cannot be locked (%s): take care not to start two jobs there.", file.name, error.strerror)
        return True
