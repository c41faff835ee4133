"""Writing shards. One task is one tar, and holds all that a process on any machine needs to write it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import zlib
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

_quoted: Callable[[str], str] = json.encoder.encode_basestring  # a JSON string; not only ASCII

JSON_FIELDS = ("index", "given", "class", "true", "flipped", "key")  # of each sample
# The record of a written shard until there is a manifest: one row for each planned sample.
_PART_COLUMNS: dict[str, Any] = {
    "row": pa.int64(),
    "offset": pa.int64(),
    "size": pa.int32(),
    "format": pa.string(),
    "reason": pa.string(),  # why it was rejected; null: it was not
    "crc32": pa.int64(),  # of the stored bytes
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
    """The record of a shard, if the shard is complete."""
    data = store.read(part_name(shard), 1 << 30)
    if data is None:
        return None
    try:
        table = pa.parquet.read_table(pa.BufferReader(data))
        about = json.loads(table.schema.metadata[b"shard"])
    except (pa.ArrowException, KeyError, TypeError, ValueError):
        return None
    if store.size(shard) != about["bytes"] or table.column_names != PART.names:
        return None
    return Part(about["digest"], about["bytes"], about["sha256"], table)


def write_shard(task: Task, job: Job, step: Callable[[int], None]) -> None:
    """Read, check, perhaps shrink, and store the samples of a task. Rejected ones go to the record only."""
    store = store_at(job.url)
    quoted_classes = [_quoted(name) for name in job.classes]
    records: list[tuple[int, int, int, str | None, str | None, int]] = []
    given, true, flipped = task.given.tolist(), task.true.tolist(), task.flipped.tolist()
    temporary = store.temporary()
    try:
        with _reuse_pictures(store, task) as reuse, open(temporary, "wb") as file:
            tar = TarWriter(file)
            for position, (row, key) in enumerate(zip(task.rows.tolist(), task.keys)):
                try:
                    picture, extension = reuse(row) or check_and_convert(
                        job.reader.read(task.split, row, key), job.rules
                    )
                except Rejected as error:
                    records.append((row, 0, 0, None, str(error), 0))
                except OSError as error:
                    records.append((row, 0, 0, None, _reason(error), 0))
                except Exception as error:  # one strange picture among millions must not end the build
                    records.append((row, 0, 0, None, f"cannot be decoded ({type(error).__name__})", 0))
                else:
                    index = task.start + position
                    about = _sample_json(index, given[position], true[position], flipped[position], quoted_classes, key)
                    offset = tar.add(b"%08d" % index, extension.encode(), picture, about)
                    records.append((row, offset, len(picture), extension, None, zlib.crc32(picture)))
                if position % 64 == 63:
                    step(64)
            step(len(task.rows) % 64)
            sha256 = tar.close()
        store.remove(part_name(task.name))  # before the tar changes: a record must never describe another tar
        store.publish(temporary, task.name)
    finally:
        temporary.unlink(missing_ok=True)
    shard_info = json.dumps({"digest": task.digest, "bytes": tar.bytes, "sha256": sha256})
    columns: dict[str, Any] = dict(zip(PART.names, zip(*records)))
    table = pa.table(columns, schema=PART.with_metadata({"shard": shard_info}))
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink)
    # Without fsync, which would flush the tar as well. After a power cut, size or hash of the tar shows the loss.
    store.write(part_name(task.name), sink.getvalue().to_pybytes(), lasting=False)


def _reason(error: OSError) -> str:
    return "missing file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror or error})"


def _sample_json(index: int, given: int, true: int, flipped: bool, quoted_classes: list[str], key: str) -> bytes:
    """The JSON of a sample, with JSON_FIELDS. Formatted by hand: json.dumps takes longer, and there are millions."""
    return (
        f'{{"index": {index}, "given": {given}, "class": {quoted_classes[given]}, '
        f'"true": {true if true >= 0 else "null"}, "flipped": {"true" if flipped else "false"}, '
        f'"key": {_quoted(key)}}}'
    ).encode()


@contextmanager
def _reuse_pictures(store: Store, task: Task) -> Iterator[Callable[[int], tuple[bytes, str] | None]]:
    """Pictures of this shard as an earlier round wrote it: they need not be encoded again."""
    old = load_part(store, task.name) if store.root else None
    if old is None or store.root is None:
        yield lambda row: None
        return
    table = old.kept
    stored = {
        row: (offset, size, extension)
        for row, offset, size, extension in zip(*(table[name].to_pylist() for name in PART.names[:4]))
    }
    with open(store.root / task.name, "rb") as file:

        def fetch(row: int) -> tuple[bytes, str] | None:
            if row not in stored:
                return None
            offset, size, extension = stored[row]
            file.seek(offset)
            return file.read(size), extension

        yield fetch


# Writers are forked from a server process, not from the caller, which may have threads and open file systems.
# The server imports what writers need, once for all of them.
_processes = get_context("forkserver")
_job: Job
# Shared by builder and writers: samples done, by slot of the running tasks; the last number is 1 to stop.
# Without locks: a writer that is killed would never release them.
_shared: Any


class _NoPandas(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "pandas":
            raise ImportError(name)


def leave_out_pandas() -> None:
    """Keep pyarrow from importing pandas at its first array, which takes half a second. For our own processes only."""
    sys.meta_path.insert(0, _NoPandas())
    pa.array([0])  # pyarrow looks for pandas now, and never again
    sys.meta_path.pop(0)


def prepare() -> None:
    """Start the server that writers are forked from; it starts up while the caller scans the source.

    The server and the writers ignore SIGINT; the builder forwards it.
    """
    _processes.set_forkserver_preload(["shards.builder"])
    with ignore_sigint():
        forkserver.ensure_running()


@contextmanager
def ignore_sigint() -> Iterator[None]:
    """Processes started in this block ignore SIGINT from their first instruction on. The caller still gets it."""
    resource_tracker.ensure_running()  # first: starting it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_writer(job: Job, shared: Any) -> None:
    global _job, _shared
    _job, _shared = job, shared
    leave_out_pandas()
    builder = parent_process()

    def exit_with_builder() -> None:  # a killed builder leaves no writers behind
        if builder is not None:
            builder.join()
        os._exit(1)

    threading.Thread(target=exit_with_builder, daemon=True).start()


def _run_task(task: Task, slot: int) -> None:
    def count(samples: int) -> None:
        if _shared[-1]:
            raise KeyboardInterrupt
        _shared[slot] += samples

    count(0)  # the task may have waited in the queue until we were told to stop
    write_shard(task, _job, count)


@contextmanager
def _defer_sigint() -> Iterator[Callable[[], None]]:
    """SIGINT is kept until the yielded function is called: it would break the start of a writer.

    After that the builder waits for the writers, and a second SIGINT kills them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    pending = delivered = False
    others = set(active_children())

    def on_sigint(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        pending = True
        if delivered:
            for writer in set(active_children()) - others:
                writer.kill()

    def deliver() -> None:
        nonlocal pending, delivered
        if not pending:
            return
        pending = False
        signal.signal(signal.SIGINT, before)
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:
            delivered = True
            raise
        finally:
            signal.signal(signal.SIGINT, on_sigint)

    before = signal.signal(signal.SIGINT, on_sigint)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, before)
        if pending:
            signal.raise_signal(signal.SIGINT)


def write_all(tasks: Iterator[Task], job: Job, writers: int, step: Callable[[int], None]) -> None:
    """Run all tasks, in this process or in several; `step` is called with the number of finished samples."""
    if writers <= 1:
        for task in tasks:
            write_shard(task, job, step)
        return
    prepare()
    free_slots = set(range(writers + 1))  # few tasks at a time: the keys of all would fill the memory
    seen = 0
    with _defer_sigint() as deliver_sigint:
        shared = _processes.RawArray("q", len(free_slots) + 1)
        with ProcessPoolExecutor(writers, _processes, _start_writer, (job, shared)) as pool:
            running: dict[Future[None], int] = {}
            try:
                while True:
                    for task in islice(tasks, len(free_slots)):
                        slot = free_slots.pop()
                        running[pool.submit(_run_task, task, slot)] = slot
                    if not running:
                        break
                    done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                    for future in done:
                        free_slots.add(running.pop(future))
                        future.result()
                    step(sum(shared[:-1]) - seen)
                    seen = sum(shared[:-1])
                    deliver_sigint()
            except BaseException:
                shared[-1] = 1
                # Waits for the writers: one that is still starting opens the semaphores of the pool by name.
                pool.shutdown(cancel_futures=True)
                raise
