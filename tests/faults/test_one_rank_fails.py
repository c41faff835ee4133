"""A rank that fails alone leaves at once, with its own sentence; it does not wait for ranks that wait for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import PLAIN, ROOT
from ranks import worker_env

pytestmark = pytest.mark.dist

# The real command, with a fault on rank 1.
WORKER = """
import os, sys, time
import torch
import torch.distributed as dist
from pipeline import train
from pipeline.engines.ddp import TorchEngine
from pipeline.process.exit_status import run_rank
from pipeline.training import build
from shards.reader import Split

rank, fault, step = int(os.environ["RANK"]), sys.argv[1], TorchEngine.step
steps = []

def fails_to_step(self, batch, lr):
    steps.append(lr)
    if len(steps) == 4:
        raise ValueError("the disk of rank 1 is on fire")
    return step(self, batch, lr)

def fails_to_start(config, method, world):
    if rank == 0:
        time.sleep(900)  # it is slow
    dist.all_reduce(torch.zeros(1), async_op=True)  # under way when the error comes
    raise ValueError("the disk of rank 1 is on fire")

if fault == "step" and rank == 1:
    TorchEngine.step = fails_to_step
if fault == "start":
    build.make_engine = fails_to_start
if fault == "unreadable" and rank == 1:
    Split.read = lambda self, index: b"not a picture"
run_rank(lambda argv: train.main(argv[1:]))
"""
TIMEOUT = "train.timeout=1000"  # far more than the test waits


def run(folder: Path, what: str, launcher: list[str], words: list[str]) -> tuple[int, str]:
    """The exit code and all that was said."""
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    job = subprocess.Popen(
        [sys.executable, *launcher, str(worker), what, *words],
        env={**worker_env(), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = job.communicate(timeout=200)[0]
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise AssertionError("the job still runs") from None
    return job.returncode, said


TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "--local-addr=127.0.0.1"]
TORCHRUN += ["--shutdown-timeout=2"]  # for the rank that sleeps
ENTRY = [
    "-c",
    "import sys; from launch.entry import launch\n"
    "sys.exit(launch(['--nproc-per-node=2', '--shutdown-timeout=2'], sys.argv[1:]))",
]


def test_a_rank_that_fails_does_not_wait_for_what_the_others_never_join(small: str, tmp_path: Path) -> None:
    words = [*PLAIN, TIMEOUT, f"shards.url={small}", f"output={tmp_path / 'run'}"]
    code, said = run(tmp_path, "start", TORCHRUN, words)
    assert code == 1, said
    assert "rank 1, while starting: ValueError: the disk of rank 1 is on fire" in said


def test_the_job_is_reported_as_the_rank_that_failed_saw_it(small: str, tmp_path: Path) -> None:
    """The other rank only says that it lost the first."""
    words = [
        *PLAIN,
        "train.epochs=500",
        "train.device=cpu",
        TIMEOUT,
        f"shards.url={small}",
        f"output={tmp_path / 'run'}",
    ]
    code, said = run(tmp_path, "step", ENTRY, words)
    assert code == 1, said
    assert "2 ranks on cpu, torch" in (tmp_path / "run" / "log.txt").read_text()
    assert said.splitlines()[-1].startswith("failed: rank 1: rank 1, stage 1, epoch 1, step 3")
    assert "the disk of rank 1 is on fire" in said.splitlines()[-1]


def test_a_refusal_of_one_rank_alone_ends_the_job(small: str, tmp_path: Path) -> None:
    words = [*PLAIN, "data.max_bad=0.5", TIMEOUT, f"shards.url={small}", f"output={tmp_path / 'run'}"]
    code, said = run(tmp_path, "unreadable", TORCHRUN, words)
    assert code == 1, said
    assert "pictures did not decode on rank 1" in said
