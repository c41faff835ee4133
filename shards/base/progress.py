"""Progress with rate and time left: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

Log = Callable[[str], None]
EVERY = 10.0  # seconds between plain lines


class Progress:
    def __init__(self, total: int, unit: str, log: Log) -> None:
        self.total, self.unit, self.log = total, unit, log
        self.done = 0
        self.begun = self.told = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        # One second of silence first: work that is done by then needs no bar.
        self._wanted = log is print and sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def step(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, pace=self._pace(now))
        elif self._wanted and now - self.begun > 1:
            self._start_bar(now)
        elif not self._wanted and now - self.told > EVERY:
            self.told = now
            self.log(f"{self.done} of {self.total} {self.unit}{self._pace(now)}")

    def _pace(self, now: float) -> str:
        if not self.done:
            return ""
        rate = self.done / (now - self.begun)
        left = timedelta(seconds=round((self.total - self.done) / rate))
        return f", {rate:.{0 if rate >= 10 else 1}f}/s, {left} left"

    def _start_bar(self, now: float) -> None:
        from rich import progress
        from rich.console import Console

        count = progress.TextColumn("{task.completed} of {task.total} " + self.unit + "{task.fields[pace]}")
        self._bar = progress.Progress(progress.BarColumn(), count, console=Console(stderr=True), transient=True)
        self._bar.start()
        self._task = self._bar.add_task("", total=self.total, completed=self.done, pace=self._pace(now))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
