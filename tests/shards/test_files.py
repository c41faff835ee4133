"""Atomic writes and locks between processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shards.base.files import atomic_write, file_lock, removed_lock, try_lock

HOLD = """
import sys, time
from pathlib import Path
from shards.base.files import file_lock
with file_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a.json", "one")
    atomic_write(tmp_path / "a.json", b"two")
    assert (tmp_path / "a.json").read_text() == "two"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_write_that_fails_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    atomic_write(tmp_path / "a.json", "one")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        atomic_write(tmp_path / "a.json", "two")
    assert (tmp_path / "a.json").read_text() == "one"
    assert os.listdir(tmp_path) == ["a.json"]


def test_one_process_has_the_lock_until_it_is_killed(tmp_path: Path) -> None:
    other = holder(tmp_path / "lock")
    with file_lock(tmp_path / "lock", give_up=lambda: True) as mine:
        assert not mine
    other.kill()
    other.wait()
    with file_lock(tmp_path / "lock", give_up=lambda: True) as mine:
        assert mine


def test_the_lock_waits_and_keeps_threads_apart(tmp_path: Path) -> None:
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(3):
            with file_lock(tmp_path / "lock"):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_a_lock_per_process_is_not_held_by_forked_children(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("a") as file:
        assert try_lock(file, per_process=True)
        child = os.fork()
        if child == 0:
            os._exit(0 if not try_lock(file, per_process=True) else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_lock_file_is_removed_after_use(tmp_path: Path) -> None:
    with removed_lock(tmp_path / "lock"):
        assert (tmp_path / "lock").exists()
    assert os.listdir(tmp_path) == []


def test_a_lock_file_that_somebody_else_removed_is_no_error(tmp_path: Path) -> None:
    with removed_lock(tmp_path / "lock"):
        (tmp_path / "lock").unlink()
