"""A stop is asked for by signal, deadline or file; asking raises a flag and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.process.stop_request import StopRequest


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    with StopRequest() as request:
        yield request


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_raises_the_flag_and_nothing_else(stop: StopRequest, number: signal.Signals) -> None:
    assert stop.reason is None
    os.kill(os.getpid(), number)
    assert stop.reason == f"{number.name} received"


def test_a_second_ctrl_c_does_not_wait(stop: StopRequest) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_sigterm_changes_nothing(stop: StopRequest) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.reason == "SIGTERM received"


def test_signals_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_deadline_counts_from_the_start_by_a_clock_that_nobody_sets() -> None:
    now = 1000.0
    with StopRequest(deadline_minutes=2, clock=lambda: now) as stop:
        now += 119
        assert stop.reason is None
        now += 2
        assert stop.reason == "the deadline of 2 minutes has passed"


def test_a_stop_file_is_looked_for_at_most_once_a_second_and_left_alone(tmp_path: Path) -> None:
    now = 0.0
    file = tmp_path / "stop"
    with StopRequest(stop_file=file, clock=lambda: now) as stop:
        assert stop.reason is None
        file.touch()
        now += 0.5
        assert stop.reason is None
        now += 0.6
        assert "remove it to go on" in str(stop.reason)
    assert file.exists()


def test_without_a_wish_looking_is_cheap_enough_for_every_step(tmp_path: Path) -> None:
    with StopRequest(60, tmp_path / "stop") as stop:
        start = time.perf_counter()
        for _ in range(10_000):
            assert stop.reason is None
        assert time.perf_counter() - start < 1.0  # below 0.1 ms each


CHILD = """
import time
from pipeline.process.stop_request import die_with_parent
die_with_parent()
print("up", flush=True)
time.sleep(60)
"""
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}]).wait()"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does this")
@pytest.mark.parametrize("under_torchrun", [True, False])
def test_a_worker_does_not_outlive_torchrun_but_a_run_may_outlive_its_shell(under_torchrun: bool) -> None:
    env = {**os.environ, **({"TORCHELASTIC_RUN_ID": "x"} if under_torchrun else {})}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=env, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.kill()
    parent.wait()
    child = Path(f"/proc/{children[0]}/stat")
    until = time.monotonic() + 3
    while (
        child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < until - (not under_torchrun) * 2.5
    ):
        time.sleep(0.02)
    alive = child.exists() and child.read_text().split()[2] != "Z"
    if alive:
        os.kill(int(children[0]), signal.SIGKILL)
    assert alive is not under_torchrun


def test_the_deadline_counts_from_the_start_of_the_process() -> None:
    """Importing torch and building shards count too."""
    with StopRequest(deadline_minutes=1, clock=lambda: 100.0, started=39.0) as late:
        assert late.reason == "the deadline of 1 minutes has passed"
    with StopRequest(deadline_minutes=1, clock=lambda: 100.0, started=41.0) as early:
        assert early.reason is None
