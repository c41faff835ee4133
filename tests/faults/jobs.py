"""Tiny real training runs to interrupt, damage and compare.

In-process runs (`train`) have one rank and are stopped by a stop_source at a chosen beat; `Job` is the real command
under the real entry and torchrun, to be killed from outside.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeline import config as configuration
from pipeline.checkpoints import run_lock
from pipeline.checkpoints.checkpointer import Loaded, read_checkpoint
from pipeline.config import Config
from pipeline.distributed.step_sync import TrainingStopped
from pipeline.distributed.world import World
from pipeline.training.build import build
from pipeline.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
TINY = [
    "data.batch=52", "data.size=8", "data.padding=1", "data.threads=1", "data.prefetch=1", "model.width=4",
    "model.embedding=8", "train.epochs=2",
    "train.sample_log=true", "tracking.uri=", "tracking.log_model=false", "tracking.system_metrics=false",
    "train.timeout=60", "method.name=prototypical", "method.warmup_steps=3", "method.cleaning_start=0.5",
]  # fmt: skip
PLAIN = [word for word in TINY if not word.startswith("method.")] + ["method.name=cross_entropy"]


def settings(shards: str, output: Path, *words: str, base: list[str] = TINY) -> Config:
    return configuration.load([*base, f"shards.url={shards}", f"output={output}", *words])


@dataclass
class Counting:
    """Asks for a stop at the n-th beat, and counts them."""

    stop_at: int = 0
    beats: int = 0

    @property
    def reason(self) -> str | None:
        self.beats += 1
        return "the test wants it" if self.beats == self.stop_at else None


def make(config: Config) -> Trainer:
    """A trainer as the command makes it, without its hold on the process' signals."""
    Path(config.output).mkdir(parents=True, exist_ok=True)
    trainer = build(config, World())
    trainer.step_sync.stop_source.close()
    return trainer


def train(config: Config, stop_at: int = 0, prepare: Callable[[Trainer], object] | None = None) -> tuple[Trainer, int]:
    """Train to the end or to the given beat; the trainer and the beats it took."""
    trainer = make(config)
    stop_source = Counting(stop_at)
    trainer.step_sync.stop_source = stop_source
    if prepare:
        prepare(trainer)
    try:
        trainer.run()
    except TrainingStopped:
        assert stop_at
    finally:
        trainer.checkpoints.close()
        let_go()
    return trainer, stop_source.beats


def let_go() -> None:
    """Give up the output folder, as the end of a process would."""
    while run_lock._held:
        run_lock._held.pop().close()


# -- comparing -------------------------------------------------------------------------------------


def truth(output: Path) -> dict[str, Any]:
    """What must be equal between a disturbed and an undisturbed run: weights, beliefs, momentum, metrics."""
    tree = read_checkpoint(output).tree
    history = [{key: value for key, value in past.items() if not key.startswith("time/")} for past in tree["history"]]
    return {
        "method": tree["method"],
        "engine": tree["engine"],
        "position": tree["position"],
        "history": history,
    }


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two trees differ in any bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() | other.keys()
        return [d for key in sorted(keys) for d in differences(one.get(key), other.get(key), f"{place}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [d for i, (a, b) in enumerate(zip(one, other)) for d in differences(a, b, f"{place}/{i}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = (
            one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()
        )
        return [] if alike else [place]
    return [] if repr(one) == repr(other) else [f"{place}: {one!r} {other!r}"]


Step = tuple[int, int, int, int]


def samples(output: Path) -> dict[Step, list[int]]:
    """Samples by (stage, epoch, pass, step), of all ranks together.

    A step that was done again after a crash must show the same samples again on the ranks it ran on; the last
    time counts.
    """
    steps: dict[Step, dict[str, list[int]]] = {}
    for file in sorted(output.glob("samples-rank*.jsonl")):
        for line in file.read_text().splitlines():
            *at, seen = json.loads(line)
            steps.setdefault(tuple(at), {})[file.name] = seen
    return {at: [i for seen in ranks.values() for i in seen] for at, ranks in sorted(steps.items())}


def lost_or_repeated(output: Path, n: int) -> list[str]:
    """What is wrong with the epochs of the main stage, where every sample is seen exactly once in each."""
    epochs: dict[tuple[int, int], list[int]] = {}
    for (stage, epoch, _, _), seen in samples(output).items():
        epochs.setdefault((stage, epoch), []).extend(seen)
    last = max(stage for stage, _ in epochs)
    return [
        f"{at}: {len(seen)} of {n}" for at, seen in epochs.items() if at[0] == last and sorted(seen) != list(range(n))
    ]


# -- real commands ---------------------------------------------------------------------------------


JOBS: list[Job] = []  # whatever a test forgets is ended with it


@dataclass
class Job:
    """`python -m launch.entry` (or another module) in a process of its own."""

    words: list[str]
    options: list[str] = field(default_factory=list)
    module: str = "launch.entry"
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **self.env}
        words = [*self.options, "--", *self.words] if self.options else self.words
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, *words],
            env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.said = ""
        JOBS.append(self)

    def kill(self) -> None:
        """With everything it started."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.returncode is None:
            self.said += self.process.communicate()[1]

    def wait(self, timeout: float = 300) -> int:
        """The exit code; what it said is in `said`."""
        try:
            self.said += self.process.communicate(timeout=timeout)[1]
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout} s:\n{self.said[-3000:]}") from None
        return self.process.returncode

    def ranks(self) -> list[int]:
        """Process ids of the workers, in order of rank."""
        found = {}
        for pid in descendants(self.process.pid):
            env = environment(pid)
            if "RANK" in env and "pipeline.train" in command(pid):
                found[int(env["RANK"])] = pid
        return [found[rank] for rank in sorted(found)]

    def torchrun(self) -> int:
        return next(pid for pid in descendants(self.process.pid) if "torch.distributed.run" in command(pid))


def wait_for_step(output: Path, steps: int, timeout: float = 300, job: Job | None = None) -> None:
    """Until the lead has begun so many steps (counted over restarts)."""
    file = output / "samples-rank0.jsonl"
    until = time.monotonic() + timeout
    while not file.exists() or file.read_bytes().count(b"\n") < steps:
        assert time.monotonic() < until, f"no step {steps}"
        assert job is None or job.process.poll() is None, job.wait() and job.said
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    try:
        children = [
            int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()
        ]
    except OSError:
        return []
    return children + [grandchild for child in children for grandchild in descendants(child)]


def environment(pid: int) -> dict[str, str]:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def gone_within(seconds: float, pids: list[int]) -> bool:
    until = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def newest(output: Path) -> Loaded:
    return read_checkpoint(output)
