"""Rank 0 builds shards for longer than a collective may take: the others wait, and notice how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import PLAIN, ROOT
from ranks import free_port, worker_env

pytestmark = pytest.mark.dist

# The set-up of the real command, with a build of shards that takes twice as long as a collective may.
WORKER = """
import os, sys, time
from pipeline import config, train
from pipeline.distributed.world import init_distributed
from pipeline.process.exit_status import run_rank
from pipeline.training import build
from shards.base.errors import UserError

real, end, told = build.ensure, sys.argv[1], sys.argv[2]

def slow_ensure(settings):
    open(told, "w").close()
    time.sleep(6)
    if end == "refused":
        raise UserError("the pictures are gone.")
    if end == "killed":
        os._exit(9)
    if end == "endless":
        time.sleep(900)
    return real(settings)

def main(argv):
    if end != "built":
        return train.main(argv[2:])
    settings = config.load(argv[2:])
    trainer = build.build(settings, init_distributed("cpu", settings.train.timeout))
    print(f"rank {trainer.world.rank} has {len(trainer.train_split)} samples", flush=True)

build.ensure = slow_ensure
run_rank(main)
"""


def words(tmp_path: Path, end: str) -> list[str]:
    (tmp_path / "worker.py").write_text(WORKER)
    shards = ["shards.source=digits", "shards.largest=60", f"shards.output={tmp_path / 'shards'}"]
    started = tmp_path / "building"
    return [
        str(tmp_path / "worker.py"),
        end,
        str(started),
        *PLAIN,
        *shards,
        "train.timeout=3",
        f"output={tmp_path / 'run'}",
    ]


def test_the_others_wait_for_a_long_build(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "--local-addr=127.0.0.1"]
    line = [sys.executable, *torchrun, *words(tmp_path, "built")]
    done = subprocess.run(line, env={**worker_env(), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    samples = {line.partition(" has ")[2] for line in done.stdout.splitlines() if " has " in line}
    assert done.stdout.count(" has ") == 2
    assert len(samples) == 1


def start(tmp_path: Path, end: str) -> list[subprocess.Popen[str]]:
    """Two ranks without torchrun, which would end the second one when the first is gone."""
    env = {**worker_env(), "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    line = [sys.executable, *words(tmp_path, end)]
    ranks = [env | {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    return [subprocess.Popen(line, env=rank, stderr=subprocess.PIPE, text=True) for rank in ranks]


@pytest.mark.parametrize(
    ("end", "codes", "told"),
    [
        ("refused", [2, 2], "error: the pictures are gone."),
        ("killed", [9, 1], "rank 1, while starting: another rank exited"),
        ("endless", [-signal.SIGTERM, -signal.SIGTERM], ""),
    ],
)
def test_the_others_notice_how_a_long_build_ends(tmp_path: Path, end: str, codes: list[int], told: str) -> None:
    ranks = start(tmp_path, end)
    try:
        if end == "endless":
            while not (tmp_path / "building").exists():
                time.sleep(0.1)
            time.sleep(4)  # the second rank waits by now
            for rank in ranks:
                rank.send_signal(signal.SIGTERM)
        said = [rank.communicate(timeout=150)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == codes, said
    assert told in said[1]
