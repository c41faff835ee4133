"""Step time with a dead MLflow server over step time with a live one, and metrics lost.

Claim checked: at most 1.01, and 0 lost after replay. One process, a real network's training steps, a real
`mlflow server`; blocks of steps alternate between a tracker whose server answers and one whose server is gone,
and every step logs twelve metrics (a real run logs them once an epoch). The steps are alike, so block medians
are compared in pairs; the claim holds if the 95 % interval of the median ratio lies at or below 1.01. Starting
and ending a tracker are outside the timing. Quote the wall-time ratio only from an otherwise idle machine; the
ratio of this thread's own CPU time per step is reported beside it.

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
from pathlib import Path

import torch
from record import write

from pipeline import tracking
from pipeline.config import ModelConfig, TrackingConfig
from pipeline.models.network import Network
from pipeline.tracking import Tracker

PAIRS = int(sys.argv[1]) if len(sys.argv) > 1 else 30
STEPS, WARM = 60, 10
KEYS = [f"loss/part{k}" for k in range(12)]


def make_step() -> Callable[[], float]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = Network(ModelConfig(width=16), classes=10)
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9)
    images, labels = torch.randn(16, 3, 16, 16), torch.randint(0, 10, (16,))

    def step() -> float:
        loss = torch.nn.functional.cross_entropy(network(images)[1], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def start_server(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    words = [
        "--backend-store-uri",
        f"sqlite:///{folder / 'mlflow.db'}",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    quiet = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    log = (folder / "server.log").open("wb")
    process = subprocess.Popen([sys.executable, "-m", "mlflow", "server", *words], stdout=log, stderr=log, env=quiet)
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"{uri}/health", timeout=2):
                return process, uri
        except OSError:
            time.sleep(0.2)
    raise SystemExit((folder / "server.log").read_text()[-2000:])


def block(step: Callable[[], float], uri: str, folder: Path) -> tuple[float, float, bool]:
    """(wall seconds, CPU seconds) of the median step, and whether everything arrived at once."""
    config = TrackingConfig(uri=uri, experiment="outage", system_metrics=False)
    tracker = Tracker(config, folder, folder.name, {}, {})
    time.sleep(1.0)  # the shipper's first attempt
    wall, cpu = [], []
    for number in range(WARM + STEPS):
        start, spent = time.perf_counter(), time.thread_time()
        loss = step()
        tracker.log(number, dict.fromkeys(KEYS, loss))
        wall.append(time.perf_counter() - start)
        cpu.append(time.thread_time() - spent)
    arrived = tracker.finish("FINISHED", wait=30.0 if tracker.run_id else 5.0)
    return statistics.median(wall[WARM:]), statistics.median(cpu[WARM:]), arrived


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
    step = make_step()
    tracking.LONGEST_PAUSE = 2.0  # a dead server is asked again more often than in earnest
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        server, uri = start_server(folder)
        try:
            dead = "http://127.0.0.1:9"  # the discard port: nobody listens
            block(step, uri, folder / "warm-up")
            pairs = []
            for number in range(PAIRS):
                arms = [("alive", uri), ("dead", dead)]
                found = {
                    name: block(step, at, folder / f"{name}{number}") for name, at in arms[:: 1 - 2 * (number % 2)]
                }
                assert found["alive"][2]
                assert not found["dead"][2]
                pairs.append((found["dead"][:2], found["alive"][:2]))
                tracking.replay(folder / f"dead{number}", uri)
            expected = (2 * PAIRS + 1) * (WARM + STEPS) * len(KEYS)
            lost = expected - count(uri)
        finally:
            server.terminate()
            server.wait()
    wall = [dead[0] / alive[0] for dead, alive in pairs]
    cpu = [dead[1] / alive[1] for dead, alive in pairs]
    result = {
        "claim": "step time dead / alive <= 1.01, 0 metrics lost after replay",
        "verdict": verdict(wall, lost),
        "wall_ratio_median": statistics.median(wall),
        "wall_ratio_median_95": interval(wall),
        "wall_ratio_quartiles": statistics.quantiles(wall, n=4)[::2],
        "cpu_ratio_median": statistics.median(cpu),
        "cpu_ratio_median_95": interval(cpu),
        "cpu_ratio_quartiles": statistics.quantiles(cpu, n=4)[::2],
        "step_ms_alive_median": 1000 * statistics.median(alive[0] for _, alive in pairs),
        "metrics": expected,
        "metrics_lost": lost,
        "pairs": PAIRS,
        "steps_per_block": STEPS,
    }
    write(result, "torch", "mlflow")


if __name__ == "__main__":
    main()
