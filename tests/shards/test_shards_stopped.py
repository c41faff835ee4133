"""Ctrl-C, or a kill, while processes write: no orphans, no tracebacks, and the rest is done later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from shards_help import ROOT, Build, contents, fill, start, until, words

from shards import builder
from shards import write as writing
from shards.base.errors import UserError
from shards.base.storage import store_at
from shards.config import BuildConfig

# The build command, but after some tars every picture takes its time: however busy the machine is, nobody who
# watches comes too late. Writers import this file too.
SLOW_PICTURES = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from shards.build import main
from shards.base.cli import run
from shards.sources.files import FileReader

place, read, shutdown = Path(os.environ["PLACE"]), FileReader.read, ProcessPoolExecutor.shutdown

def slowly(self, *picture):
    if len(list(place.glob("*.tar"))) >= int(os.environ["TARS"]):
        time.sleep(float(os.environ["SECONDS"]))
    return read(self, *picture)

def visibly(self, *how, **else_how):
    place.with_suffix(".stopping").touch()
    shutdown(self, *how, **else_how)

FileReader.read, ProcessPoolExecutor.shutdown = slowly, visibly

if __name__ == "__main__":
    run(main)
"""
STOPPED = (130, b"stopped. The same command may be given again.\n")


class Stoppable:
    """A build in a process of its own, waiting to be stopped."""

    def __init__(self, tmp_path: Path, tars: int, seconds: float) -> None:
        root = fill(tmp_path / "in", {"ant": 30, "bee": 30})
        self.options = {"source": "folder", "path": str(root), "shard_samples": 3, "resize": 8}
        self.place, script = tmp_path / "stopped", tmp_path / "slow.py"
        script.write_text(SLOW_PICTURES)
        gate = {"PLACE": str(self.place), "TARS": str(tars), "SECONDS": str(seconds)}
        self.process = start([str(script)], words(self.options | {"writers": 2}, self.place), **gate)
        self.tars = tars

    def reached(self) -> Stoppable:
        until(lambda: len(list(self.place.glob("*.tar"))) >= self.tars)
        self.started = list(_below(self.process.pid))
        assert len(self.started) >= 2  # writers and the process they come from
        return self

    def ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)  # as a terminal does

    def ended(self, build: Build) -> tuple[int, bytes]:
        """(exit code, what was said), after a look at what is left."""
        _, said = self.process.communicate(timeout=60)
        assert not (self.place / "manifest.json").exists()
        until(lambda: not any(_alive(number) for number in self.started))
        assert contents(build("stopped", **self.options)) == contents(build("undisturbed", **self.options))
        return self.process.returncode, said


@pytest.fixture
def stoppable(tmp_path: Path) -> Iterator[Callable[[int, float], Stoppable]]:
    made: list[Stoppable] = []

    def make(tars: int, seconds: float) -> Stoppable:
        made.append(Stoppable(tmp_path, tars, seconds))
        return made[-1].reached()

    yield make
    for stopped in made:
        if stopped.process.poll() is None:
            os.killpg(stopped.process.pid, signal.SIGKILL)


@pytest.mark.parametrize("tars", [1, 5])  # at the first, other writers may be starting
def test_a_stopped_build_leaves_no_workers_and_the_rest_is_done_later(tars: int, stoppable, build: Build) -> None:
    stopped = stoppable(tars, 0.3)
    stopped.ctrl_c()
    assert stopped.ended(build) == STOPPED


def test_who_asks_again_does_not_wait_for_the_writers(stoppable, build: Build) -> None:
    stopped = stoppable(1, 1000)
    stopped.ctrl_c()
    until(stopped.place.with_suffix(".stopping").exists)
    stopped.ctrl_c()
    assert stopped.ended(build) == STOPPED


def test_a_killed_build_leaves_no_workers_and_the_rest_is_done_later(stoppable, build: Build) -> None:
    stopped = stoppable(5, 0.3)
    stopped.process.kill()
    assert stopped.ended(build)[0] == -signal.SIGKILL


def _below(process: int) -> Iterator[int]:
    """All that a process started, and what these started."""
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        yield int(child)
        yield from _below(int(child))


SLOW_START = """
import os, signal, sys, threading, time
import numpy as np
from shards.picture import Rules
from shards.write import Job, Task, write_all

class Slow:
    def read(self, split, row, key):
        return b""

    def __getstate__(self):
        return "slow"

    def __setstate__(self, state):
        time.sleep(2)

def stop(samples):
    signal.raise_signal(signal.SIGINT)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    again = threading.Timer(1.5, os.kill, [os.getpid(), signal.SIGINT])
    if sys.argv[2] == "twice":
        again.start()
    labels = np.zeros(4, np.int32)
    task = Task("train", 0, 0, "", np.arange(4), list("abcd"), labels, labels, labels > 0)
    job = Job(sys.argv[1], ["a"], Slow(), Rules(0, 0, False, 0, 0))
    try:
        write_all(iter([task, task]), job, 2, stop)
    except KeyboardInterrupt:
        again.cancel()
        print("stopped")
"""


@pytest.mark.parametrize("times", ["once", "twice"])
def test_stopped_while_a_writer_is_starting(times: str, tmp_path: Path) -> None:
    """A writer looks for its semaphores while it starts; they must still be there."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW_START)
    command = [sys.executable, str(script), str(tmp_path / "out"), times]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": ROOT}, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"stopped\n", b"")


APART = """
import multiprocessing, os, time
from pathlib import Path
from shards.beton import run_in_child
from shards.base.cli import run

def work(place):
    multiprocessing.set_start_method("fork", force=True)
    worker = multiprocessing.Process(target=time.sleep, args=(1000,))
    worker.start()
    Path(place).write_text(f"{os.getpid()} {worker.pid}")
    os.rename(place, f"{place}.done")
    time.sleep(1000)

def main(argv):
    run_in_child(work, argv[0])

if __name__ == "__main__":
    run(main)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_process_that_writes_ffcv_files_ends_with_the_build_and_so_do_its_workers(
    how: signal.Signals, tmp_path: Path
) -> None:
    script, started = tmp_path / "apart.py", tmp_path / "started.done"
    script.write_text(APART)
    process = start([str(script)], [str(tmp_path / "started")])
    until(started.exists)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.kill()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (STOPPED if how == signal.SIGINT else (-how, b""))
    until(lambda: not any(_alive(int(number)) for number in started.read_text().split()))


def test_ctrl_c_waits_for_a_good_moment_and_goes_to_the_handler_of_before() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with writing._defer_sigint() as deliver:
            deliver()
            signal.raise_signal(signal.SIGINT)
            assert heard == []
            deliver()
            deliver()
            assert heard == [signal.SIGINT]
        with writing._defer_sigint():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert len(heard) == 2  # what nobody heeded is not lost
    finally:
        signal.signal(signal.SIGINT, before)


class Deadly:
    """A reader that takes its process with it, as the kernel does when memory is short."""

    def read(self, split: str, row: int, key: str) -> bytes:
        os._exit(9)


def test_a_writer_that_is_killed_ends_the_build_with_a_sentence(tmp_path: Path) -> None:
    import pyarrow as pa

    from shards.sources import Collection, SourceTable

    labels = np.array([0, 1] * 4, np.int32)
    rows = SourceTable(pa.array([str(n) for n in range(8)]), labels, labels)
    found = Collection("deadly", ["a", "b"], {"train": rows}, Deadly())
    config = BuildConfig(output=str(tmp_path / "out"), rho=1, noise=0, writers=2, shard_samples=4)
    with pytest.raises(UserError, match=r"A writer process was killed.*fewer writers"):
        builder.Build(store_at(config.output), config, found, print).run()


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
