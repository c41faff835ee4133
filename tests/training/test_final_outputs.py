"""The summary of a run: the numbers people read first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pipeline.config import Config
from pipeline.training.final_outputs import summarise


def test_the_summary_takes_best_last_and_the_last_f1_from_the_history() -> None:
    history = [
        {"test/top1": 50.0, "test/few": 5.0, "clean/f1": 0.8, "time/images_per_second": 1.0},
        {"test/top1": 70.0, "test/few": 7.0, "clean/f1": 0.9, "time/images_per_second": 2.0},
        {"test/top1": 60.0, "test/few": 6.0, "time/images_per_second": 3.0},  # no cleaning in the last epoch
    ]
    manifest = SimpleNamespace(source="digits", hash="abc", bias=SimpleNamespace(rho=10.0, noise=0.5))
    trainer: Any = SimpleNamespace(
        history=history,
        train_split=SimpleNamespace(manifest=manifest),
        world=SimpleNamespace(size=2),
        clock=SimpleNamespace(seconds=12.0),
        tracker=SimpleNamespace(run_id="run"),
    )
    summary = summarise(Config(), trainer)
    assert (summary["best"], summary["best_epoch"], summary["last"]) == (70.0, 1, 60.0)
    assert summary["clean_f1"] == 0.9
    assert (summary["mean_last10"], summary["few"], summary["many"]) == (60.0, 6.0, None)
    assert (summary["epochs"], summary["ranks"], summary["images_per_second"]) == (3, 2, 3.0)
