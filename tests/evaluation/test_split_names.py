"""Metrics carry the name of the split they were measured on."""

from __future__ import annotations

import json
from pathlib import Path

from trained import Trained, command

pytest_plugins = ["mlflow_fixtures"]


def test_an_evaluation_of_the_training_split_is_named_train(trained: Trained, tmp_path: Path) -> None:
    done = command("pipeline.evaluate", trained.folder, "split=train,test", f"out={tmp_path}")
    metrics = json.loads((tmp_path / "evaluation.json").read_text())["metrics"]
    assert {key.partition("/")[0] for key in metrics["train"]} == {"train"}
    assert {key.partition("/")[0] for key in metrics["test"]} == {"test"}
    assert f"on train: top1 {metrics['train']['train/top1']:.2f}  top5" in done.stdout
