"""The long drills: twenty kills at random moments; a judge from outside, killing at file events of a save."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs import (
    PLAIN,
    ROOT,
    Job,
    differences,
    gone_within,
    lost_or_repeated,
    samples,
    settings,
    truth,
    wait_for_step,
)
from ranks import on_ranks
from test_stop_anywhere import leg

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(3600)]
KILLS = 20
WORDS = [*PLAIN, "data.size=16", "train.epochs=60", "checkpoint.every_steps=3", "checkpoint.keep=2"]


def test_twenty_kills_at_random_moments(small: str, tmp_path: Path, count: int) -> None:
    """Ranks, the lead, the launcher, the platform's SIGTERM; while starting, training or saving."""
    calm, output = tmp_path / "calm", tmp_path / "run"
    calm.mkdir()
    on_ranks(2, leg, settings(small, calm, base=WORDS), 0)
    words = [*WORDS, f"shards.url={small}", f"output={output}"]
    seed = int(os.environ.get("DRILL_SEED", time.time_ns() % 10**6))
    print(f"DRILL_SEED={seed}")
    chance = random.Random(seed)
    done: list[str] = []
    job: Job | None = None
    while len(done) < KILLS:
        fresh = job is None
        job = job or Job(words, ["--nproc-per-node=2", "--monitor-interval=0.1", f"--max-restarts={KILLS}"])
        if fresh and chance.random() < 0.25:
            time.sleep(chance.uniform(0.2, 5.0))  # perhaps before training has begun
        else:
            file = output / "samples-rank0.jsonl"
            before = file.read_bytes().count(b"\n") if file.exists() else 0
            wait_for_step(output, before + chance.randint(1, 6), job=job)
            time.sleep(chance.uniform(0, 0.2))
        kind = chance.choice(["rank 0", "rank 1", "launcher", "SIGTERM"])
        ranks = job.ranks()
        if kind.startswith("rank") and len(ranks) == 2:
            os.kill(ranks[int(kind[-1])], signal.SIGKILL)
            assert gone_within(60, ranks)  # and torchrun starts both again
        elif kind == "SIGTERM":
            job.process.send_signal(signal.SIGTERM)
            assert job.wait() in (75, -signal.SIGTERM), job.said  # the latter: before Python itself was up
            job = None
        else:
            kind = "launcher"
            os.kill(job.process.pid, signal.SIGKILL)
            job.process.wait()
            assert gone_within(5, ranks)
            job = None
        done.append(kind)
    last = job or Job(words, ["--nproc-per-node=2"])
    assert last.wait(1200) == 0, last.said
    print(f"{len(done)} kills: {', '.join(done)}")
    assert lost_or_repeated(output, count) == []
    assert samples(output) == samples(calm)
    assert differences(truth(calm), truth(output)) == []


FINGERPRINT = """
import json, pathlib, sys
found = pathlib.Path(sys.argv[1], 'checkpoints').glob('step-*')
newest = max(found, key=lambda p: (p.name[:14], len(p.name), p.name))
files = json.loads((newest / 'manifest.json').read_text())['files']
print(newest.name[:14], files['tensors.safetensors']['sha256'])
"""


def test_killed_at_every_file_event_of_a_save(small: str, tmp_path: Path) -> None:
    """ckpt-chaos runs the unmodified command, kills it at file events or tears files in half, and resumes."""
    assert find_spec("ckpt_chaos"), "pip install ckpt-chaos"
    points = os.environ.get("CHAOS_POINTS", "40")
    result = f"{sys.executable} -c {shlex.quote(FINGERPRINT)} {{out}}"
    words = [*PLAIN, "train.epochs=1", "checkpoint.every_steps=2", f"shards.url={small}", "output={out}"]
    judge = [sys.executable, "-m", "ckpt_chaos", "run", "--max-points", points, "--timeout", "600"]
    judge += ["--work", str(tmp_path / "chaos"), "--result-cmd", result, "--"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*judge, sys.executable, "-m", "pipeline.train", *words],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    print(ended.stdout[-6000:])
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert "HARD_FAIL" not in ended.stdout.replace("0 HARD_FAIL", "")
