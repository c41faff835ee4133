"""What killing the MLflow server in the middle of a run does to the step time, and metrics lost.

Claim checked: less than 1 % slower, and 0 lost after replay. One process, a real network's training steps, a real
`mlflow server`; every step logs twelve metrics (a real run logs them once an epoch). In each pair two runs, in changing order:
the server of one is killed (SIGKILL) between its two halves, the other is left alone. Compared is the second half over
the first, killed over unharmed: what else changes in the course of a run is in both. The claim holds if the 95 % interval of the
median ratio lies at or below 1.01. The server has a core to itself, so that its own work does not count. Quote wall times only
from an otherwise idle machine; this thread's CPU time per step is reported beside them.

    python benchmarks/tracking_outage.py [PAIRS]
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from record import write

from pipeline.config import ModelConfig, TrackingConfig
from pipeline.distributed.world import World
from pipeline.models.network import Network
from pipeline.tracking import tracker as tracking
from pipeline.tracking.__main__ import replay
from pipeline.tracking.tracker import start_tracker

PAIRS = int(sys.argv[1]) if len(sys.argv) > 1 else 30
STEPS, WARM = 80, 20
KEYS = [f"loss/part{k}" for k in range(12)]


def make_step() -> Callable[[], float]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = Network(ModelConfig(width=16), 10, World())
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9)
    images, labels = torch.randn(16, 3, 16, 16), torch.randint(0, 10, (16,))

    def step() -> float:
        loss = torch.nn.functional.cross_entropy(network(images)[1], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


@dataclass
class Server:
    """A real one that can be killed and comes back at the same address."""

    folder: Path
    cores: set[int]
    port: int = field(init=False)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        store = f"sqlite:///{self.folder / 'mlflow.db'}"
        words = ["--backend-store-uri", store, "--port", str(self.port), "--workers", "1"]
        quiet = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        log = (self.folder / "server.log").open("ab")
        command = [sys.executable, "-m", "mlflow", "server", *words]
        self.process = subprocess.Popen(
            command, stdout=log, stderr=log, env=quiet, start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, self.cores),
        )  # fmt: skip
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        raise SystemExit((self.folder / "server.log").read_text()[-2000:])

    def kill(self) -> None:
        os.killpg(self.process.pid, 9)  # its workers too
        self.process.wait()


@dataclass
class Halves:
    """Second half of a run over the first, by the median step."""

    wall: float
    cpu: float
    step_ms: float


def train(step: Callable[[], float], server: Server, folder: Path, kill: bool) -> Halves:
    tracker = start_tracker(
        TrackingConfig(uri=server.uri, experiment="outage", system_metrics=False), folder, folder.name, {}, {}
    )
    until = time.monotonic() + 30
    while tracker.run_id is None and time.monotonic() < until:
        time.sleep(0.1)
    assert tracker.run_id, "the server did not answer at the start"
    walls: list[float] = []
    cpus: list[float] = []
    number = 0
    for half in range(2):
        if half and kill:
            server.kill()
        wall, cpu = [], []
        for _ in range(WARM + STEPS):
            start, spent = time.perf_counter(), time.thread_time()
            loss = step()
            tracker.log(number, dict.fromkeys(KEYS, loss))
            wall.append(time.perf_counter() - start)
            cpu.append(time.thread_time() - spent)
            number += 1
        walls.append(statistics.median(wall[WARM:]))
        cpus.append(statistics.median(cpu[WARM:]))
    arrived = tracker.finish("FINISHED", wait=1.0 if kill else 30.0)
    assert arrived != kill
    if kill:
        server.start()
        replay(folder, server.uri)
    return Halves(walls[1] / walls[0], cpus[1] / cpus[0], 1000 * walls[0])


def count(uri: str) -> int:
    """Distinct (run, metric, step) on the server; stops if one is there twice."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("outage")
    assert experiment is not None
    total = 0
    for run in client.search_runs([experiment.experiment_id], max_results=1000):
        for key in KEYS:
            steps = [point.step for point in client.get_metric_history(run.info.run_id, key)]
            assert len(steps) == len(set(steps)), "a point was logged twice"
            total += len(steps)
    return total


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % interval of the median, by drawing the pairs anew ten thousand times."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return medians[250], medians[-251]


def verdict(ratios: list[float], lost: int) -> str:
    """Only an interval that clears the limit decides."""
    low, high = interval(ratios)
    if lost or low > 1.01:
        return "fails"
    return "holds" if high <= 1.01 else "nothing lost; time undecided: the interval contains 1.01"


def main() -> None:
    mine, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {mine})  # threads started later stay there too
    tracking.MAX_PAUSE = 2.0  # a dead server is asked again more often than in earnest
    step = make_step()
    pairs: list[tuple[Halves, Halves]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        server = Server(folder, set(others) or {mine})
        try:
            train(step, server, folder / "warm-up", False)
            for number in range(PAIRS):
                order = (True, False) if number % 2 else (False, True)
                found = {
                    kill: train(step, server, folder / f"{number}-{'killed' if kill else 'unharmed'}", kill)
                    for kill in order
                }
                pairs.append((found[True], found[False]))
            expected = (2 * PAIRS + 1) * 2 * (WARM + STEPS) * len(KEYS)
            lost = expected - count(server.uri)
        finally:
            server.kill()
    wall = [killed.wall / unharmed.wall for killed, unharmed in pairs]
    cpu = [killed.cpu / unharmed.cpu for killed, unharmed in pairs]
    os.sched_setaffinity(0, {mine, *others})
    result = {
        "claim": "killing the server makes steps at most 1.01 times as long; 0 metrics lost after replay",
        "verdict": verdict(wall, lost),
        "wall_ratio_median": statistics.median(wall),
        "wall_ratio_median_95": interval(wall),
        "wall_ratio_quartiles": statistics.quantiles(wall, n=4)[::2],
        "cpu_ratio_median": statistics.median(cpu),
        "cpu_ratio_median_95": interval(cpu),
        "cpu_ratio_quartiles": statistics.quantiles(cpu, n=4)[::2],
        "step_ms_median": statistics.median(half.step_ms for pair in pairs for half in pair),
        "metrics": expected,
        "metrics_lost": lost,
        "pairs": PAIRS,
        "steps_per_half": STEPS,
    }
    write(result, "torch", "mlflow")


if __name__ == "__main__":
    main()
