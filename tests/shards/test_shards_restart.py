"""Killed at any moment, started again, on any number of ranks: the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shards_help import Build, fill

from shards import builder
from shards import write as writing
from shards.config import BuildConfig
from shards.reader import open_split
from shards.settings import UserError
from shards.sources import collect
from shards.storage import LocalStore, store_at

ROOT = str(Path(__file__).parents[2])


def contents(folder: str | Path) -> dict[str, bytes]:
    names = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.name != "build.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in names}


@pytest.fixture
def options(tmp_path: Path) -> dict[str, object]:
    root = fill(tmp_path / "in", {"ant": 60, "bee": 40})
    (root / "ant" / "007.jpg").write_bytes(b"bad")  # so that there is a second round
    return {
        "source": "folder",
        "path": str(root),
        "shard_samples": 10,
        "noise": 0.2,
        "rho": 1.5,
        "max_rejected": 0.1,
    }


class Killed(BaseException):
    pass


def test_killed_at_every_step_and_started_again(options, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start may change three files, then it is stopped; at the end the bytes are the same."""
    wanted = contents(build("undisturbed", **options))
    publish = LocalStore.publish
    written: list[str] = []
    budget = 0

    def counted(self, local, name):
        nonlocal budget
        if budget == 0:
            raise Killed
        budget -= 1
        if name.endswith(".tar"):
            written.append(name)
        publish(self, local, name)

    monkeypatch.setattr(LocalStore, "publish", counted)
    for _ in range(100):
        budget = 3
        try:
            url = build("killed", **options)
            break
        except Killed:
            assert not (Path(build.tmp) / "killed" / "manifest.json").exists()
    assert contents(url) == wanted
    # Finished shards were not written again: 12 shards, and the one or two that a bad picture changed.
    assert len(written) <= 12 + 3


def start(program: list[str], arguments: list[str], **environment: str) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": ROOT} | environment
    command = [sys.executable, *program, *arguments]
    # A shell that runs the tests in its background has them ignore Ctrl-C, and all they start.
    hear = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=hear)


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def words(options: dict[str, object], output: Path) -> list[str]:
    return [f"{key}={value}" for key, value in {**options, "output": output}.items()]


# The build command, but after some tars every picture takes its time: however busy the machine is, nobody who
# watches comes too late. Writers import this file too.
SLOW_PICTURES = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from shards.build import main
from shards.settings import run
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
from shards.beton import run_apart
from shards.settings import run

def work(place):
    multiprocessing.set_start_method("fork", force=True)
    worker = multiprocessing.Process(target=time.sleep, args=(1000,))
    worker.start()
    Path(place).write_text(f"{os.getpid()} {worker.pid}")
    os.rename(place, f"{place}.done")
    time.sleep(1000)

def main(argv):
    run_apart(work, argv[0])

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
        with writing._ctrl_c_waits() as heed:
            heed()
            signal.raise_signal(signal.SIGINT)
            assert heard == []
            heed()
            heed()
            assert heard == [signal.SIGINT]
        with writing._ctrl_c_waits():
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

    from shards.sources import Collection, Rows

    labels = np.array([0, 1] * 4, np.int32)
    rows = Rows(pa.array([str(n) for n in range(8)]), labels, labels)
    found = Collection("deadly", ["a", "b"], {"train": rows}, Deadly())
    config = BuildConfig(output=str(tmp_path / "out"), rho=1, noise=0, writers=2, shard_samples=4)
    with pytest.raises(UserError, match=r"A writer process was killed.*fewer writers"):
        builder.Build(store_at(config.output), config, found, print).run()


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_changed_input_is_not_mixed_with_the_old(options, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self, plans):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(builder.Build, "_finish", stop)
        with pytest.raises(Killed):
            build("out", **options)
    fill(Path(str(options["path"])), {"cow": 20})
    wanted = contents(build("fresh", **options))
    assert contents(build("out", **options)) == wanted


@pytest.mark.parametrize("name", ["holiday.jpg", "train-000000.tar", "mine.parquet"])
def test_a_folder_with_other_files_is_refused_and_left_alone(name: str, options, build: Build, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_bytes(b"precious")
    with pytest.raises(UserError, match=rf"out holds other files \({name}\)\. Choose an empty or new folder"):
        build("out", **options)
    assert contents(tmp_path / "out") == {name: b"precious"}


@pytest.mark.dist
def test_ranks_write_their_share_and_one_manifest(options, tmp_path: Path, build: Build) -> None:
    wanted = contents(build("alone", **options))
    ranks = [
        start(["-m", "shards.build"], words(options, tmp_path / "shared"), RANK=str(rank), WORLD_SIZE="3")
        for rank in (2, 1, 0)
    ]
    for process in ranks:
        assert process.wait(120) == 0, process.stderr.read().decode()
    assert contents(tmp_path / "shared") == wanted


def test_a_rank_that_waits_in_vain_says_so(
    options, build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(builder, "PATIENCE", 0.3)
    from shards.build import ensure
    from shards.config import BuildConfig

    config = BuildConfig.model_validate({**options, "output": str(tmp_path / "out")})
    with pytest.raises(UserError, match="in vain for the other ranks to write their shards"):
        ensure(config, print, rank=0, world=2)


def test_a_full_disk_is_a_sentence_and_finished_shards_are_kept(
    options, build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = contents(build("undisturbed", **options))
    add = writing.TarWriter.add
    room = 35

    def full(self, *arguments):
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(28, "No space left on device")
        return add(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(writing.TarWriter, "add", full)
        with pytest.raises(UserError, match=r"No space left on device.*run the same command again"):
            build("out", **options)
    assert len(list((tmp_path / "out").glob("*.tar"))) == 3
    assert not list((tmp_path / "out" / ".build").glob("*.tmp"))
    assert contents(build("out", **options)) == wanted
    assert len(open_split(str(tmp_path / "out"))) > 0


@pytest.mark.parametrize("name", ["build.json", "round-0.json", "train.parquet", "manifest.json"])
def test_a_disk_that_is_full_at_the_end_is_a_sentence_too(
    name: str, options, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = contents(build("undisturbed", **options))
    publish = LocalStore.publish

    def full(self, local, target):
        if target.endswith(name):
            raise OSError(28, "No space left on device")
        publish(self, local, target)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "publish", full)
        with pytest.raises(UserError, match=r"No space left on device.*run the same command again"):
            build("out", **options)
    assert contents(build("out", **options)) == wanted


def small_pngs(root: Path, each: int) -> Path:
    """Of about the same size, so that tars of as many samples have as many blocks."""
    rng = np.random.default_rng(0)
    for name in "ab":
        (root / name).mkdir(parents=True)
        for number in range(each):
            pixels = rng.integers(0, 255, (6, 5 + number % 5, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number:02d}.png")
    return root


def test_killed_between_a_rewritten_tar_and_its_record(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old record has the size of the new tar, and other pictures in other places."""
    root = small_pngs(tmp_path / "in", 30)
    options = {"source": "folder", "path": str(root), "shard_samples": 10, "max_rejected": 0.2}
    keys = open_split(build("before", **options)).keys()
    (root / keys[-(len(keys) % 10 or 10)]).write_bytes(b"bad")
    wanted = contents(build("undisturbed", **options))
    write, seen = LocalStore.write, []

    def stop_at_the_second(self, name, data, lasting=True):
        seen.append(name)
        if name.endswith(".part") and seen.count(name) == 2:
            raise Killed
        write(self, name, data, lasting)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "write", stop_at_the_second)
        with pytest.raises(Killed):
            build("killed", **options)
    assert contents(build("killed", **options)) == wanted


def test_a_rank_that_comes_late_to_a_finished_build_changes_nothing(options, tmp_path: Path, build: Build) -> None:
    """Its records are gone with the end of the build; it must not take that for work to do."""
    wanted = contents(build("alone", **options))
    config = BuildConfig(**options, output=build("done", **options))
    late = builder.Build(store_at(config.output), config, collect(config, print), print, rank=1, world=2)
    late.run()
    assert contents(tmp_path / "done") == wanted
    assert not (tmp_path / "done" / ".build").exists() or not list((tmp_path / "done" / ".build").iterdir())


def test_a_repaired_input_is_looked_at_again(tmp_path: Path, build: Build) -> None:
    root = fill(tmp_path / "in", {"ant": 20, "bee": 20})
    good = (root / "ant" / "000.jpg").read_bytes()
    options = {"source": "folder", "path": str(root), "shard_samples": 8}
    for name in ("001", "002", "003"):
        (root / "ant" / f"{name}.jpg").write_bytes(good[:200])
    with pytest.raises(UserError, match="3 of 40 pictures cannot be used"):
        build("out", **options)
    for name in ("001", "002", "003"):
        (root / "ant" / f"{name}.jpg").write_bytes(good)
    assert open_split(build("out", **options)).manifest.rejected.count == 0
