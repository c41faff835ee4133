"""Requests to stop, and exit when the launcher dies. No torch here."""

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
POLL_SECONDS = 1.0  # between checks for the stop file
STARTED = time.monotonic()  # about the start of the process: the commands import this module first


class StopRequest:
    """Whether this run should stop: a signal, a deadline, or a stop file.

    A signal only sets a flag. The trainer reads it in every step, and all ranks act on it together. A second Ctrl-C
    ends the process at once; so does the first while `at_once` is true, because there is nothing to save yet. The stop file
    is never removed; while it exists, the run does not go on.
    """

    def __init__(self, deadline_minutes: float = 0.0, stop_file: str | Path = "",
                 clock: Callable[[], float] = time.monotonic, started: float | None = None) -> None:  # fmt: skip
        """The deadline counts from `started`, by default from now."""
        self._clock = clock
        self.at_once = False
        self._stop_reason: str | None = None
        started = clock() if started is None else started
        self._minutes = deadline_minutes
        self._deadline = started + 60 * deadline_minutes if deadline_minutes else None
        self._file = Path(stop_file) if stop_file else None
        self._next_poll = clock()
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.at_once or self._stop_reason == "SIGINT received":
                raise KeyboardInterrupt
            if os.environ.get("RANK", "0") == "0":
                with contextlib.suppress(OSError):
                    os.write(2, b"\nstopping after this step. Ctrl-C once more ends at once, without saving.\n")
        self._stop_reason = f"{signal.Signals(number).name} received"

    @property
    def reason(self) -> str | None:
        """Why this rank should stop, or None. Cheap enough for every step."""
        if self._stop_reason is None:
            now = self._clock()
            if self._deadline is not None and now >= self._deadline:
                self._stop_reason = f"the deadline of {self._minutes:g} minutes has passed"
            elif self._file is not None and now >= self._next_poll:
                self._next_poll = now + POLL_SECONDS
                if self._file.exists():
                    self._stop_reason = f"the stop file {self._file} exists; remove it to go on"
        return self._stop_reason

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
