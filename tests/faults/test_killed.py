"""The real command under the real launcher: ranks and launcher killed or asked to stop, and started again.

All of it is one training on two ranks, disturbed six times; in the end it must equal one that was left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
from pathlib import Path

import pytest
from jobs import (
    PLAIN,
    Job,
    differences,
    gone_within,
    lost_or_repeated,
    newest,
    samples,
    settings,
    truth,
    wait_for_step,
)
from ranks import on_ranks
from test_stop_anywhere import leg

from pipeline.config import Config

pytest_plugins = ["mlflow_fixtures"]
pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
TWO = ["--nproc-per-node=2", "--monitor-interval=0.1"]
WORDS = [*PLAIN, "data.size=16", "train.epochs=10", "checkpoint.every_steps=2", "checkpoint.every_epochs=0"]


@pytest.fixture(scope="module")
def calm(small: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("calm")
    on_ranks(2, leg, settings(small, output, base=WORDS), 0)
    return output


def test_whatever_is_killed_the_run_ends_as_if_nothing_had_happened(
    small: str, output: Path, calm: Path, count: int
) -> None:
    words = [*WORDS, f"shards.url={small}", f"output={output}"]

    # A rank is killed: torchrun starts both again in place, and the launcher goes on waiting.
    job = Job(words, [*TWO, "--max-restarts=1"])
    wait_for_step(output, 5, job=job)
    first = job.ranks()
    os.kill(first[1], signal.SIGKILL)
    assert gone_within(10, first)
    wait_for_step(output, 12, job=job)
    second = job.ranks()
    assert len(second) == 2
    assert not set(first) & set(second)

    # torchrun itself is killed: no rank is left behind to train on in secret.
    os.kill(job.torchrun(), signal.SIGKILL)
    assert gone_within(5, second)
    assert job.wait() == 1
    assert "The same command goes on from the last checkpoint" in job.said

    # The platform asks for the machine back, twice, as impatient ones do.
    job = Job(words, TWO)
    seen = len((output / "samples-rank0.jsonl").read_text().splitlines())
    wait_for_step(output, seen + 3, job=job)
    ranks = job.ranks()
    job.process.send_signal(signal.SIGTERM)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 75, job.said
    assert "SIGTERM received" in job.said
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    stopped = newest(output)
    assert stopped.step == max(int(name.name[5:14]) for name in (output / "checkpoints").glob("step-*"))
    lines = [(output / f"samples-rank{rank}.jsonl").read_text().splitlines()[-1] for rank in (0, 1)]
    assert len({tuple(json.loads(line)[:4]) for line in lines}) == 1  # both ranks stopped at the same step
    assert stopped.tree["position"]["global_step"] == stopped.step

    # Left alone, it comes to its end.
    job = Job(words, TWO)
    assert job.wait() == 0, job.said
    assert differences(truth(calm), truth(output)) == []
    assert samples(output) == samples(calm)
    assert lost_or_repeated(output, count) == []
    assert json.loads((output / "summary.json").read_text())["epochs"] == 10


def test_a_stop_file_a_deadline_and_signals_end_a_plain_run_with_75(small: str, output: Path, database: Path) -> None:
    """One rank without torchrun: the exit code is that of the process itself. MLflow hears of it."""
    tracked = f"tracking.uri=sqlite:///{database}"

    def runs() -> list[tuple[str]]:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            return connection.execute("select status from runs").fetchall()

    config: Config = settings(small, output, base=WORDS)
    words = [*WORDS, f"shards.url={small}", f"output={config.output}", "train.epochs=60"]
    output.mkdir()
    (output / "stop").touch()
    job = Job([*words, tracked, "checkpoint.every_steps=1"], module="pipeline.train")
    assert job.wait() == 75, job.said
    assert "remove it to go on" in job.said
    assert runs() == [("KILLED",)]
    (output / "stop").unlink()
    steps = newest(output).step

    job = Job([*words, "checkpoint.every_steps=1"], module="pipeline.train")  # saving all the time when it is stopped
    wait_for_step(output, steps + 4, job=job)
    job.process.send_signal(signal.SIGUSR1)
    assert job.wait() == 75, job.said
    assert newest(output).rejected == []
    assert newest(output).step >= steps + 3

    job = Job([*words, "train.deadline_minutes=0.0001"], module="pipeline.train")
    assert job.wait() == 75, job.said
    assert "deadline" in job.said
