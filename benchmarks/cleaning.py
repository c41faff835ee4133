"""Cost of cleaning: memory and time of prototypes, refinement and the neighbour rule at the size of mini-WebVision.

Claims checked: N=66 000, K=50, D=50 with the neighbour rule takes less than 200 MB beyond the embeddings; without the rule
time is linear in N; without the forward pass it is below 1 % of an epoch.   python benchmarks/cleaning.py
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
from record import write
from torch.nn.functional import normalize

from pipeline.distributed.world import World
from pipeline.methods.options import PrototypicalOptions
from pipeline.methods.parts.cleaning import refine_all
from pipeline.methods.parts.nearest_neighbors import nearest_neighbors
from pipeline.methods.parts.prototypes import class_prototypes

K, D = 50, 50
OPTIONS = PrototypicalOptions(relabel_weight="half")
BLOCK = OPTIONS.neighbour_block


def embeddings(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return normalize(torch.randn(n, D), dim=1), torch.randint(0, K, (n,))


def clean(z: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    prototypes, _ = class_prototypes(z, given, torch.ones(len(z)), torch.zeros(K, D), World())
    return refine_all(z, given, prototypes, 0.05, OPTIONS).label


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def neighbour_memory(n: int) -> dict[str, float]:
    """In a process of its own: peak memory with embeddings alone, then with cleaning and the neighbour rule."""
    z, given = embeddings(n)
    clean(z[:2000], given[:2000])
    nearest_neighbors(z[:2000], z[:2000], 1, torch.arange(2000), BLOCK, 8 * BLOCK)
    before = peak_mb()
    start = time.perf_counter()
    label = clean(z, given)
    nearest = nearest_neighbors(z, z, 1, torch.arange(n), BLOCK, 8 * BLOCK)[1][:, 0]
    (label[nearest] != label).sum()
    return {"extra_mb": peak_mb() - before, "seconds": time.perf_counter() - start}


def seconds(n: int, repeats: int = 15) -> list[float]:
    z, given = embeddings(n)
    clean(z, given)
    out = []
    for _ in range(repeats):
        start = time.perf_counter()
        clean(z, given)
        out.append(time.perf_counter() - start)
    return out


def share_of_epoch() -> dict[str, float]:
    """Prototypes, cleaning (neighbour rule included) and their metrics, without the survey's forward pass, on digits."""
    from pipeline import config as configuration
    from pipeline.training.build import build

    with tempfile.TemporaryDirectory() as folder:
        words = ["train.epochs=8", "method.cleaning_start=0.25", "tracking.uri=", "tracking.system_metrics=false"]
        config = configuration.load([*words, f"output={folder}/run", f"shards.output={folder}/shards"])
        trainer = build(config, World())
        spent = {"cleaning": 0.0, "epoch": 0.0}
        survey, believe, end, epoch = trainer._survey, trainer._start_epoch, trainer.method.end_epoch, trainer._epoch
        in_survey = [0.0]

        def timed(function: Any, total: str) -> Any:
            def call(*args: Any) -> Any:
                start, before = time.perf_counter(), in_survey[0]
                out = function(*args)
                if trainer.method.cleaning_now:
                    surveyed = in_survey[0] - before if total == "cleaning" else 0.0
                    spent[total] += time.perf_counter() - start - surveyed
                return out

            return call

        def surveyed() -> Any:
            start = time.perf_counter()
            out = survey()
            in_survey[0] += time.perf_counter() - start
            return out

        trainer._survey = surveyed
        trainer._start_epoch = timed(believe, "cleaning")
        trainer.method.end_epoch = timed(end, "cleaning")

        def timed_epoch(stage: Any) -> Any:
            start = time.perf_counter()
            yield from epoch(stage)
            spent["epoch"] += (time.perf_counter() - start) * trainer.method.cleaning_now

        trainer._epoch = timed_epoch
        trainer.run()
        trainer.checkpoints.close()
    return {**spent, "share": spent["cleaning"] / spent["epoch"]}


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["memory"]:
        print(json.dumps(neighbour_memory(66_000)))
        return
    memory = json.loads(
        subprocess.run([sys.executable, __file__, "memory"], check=True, capture_output=True, text=True).stdout
    )
    sizes = (66_000, 132_000, 264_000)
    runs: dict[int, list[float]] = {n: [] for n in sizes}
    for _ in range(5):  # interleaved, because the machine is noisy
        for n in sizes:
            runs[n] += seconds(n, 5)
    median = {n: statistics.median(times) for n, times in runs.items()}
    result = {
        "what": f"K={K}, D={D}, one thread",
        "neighbour_rule_66000": memory,
        "median_seconds": median,
        "quartiles": {n: statistics.quantiles(times, n=4) for n, times in runs.items()},
        "doubling": [median[b] / median[a] for a, b in pairwise(sizes)],
        "digits": share_of_epoch(),
    }
    write(result, "torch")


if __name__ == "__main__":
    main()
