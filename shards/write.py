"""Writing shards: one task is one tar, and knows all that a process on any machine needs to write it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from itertools import islice
from multiprocessing import active_children, forkserver, get_context, parent_process, resource_tracker
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from shards.base.storage import Store, store_at
from shards.picture import Rules, check_and_convert
from shards.sources import Reader, Rejected
from shards.tar import TarWriter

_quoted: Callable[[str], str] = json.encoder.encode_basestring  # a JSON string, not only ASCII

JSON_FIELDS = ("index", "given", "class", "true", "flipped", "key")  # of each sample
# What is known of a shard when it is written, until the manifest is: one row for each planned sample.
_PART_COLUMNS: dict[str, Any] = {
    "row": pa.int64(),
    "offset": pa.int64(),
    "size": pa.int32(),
    "format": pa.string(),
    "reason": pa.string(),  # why it was rejected; null: it was not
}
PART = pa.schema(_PART_COLUMNS)


@dataclass(frozen=True)
class Task:
    """One shard to be written."""

    split: str
    number: int
    start: int  # permanent index of the first sample
    digest: str
    rows: NDArray[np.int64]
    keys: list[str]
    given: NDArray[np.int32]
    true: NDArray[np.int32]
    flipped: NDArray[np.bool_]

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:06d}.tar"


def part_name(shard: str) -> str:
    return f".build/{shard}.part"


@dataclass(frozen=True)
class Job:
    """What all tasks of a build share."""

    url: str
    classes: list[str]
    reader: Reader
    rules: Rules


@dataclass(frozen=True)
class Part:
    """A written shard."""

    digest: str
    bytes: int
    sha256: str
    table: pa.Table

    @property
    def kept(self) -> pa.Table:
        return self.table.filter(self.table["reason"].is_null())

    def rejected(self) -> list[tuple[int, str]]:
        bad = self.table.filter(self.table["reason"].is_valid())
        rows: list[Any] = bad["row"].to_pylist()
        reasons: list[Any] = bad["reason"].to_pylist()
        return list(zip(rows, reasons))


def load_part(store: Store, shard: str) -> Part | None:
    """The record of a shard, if it was written whole."""
    data = store.read(part_name(shard), 1 << 30)
    if data is None:
        return None
    try:
        table = pa.parquet.read_table(pa.BufferReader(data))
        about = json.loads(table.schema.metadata[b"shard"])
    except (pa.ArrowException, KeyError, TypeError, ValueError):
        return None
    if store.size(shard) != about["bytes"]:
        return None
    return Part(about["digest"], about["bytes"], about["sha256"], table)


def write_shard(task: Task, job: Job, step: Callable[[int], None]) -> None:
    """Fetch, check, perhaps shrink, and store the samples of a task; rejected ones are left out and noted."""
    store = store_at(job.url)
    names = [_quoted(name) for name in job.classes]
    records: list[tuple[int, int, int, str | None, str | None]] = []
    given, true, flipped = task.given.tolist(), task.true.tolist(), task.flipped.tolist()
    temporary = store.temporary()
    try:
        with _earlier(store, task) as earlier, open(temporary, "wb") as file:
            tar = TarWriter(file)
            for place, (row, key) in enumerate(zip(task.rows.tolist(), task.keys)):
                try:
                    picture, extension = earlier(row) or check_and_convert(
                        job.reader.read(task.split, row, key), job.rules
                    )
                except Rejected as error:
                    records.append((row, 0, 0, None, str(error)))
                except OSError as error:
                    records.append((row, 0, 0, None, _reason(error)))
                except Exception as error:  # one strange picture among millions must not end the build
                    records.append((row, 0, 0, None, f"cannot be decoded ({type(error).__name__})"))
                else:
                    index = task.start + place
                    about = _about(index, given[place], true[place], flipped[place], names, key)
                    offset = tar.add(b"%08d" % index, extension.encode(), picture, about)
                    records.append((row, offset, len(picture), extension, None))
                if place % 64 == 63:
                    step(64)
            step(len(task.rows) % 64)
            sha256 = tar.close()
        store.remove(part_name(task.name))  # between two lines: a record must never tell of another tar
        store.publish(temporary, task.name)
    finally:
        temporary.unlink(missing_ok=True)
    known = json.dumps({"digest": task.digest, "bytes": tar.bytes, "sha256": sha256})
    columns: dict[str, Any] = dict(zip(PART.names, zip(*records)))
    table = pa.table(columns, schema=PART.with_metadata({"shard": known}))
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink)
    # Not forced to the disk, which would force out the tar before it: after a power cut, size or hash tells.
    store.write(part_name(task.name), sink.getvalue().to_pybytes(), lasting=False)


def _reason(error: OSError) -> str:
    return "missing file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror or error})"


def _about(index: int, given: int, true: int, flipped: bool, names: list[str], key: str) -> bytes:
    """The sample's JSON; put together by hand because this runs once for every picture of the web."""
    return (
        f'{{"index": {index}, "given": {given}, "class": {names[given]}, '
        f'"true": {true if true >= 0 else "null"}, "flipped": {"true" if flipped else "false"}, '
        f'"key": {_quoted(key)}}}'
    ).encode()


@contextmanager
def _earlier(store: Store, task: Task) -> Iterator[Callable[[int], tuple[bytes, str] | None]]:
    """Pictures of this shard as it was before some sample proved unusable; they are not encoded again."""
    old = load_part(store, task.name) if store.root else None
    if old is None or store.root is None:
        yield lambda row: None
        return
    table = old.kept
    where = {
        row: (offset, size, extension)
        for row, offset, size, extension in zip(*(table[name].to_pylist() for name in PART.names[:4]))
    }
    with open(store.root / task.name, "rb") as file:

        def fetch(row: int) -> tuple[bytes, str] | None:
            if row not in where:
                return None
            offset, size, extension = where[row]
            file.seek(offset)
            return file.read(size), extension

        yield fetch


# Writers are forked from a bare process, not from the caller: it may have threads, and file systems do not
# survive a fork. That process imports what writers need once, however many there are.
_processes = get_context("forkserver")
_job: Job
# Shared by builder and writers: samples done, by place among the tasks in flight; last, whether to leave the rest.
# Without locks: a writer that is killed would take them with it.
_shared: Any


class _NoPandas(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "pandas":
            raise ImportError(name)


def leave_out_pandas() -> None:
    """In a process of our own: pyarrow looks for pandas at its first array, and the import takes half a second."""
    sys.meta_path.insert(0, _NoPandas())
    pa.array([0])  # now it has looked
    sys.meta_path.pop(0)


def prepare() -> None:
    """Start the process that writers come from; it gets ready while the caller scans the source.

    It and the writers are deaf to Ctrl-C from their first instruction: the builder hears it and tells them.
    """
    _processes.set_forkserver_preload(["shards.builder"])
    with ignore_sigint():
        forkserver.ensure_running()


@contextmanager
def ignore_sigint() -> Iterator[None]:
    """Processes started in here do not hear Ctrl-C, from their first instruction on; whoever starts them does."""
    resource_tracker.ensure_running()  # first: starting it would unblock the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(job: Job, shared: Any) -> None:
    global _job, _shared
    _job, _shared = job, shared
    leave_out_pandas()
    builder = parent_process()

    def watch() -> None:  # a killed builder leaves no orphans behind
        if builder is not None:
            builder.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(task: Task, place: int) -> None:
    def count(samples: int) -> None:
        if _shared[-1]:
            raise KeyboardInterrupt
        _shared[place] += samples

    count(0)  # a task that was waiting when the others were stopped
    write_shard(task, _job, count)


@contextmanager
def _defer_sigint() -> Iterator[Callable[[], None]]:
    """Ctrl-C waits until the yielded function is called: it would break the start of a writer.

    From then on the writers are being waited for, and one more Ctrl-C ends them where they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    asked = heeded = False
    others = set(active_children())

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if heeded:
            for writer in set(active_children()) - others:
                writer.kill()

    def heed() -> None:
        nonlocal asked, heeded
        if not asked:
            return
        asked = False
        signal.signal(signal.SIGINT, before)
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:
            heeded = True
            raise
        finally:
            signal.signal(signal.SIGINT, hold)

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield heed
    finally:
        signal.signal(signal.SIGINT, before)
        if asked:
            signal.raise_signal(signal.SIGINT)


def write_all(tasks: Iterator[Task], job: Job, writers: int, step: Callable[[int], None]) -> None:
    """Do all tasks, in this process or in several; `step` hears of finished samples."""
    if writers <= 1:
        for task in tasks:
            write_shard(task, job, step)
        return
    prepare()
    places = set(range(writers + 1))  # few tasks are in flight at a time: their keys are the memory of this loop
    seen = 0
    with _defer_sigint() as heed_ctrl_c:
        shared = _processes.RawArray("q", len(places) + 1)
        with ProcessPoolExecutor(writers, _processes, _start_worker, (job, shared)) as pool:
            running: dict[Future[None], int] = {}
            try:
                while True:
                    for task in islice(tasks, len(places)):
                        place = places.pop()
                        running[pool.submit(_work, task, place)] = place
                    if not running:
                        break
                    done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                    for future in done:
                        places.add(running.pop(future))
                        future.result()
                    step(sum(shared[:-1]) - seen)
                    seen = sum(shared[:-1])
                    heed_ctrl_c()
            except BaseException:
                shared[-1] = 1
                # Waits for the writers: one that is still starting looks for the semaphores of the pool by name.
                pool.shutdown(cancel_futures=True)
                raise
