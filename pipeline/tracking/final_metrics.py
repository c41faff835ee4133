"""Metrics that MLflow shows first, and the best and last values of a finished run.

The best epoch is the one with the highest accuracy on the validation split. Where there is none, the test set itself chooses.

MLflow draws one chart for each metric, in sections named by what stands before the slash. It sorts both by the alphabet, and has
no setting for another order. So the two curves people look at first have a section of their own, `accuracy`, before all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shards.config import VALIDATION

FRONT = {"accuracy/all": "test/top1", "accuracy/few": "test/few"}
ENDS = ("top1", "many", "medium", "few")
# What older runs logged, and what reports read, by the name it has now.
OLD_NAMES = {"final/best": "best/top1", "final/last": "last/top1", "final/mean_last10": "last/top1_mean10"}


def with_front(metrics: Mapping[str, float]) -> dict[str, float]:
    """An epoch's metrics, and the copies that MLflow shows first."""
    return {**metrics, **{name: metrics[key] for name, key in FRONT.items() if key in metrics}}


def chosen_on(metrics: Mapping[str, float]) -> str:
    """The split that chooses the best epoch."""
    return VALIDATION if f"{VALIDATION}/top1" in metrics else "test"


def best_epoch(history: Sequence[Mapping[str, float]]) -> int:
    """The evaluated epoch with the highest accuracy on the split that chooses, the first of equals."""
    key = f"{chosen_on(history[-1])}/top1"
    return max(range(len(history)), key=lambda epoch: history[epoch].get(key, -1.0))


def mean_of_last(history: Sequence[Mapping[str, float]], key: str = "test/top1") -> float:
    """The mean of the last ten epochs, as far as they were evaluated; the last one always is."""
    tail = [past[key] for past in history[-10:] if key in past]
    return sum(tail) / len(tail)


def best_and_last(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """best/top1, best/few, best/epoch, last/top1, ...: values on the test set."""
    best = best_epoch(history)
    out: dict[str, float] = {}
    for name, epoch in (("best", best), ("last", len(history) - 1)):
        found = {f"{name}/{key}": history[epoch][f"test/{key}"] for key in ENDS if f"test/{key}" in history[epoch]}
        out |= found | {f"{name}/epoch": float(epoch + 1)}
    return out | {"last/top1_mean10": mean_of_last(history)}


def with_old_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a run of any version, under the names that reports read."""
    return {**{old: metrics[new] for old, new in OLD_NAMES.items() if new in metrics}, **metrics}
