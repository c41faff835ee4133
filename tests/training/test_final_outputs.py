"""The summary of a run: the numbers people read first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pipeline.config import Config
from pipeline.training.final_outputs import summarise


def summary_of(history: list[dict[str, float]]) -> dict[str, Any]:
    manifest = SimpleNamespace(
        groups={"few": []}, splits={}, source="digits", hash="abc", bias=SimpleNamespace(rho=10.0, noise=0.5)
    )
    trainer: Any = SimpleNamespace(
        history=history,
        train_split=SimpleNamespace(manifest=manifest, url=""),
        world=SimpleNamespace(size=2),
        clock=SimpleNamespace(seconds=12.0),
        tracker=SimpleNamespace(run_id="run"),
    )
    return summarise(Config(), trainer)


def test_the_summary_takes_best_last_and_the_last_f1_from_the_history() -> None:
    history = [
        {"test/top1": 50.0, "test/few": 5.0, "clean/f1": 0.8, "time/images_per_second": 1.0},
        {"test/top1": 70.0, "test/few": 7.0, "clean/f1": 0.9, "time/images_per_second": 2.0},
        {"test/top1": 60.0, "test/few": 6.0, "time/images_per_second": 3.0},  # no cleaning in the last epoch
    ]
    summary = summary_of(history)
    assert (summary["best"], summary["best_epoch"], summary["last"]) == (70.0, 1, 60.0)
    assert summary["best_chosen_on"] == "test"
    assert summary["clean_f1"] == 0.9
    assert (summary["mean_last10"], summary["few"], summary["many"]) == (60.0, 6.0, None)
    assert (summary["epochs"], summary["ranks"], summary["images_per_second"]) == (3, 2, 3.0)


def test_epochs_without_an_evaluation_are_no_best_and_in_no_mean() -> None:
    history = [{"loss/total": 1.0} for _ in range(14)]
    for epoch, accuracy in ((0, 99.0), (3, 70.0), (7, 80.0), (11, 60.0), (13, 40.0)):
        history[epoch]["test/top1"] = accuracy
    del history[0]["test/top1"]
    summary = summary_of(history)
    assert (summary["best"], summary["best_epoch"], summary["last"], summary["epochs"]) == (80.0, 7, 40.0, 14)
    assert summary["mean_last10"] == 60.0  # of 80, 60 and 40, the evaluated ones of the last ten


def test_the_validation_part_chooses_the_best_epoch_and_has_numbers_of_its_own() -> None:
    history = [
        {"test/top1": 90.0, "validation/top1": 50.0, "validation/few": 1.0},
        {"test/top1": 70.0, "validation/top1": 80.0, "validation/few": 2.0},
        {"test/top1": 60.0, "validation/top1": 20.0, "validation/few": 3.0},
    ]
    summary = summary_of(history)
    assert (summary["best"], summary["best_epoch"], summary["best_chosen_on"]) == (70.0, 1, "validation")
    assert (summary["validation_best"], summary["validation_last"], summary["validation_few"]) == (80.0, 20.0, 3.0)
    assert summary["validation_mean_last10"] == 50.0
