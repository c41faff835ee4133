"""Log lines on the terminal and in the run's log.txt, and the time a run has taken."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from shards.base.progress import terminal

log = logging.getLogger("pipeline")


def start_logging(is_main: bool, file: Path | None = None) -> None:
    """Errors from every rank, the rest from rank 0, which also writes the run's log.txt."""
    handlers: list[logging.Handler] = []
    if is_main and sys.stderr.isatty():
        from rich.logging import RichHandler

        # Without a formatter basicConfig gives it one that writes level and name once more.
        handlers.append(RichHandler(console=terminal(), show_path=False, show_level=False, log_time_format="%H:%M:%S"))
        handlers[0].setFormatter(logging.Formatter("%(message)s"))
    else:
        handlers.append(logging.StreamHandler())
    if is_main and file is not None:
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    form = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")
    for handler in handlers:
        if handler.formatter is None:
            handler.setFormatter(form)
        handler.setLevel(logging.INFO if is_main else logging.ERROR)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    for noisy in (
        "mlflow",
        "alembic",
        "matplotlib",
        "botocore",
        "fsspec",
        "s3fs",
        "torch",
        "numba",
        "PIL",
        "httpx",
        "httpx2",
        "huggingface_hub",
        "timm",
    ):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class Clock:
    """Seconds of work, carried over restarts."""

    def __init__(self, before: float = 0.0) -> None:
        self.before, self.start = before, time.monotonic()

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.start
