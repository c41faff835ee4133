"""Requests to stop, and exit when the launcher dies. No torch here: it is set up before anything slow."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LOOK_EVERY = 1.0  # seconds between checks for the stop file


class StopRequest:
    """Whether this run should stop: a signal, a deadline, or a stop file.

    A signal only sets a flag. The trainer reads it in every step, and all ranks act on it together. A second Ctrl-C
    ends the process at once. The stop file is never removed; while it exists, the run does not go on.
    """

    def __init__(self, deadline_minutes: float = 0.0, stop_file: str | Path = "",
                 clock: Callable[[], float] = time.monotonic) -> None:  # fmt: skip
        self._clock = clock
        self._reason: str | None = None
        self.watch(deadline_minutes, stop_file)
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def watch(self, deadline_minutes: float = 0.0, stop_file: str | Path = "") -> None:
        """Set the deadline (from now) and the stop file."""
        self._minutes = deadline_minutes
        self._deadline = self._clock() + 60 * deadline_minutes if deadline_minutes else None
        self._file = Path(stop_file) if stop_file else None
        self._next_look = self._clock()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._reason == "SIGINT received":
            raise KeyboardInterrupt
        self._reason = f"{signal.Signals(number).name} received"

    @property
    def wanted(self) -> str | None:
        """Why this rank should stop, or None. Cheap enough for every step."""
        if self._reason is None:
            now = self._clock()
            if self._deadline is not None and now >= self._deadline:
                self._reason = f"the deadline of {self._minutes:g} minutes has passed"
            elif self._file is not None and now >= self._next_look:
                self._next_look = now + LOOK_EVERY
                if self._file.exists():
                    self._reason = f"the stop file {self._file} exists; remove it to go on"
        return self._reason

    def flag(self) -> float:
        """1.0 if a stop is wanted here, else 0.0: to be summed over ranks in a collective that runs
        anyway.
        """
        return 1.0 if self.wanted else 0.0

    def close(self) -> None:
        """Restore the signal handlers that were there before."""
        for number, handler in self._before.items():
            with contextlib.suppress(ValueError):  # not the main thread any more
                signal.signal(number, handler)
        self._before = {}

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def die_with_parent() -> None:
    """If torchrun started this process, have the kernel kill it when torchrun is gone. Linux only.

    torchrun starts its workers in sessions of their own. Killed with -9, it would leave them training, with the GPUs and
    the output folder in use. A run started from a shell may outlive the shell.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        kill_when_orphaned()
        if os.getppid() != parent:  # it died between the two lines
            os._exit(1)


def kill_when_orphaned() -> None:
    """PR_SET_PDEATHSIG: SIGKILL for this process when its parent dies."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(1, int(signal.SIGKILL), 0, 0, 0)
