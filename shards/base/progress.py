"""Progress with rate and time left: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
Log = Callable[[str], None]
FIRST, LAST = 4.0, 60.0  # seconds between plain lines, at first and in work that lasts long


@functools.cache
def terminal() -> Any:
    """The one rich console of standard error. Lines and bars must share it, or lines break the bar."""
    from rich.console import Console

    return Console(stderr=True)


def interval(elapsed: float) -> float:
    """Seconds to the next plain line: short at first, a fifteenth of the work's time later."""
    return min(max(FIRST, elapsed / 15), LAST)


class Progress:
    """Counts work: `with Progress(...) as progress: progress.step(n)`, or `for item in Progress(...).over(items)`."""

    def __init__(self, total: int, unit: str, log: Log | None, bar: bool, title: str = "", done: int = 0) -> None:
        """`log` gets the lines; `bar`: draw a bar instead if this is a terminal; `done`: finished before we began."""
        self.total, self.unit, self.log, self.title = total, unit, log, title
        self.note = ""  # more to show, such as the loss
        self.line_due = False  # the next step writes a line, on a terminal too
        self.done = self._done_before = done
        self._started = self._last_line = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        self._use_bar = bar and sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def over(self, items: Iterable[T], count: Callable[[T], int] = lambda item: 1) -> Iterator[T]:
        """Pass the items on, counting each as much as `count` says."""
        with self:
            for item in items:
                yield item
                self.step(count(item))

    def step(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, rest=self._rest(now))
        elif self._use_bar and now - self._started > 1:  # what is done within a second needs no bar
            self._start_bar(now)
        late = not self._use_bar and now - self._last_line > interval(now - self._started)
        if self.log is not None and (late or self.line_due):
            self._last_line, self.line_due = now, False
            title = f"{self.title}: " if self.title else ""
            self.log(f"{title}{self.done} of {self.total} {self.unit}{self._rest(now)}")

    def _rest(self, now: float) -> str:
        note = f", {self.note}" if self.note else ""
        if self.done == self._done_before:
            return note
        rate = (self.done - self._done_before) / max(now - self._started, 1e-9)
        left = timedelta(seconds=round((self.total - self.done) / rate))
        return f"{note}, {rate:.{0 if rate >= 10 else 1}f}/s, {left} left"

    def _start_bar(self, now: float) -> None:
        from rich import progress

        title = progress.TextColumn("{task.description}")
        count = progress.TextColumn("{task.completed} of {task.total} " + self.unit + "{task.fields[rest]}")
        columns = (*([title] if self.title else []), progress.BarColumn(), count)
        self._bar = progress.Progress(*columns, console=terminal(), transient=True)
        self._bar.start()
        self._task = self._bar.add_task(self.title, total=self.total, completed=self.done, rest=self._rest(now))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def waiting(what: str, log: Log | None, first: float = FIRST) -> Iterator[None]:
    """Work that cannot be counted: a line now and then says that it goes on. On a terminal it is one that moves.

    No bar may be drawn inside. `log` is called by another thread.
    """
    if log is None:
        yield
    elif sys.stderr.isatty():
        with terminal().status(what):
            yield
    else:
        ended, started = threading.Event(), time.monotonic()

        def tell() -> None:
            pause = first
            while not ended.wait(pause):
                elapsed = time.monotonic() - started
                log(f"{what}: {timedelta(seconds=round(elapsed))}")
                pause = interval(elapsed)

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
