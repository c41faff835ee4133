"""A training on shards with a validation part: measured like the test set, and it chooses the best epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import on_ranks

from pipeline import config as configuration
from pipeline import train
from pipeline.checkpoints.checkpointer import Checkpointer
from pipeline.distributed.world import World
from pipeline.training.build import build
from shards.build import ensure
from shards.config import BuildConfig

QUICK = ("method.name=cross_entropy", "train.epochs=3", "data.batch=128", "data.threads=1", "model.norm=group",
         "optim.lr=0.05", "tracking.uri=", "tracking.system_metrics=false", "tracking.log_model=false")  # fmt: skip


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return ensure(BuildConfig(output=str(tmp_path_factory.mktemp("shards") / "digits"), validation=0.2))


def words(shards: str, folder: Path) -> list[str]:
    return [f"shards.url={shards}", f"output={folder}", *QUICK]


def test_validation_is_logged_beside_the_test_set_and_chooses_the_best_epoch(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[bool] = []
    save = Checkpointer.save
    monkeypatch.setattr(Checkpointer, "save", lambda *a, **k: (saved.append(k.get("best", False)), save(*a, **k))[1])
    accuracies = iter([30.0, 60.0, 50.0])  # on validation; on the test set every epoch is better than the one before
    from pipeline.training.trainer import Trainer

    measure = Trainer.evaluate_all

    def fixed(self: Trainer) -> Any:
        found = measure(self)
        value = next(accuracies, None)
        if value is not None:
            assert found["validation"].metrics.keys() >= {f"validation/{k}" for k in ("top1", "many", "medium", "few")}
            assert found["validation"].total.tolist() == [27] * 10
            found["validation"].metrics["validation/top1"] = value
            found["test"].metrics["test/top1"] = 100 - value if value == 30.0 else value
        return found

    monkeypatch.setattr(Trainer, "evaluate_all", fixed)
    assert train.main(words(shards, tmp_path)) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["best"], summary["best_epoch"], summary["best_chosen_on"]) == (60.0, 1, "validation")
    assert (summary["validation_best"], summary["validation_last"], summary["last"]) == (60.0, 50.0, 50.0)
    assert saved[:3] == [True, True, False]
    assert "best 60.00 (epoch 2, chosen on the validation part)" in (tmp_path / "log.txt").read_text()


def measured(world: World, shards: str, folder: str) -> dict[str, np.ndarray]:
    trainer = build(configuration.load(words(shards, Path(folder))), world)
    return {name: found.confusion for name, found in trainer.evaluate_all().items()}


@pytest.mark.dist
def test_two_ranks_measure_what_one_measures(shards: str, tmp_path: Path) -> None:
    (alone,) = on_ranks(1, measured, shards, str(tmp_path / "1"))
    for part in on_ranks(2, measured, shards, str(tmp_path / "2")):
        assert part.keys() == alone.keys() == {"validation", "test"}
        for name in part:
            assert (part[name] == alone[name]).all()
    assert alone["validation"].sum() == 270


def test_a_run_that_evaluates_every_other_epoch_keeps_the_best_of_those(shards: str, tmp_path: Path) -> None:
    assert train.main([*words(shards, tmp_path), "train.epochs=5", "train.evaluate_every=2"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    metrics = [line["values"] for line in lines if line["kind"] == "metrics" and "train/epoch" in line["values"]]
    assert ["test/top1" in found for found in metrics] == [False, True, False, True, True]
    assert all("loss/total" in found for found in metrics)
    summary = json.loads((tmp_path / "summary.json").read_text())
    chosen = {n: found["validation/top1"] for n, found in enumerate(metrics) if "validation/top1" in found}
    assert summary["best_epoch"] == max(chosen, key=lambda n: chosen[n])
    assert summary["mean_last10"] == pytest.approx(sum(metrics[n]["test/top1"] for n in chosen) / 3)
