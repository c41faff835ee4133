"""Logging: a progress bar on a terminal, plain lines elsewhere; rank 0 only."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
log = logging.getLogger("pipeline")


def start_logging(is_main: bool, file: Path | None = None) -> None:
    """Errors from every rank, the rest from rank 0, which also writes the run's log.txt."""
    handlers: list[logging.Handler] = []
    if is_main and sys.stderr.isatty():
        from rich.logging import RichHandler

        handlers.append(RichHandler(show_path=False, markup=False, log_time_format="%H:%M:%S"))
    else:
        handlers.append(logging.StreamHandler())
    if is_main and file is not None:
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    form = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")
    for handler in handlers:
        if not type(handler).__name__.startswith("Rich"):
            handler.setFormatter(form)
        handler.setLevel(logging.INFO if is_main else logging.ERROR)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    for noisy in ("mlflow", "alembic", "matplotlib", "botocore", "fsspec", "s3fs", "torch", "numba", "PIL"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def follow(items: Iterable[T], total: int, title: str, is_main: bool, done: int = 0) -> Iterator[T]:
    """Pass items on; on a terminal with a bar that shows rate and time left."""
    if not (is_main and sys.stderr.isatty()):
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, completed=done)
        for item in items:
            yield item
            bar.advance(task)


class Clock:
    """Seconds of work, carried over restarts."""

    def __init__(self, before: float = 0.0) -> None:
        self.before, self.start = before, time.monotonic()

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.start
