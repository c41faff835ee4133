"""Work that may take longer than a collective may. The other ranks wait at the store while somebody works."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from shards.base.errors import UserError

T = TypeVar("T")
BEAT_SECONDS = 5.0  # between signs of life of a rank that works
SILENCE_SECONDS = 300.0  # without any of them: the machine that worked is gone
POLL_SECONDS = 1.0
_calls = itertools.count()  # the same number on all ranks, because all of them make every call


def wait_for_work(rank: int, size: int, work: Callable[[], T] | None) -> T | None:
    """Do `work`, on the ranks that have some; returns when all ranks are done. Called by all ranks together.

    There is no limit while a rank that works is alive. If one fails, it raises at once, and the waiting ranks raise too.
    """
    store = PrefixStore(f"work-{next(_calls)}", _get_default_store())
    result = None
    if work is not None:
        try:
            with _signs_of_life(store):
                result = work()
        except BaseException as error:
            told = {"user": isinstance(error, UserError), "rank": rank, "error": f"{type(error).__name__}: {error}"}
            with suppress(RuntimeError):  # the store is gone with another rank that failed
                store.set("failed", json.dumps(told))
            raise
    if store.add("done", 1) == size:
        store.set("all done", "")
    _wait(store)
    return result


@contextmanager
def _signs_of_life(store: Store) -> Iterator[None]:
    done = threading.Event()

    def beat() -> None:
        with suppress(RuntimeError):
            while not done.wait(BEAT_SECONDS):
                store.add("beats", 1)

    thread = threading.Thread(target=beat, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _wait(store: Store) -> None:
    """By asking again and again: a blocking wait would hold back signals, and torch prints a warning for each timeout."""
    pause, seen, heard = 0.01, (-1, -1), time.monotonic()
    while not store.check(["all done"]):
        if store.check(["failed"]):
            told = json.loads(store.get("failed"))
            error = told["error"].partition(": ")[2] if told["user"] else told["error"]
            raise (UserError if told["user"] else RuntimeError)(f"rank {told['rank']}: {error}")
        now = (store.add("beats", 0), store.add("done", 0))
        if now != seen:
            seen, heard = now, time.monotonic()
        elif time.monotonic() - heard > SILENCE_SECONDS:
            raise RuntimeError(
                f"a rank that the others wait for gave no sign of life for {SILENCE_SECONDS:g} s; its machine may be gone"
            )
        time.sleep(pause)
        pause = min(2 * pause, POLL_SECONDS)
