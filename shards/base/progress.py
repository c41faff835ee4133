"""Progress with rate and time left: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
Log = Callable[[str], None]
EVERY = 10.0  # seconds between plain lines


class Progress:
    """Counts work: `with Progress(...) as progress: progress.step(n)`, or `for item in Progress(...).over(items)`."""

    def __init__(self, total: int, unit: str, log: Log | None, bar: bool, title: str = "", done: int = 0) -> None:
        """`log` gets the lines; `bar`: draw a bar instead if this is a terminal; `done`: finished before we began."""
        self.total, self.unit, self.log, self.title = total, unit, log, title
        self.done = self._done_before = done
        self._started = self._last_line = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        self._use_bar = bar and sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def over(self, items: Iterable[T], is_step: Callable[[T], object] = lambda item: True) -> Iterator[T]:
        """Pass the items on, counting those for which `is_step` is true."""
        with self:
            for item in items:
                yield item
                self.step(1 if is_step(item) else 0)

    def step(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, rate=self._rate(now))
        elif self._use_bar:
            if now - self._started > 1:  # what is done within a second needs no bar
                self._start_bar(now)
        elif self.log is not None and now - self._last_line > EVERY:
            self._last_line = now
            self.log(f"{self.done} of {self.total} {self.unit}{self._rate(now)}")

    def _rate(self, now: float) -> str:
        if self.done == self._done_before:
            return ""
        rate = (self.done - self._done_before) / (now - self._started)
        left = timedelta(seconds=round((self.total - self.done) / rate))
        return f", {rate:.{0 if rate >= 10 else 1}f}/s, {left} left"

    def _start_bar(self, now: float) -> None:
        from rich import progress
        from rich.console import Console

        title = progress.TextColumn("{task.description}")
        count = progress.TextColumn("{task.completed} of {task.total} " + self.unit + "{task.fields[rate]}")
        columns = (*([title] if self.title else []), progress.BarColumn(), count)
        self._bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar.start()
        self._task = self._bar.add_task(self.title, total=self.total, completed=self.done, rate=self._rate(now))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
