"""How long a rank works in a step before it waits for the others."""

from __future__ import annotations

import time


class StepTimer:
    """Seconds of own work: from `start` to this rank's first wait for other ranks.

    After a collective all ranks are equally late, so only the time before the first one shows who is slow.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._waited: float | None = None

    def start(self) -> None:
        self._started, self._waited = time.monotonic(), None

    def mark_wait(self) -> None:
        """Called before every collective; the first call after `start` counts."""
        if self._waited is None:
            self._waited = time.monotonic()

    @property
    def work_seconds(self) -> float:
        end = time.monotonic() if self._waited is None else self._waited
        return end - self._started

    @property
    def seconds(self) -> float:
        """Since `start`, waiting included."""
        return time.monotonic() - self._started
