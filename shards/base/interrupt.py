"""Ctrl-C while a command starts. Only the standard library, so that it holds from the first moment."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SENTENCE = "stopped. The same command may be given again."
EXIT_CODE = 128 + signal.SIGINT


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"\n{SENTENCE}\n".encode())
    os._exit(EXIT_CODE)


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """Ctrl-C ends the process. For imports: some compiled packages swallow KeyboardInterrupt, or make another error of it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) in (
        signal.SIG_IGN,
        None,
    ):
        yield
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
