"""A rank that hangs ends the job in bounded time with its place named; one that is slow is reported."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import PLAIN, ROOT, settings, wait_for_step
from ranks import free_port, on_ranks, worker_env

from pipeline.distributed.world import World
from pipeline.training.build import build

pytestmark = pytest.mark.dist


def test_a_frozen_rank_ends_the_others_with_rank_step_and_operation(small: str, output: Path) -> None:
    """Without torchrun, which would add its own half minute of patience with the frozen one."""
    output.mkdir()
    words = [*PLAIN, "train.epochs=500", "train.timeout=8", f"shards.url={small}", f"output={output}"]
    env = {
        **worker_env(),
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, "-m", "pipeline.train", *words]
    ranks = [
        subprocess.Popen(
            command,
            env={**env, "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        wait_for_step(output, 3)
        ranks[1].send_signal(signal.SIGSTOP)
        start = time.monotonic()
        said = ranks[0].communicate(timeout=120)[1]
        seconds = time.monotonic() - start
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert ranks[0].returncode == 1, said
    assert "rank 0, stage 1, epoch" in said
    assert "waited 8 s (train.timeout) for another rank" in said
    assert 6 < seconds < 60  # about ten on an idle machine


def slow_training(world: World, url: str, output: str) -> list[str]:
    """What the log said."""
    said: list[str] = []

    class Ears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("pipeline").addHandler(Ears())
    trainer = build(settings(url, Path(output), "train.epochs=1", base=PLAIN), world)
    trainer.step_sync.stop_source.close()
    if world.rank == 1:
        step = trainer.engine.step
        trainer.engine.step = lambda *args: (time.sleep(0.5), step(*args))[1]
    trainer.run()
    trainer.checkpoints.close()
    return said


def test_a_slow_rank_is_reported_and_waited_for(small: str, output: Path) -> None:
    output.mkdir()
    said, _ = on_ranks(2, slow_training, small, str(output))
    assert any("rank 1 is slow" in line for line in said), said
