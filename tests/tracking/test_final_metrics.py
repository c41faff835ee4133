"""Names of runs and data sets, the metrics MLflow shows first, best and last, and the table of classes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow_store import client_of
from PIL import Image
from trained import Trained

from launch import sweep
from pipeline.config import Config
from pipeline.tracking import journal
from pipeline.tracking.colors import PALETTE, free_color
from pipeline.tracking.final_metrics import best_and_last, with_front, with_old_names
from pipeline.training.build import _build_tracker
from pipeline.training.run_folder import default_folder, run_name
from shards.build import ensure
from shards.config import BuildConfig
from shards.names import imbalance, name_of_path, name_of_shards
from shards.reader import open_split, read_manifest

pytest_plugins = ["mlflow_fixtures"]


def pictures(root: Path) -> Path:
    for place, count in enumerate((24, 12, 6)):
        (root / f"class{place}").mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (16, 16), (80 * place, 5 * number, 9)).save(root / f"class{place}" / f"{number}.png")
    return root


@pytest.mark.parametrize(
    ("path", "name"), [("photos/flowers/", "flowers"), ("a/labels.csv", "labels"), ("flowers/train", "flowers")]
)
def test_a_data_set_is_called_as_its_folder_or_list(path: str, name: str) -> None:
    assert name_of_path(path) == name


def test_what_differs_stands_first_in_the_name_of_a_run() -> None:
    config = Config.model_validate({"seed": 3, "method": {"name": "ldam"}})
    assert run_name(config, "flowers") == "ldam seed=3 · flowers"
    varied = sweep._varied({"method.name": "ldam", "optim.lr": "0.1", "seed": "3"})
    assert varied == ["tracking.tags.varied=lr=0.1"]
    of_sweep = config.model_copy(update={"tracking": config.tracking.model_copy(update={"tags": {"varied": "lr=0.1"}})})
    assert run_name(of_sweep, "digits", " rho=10") == "ldam lr=0.1 seed=3 · digits rho=10"


def test_two_folders_have_two_output_folders_and_the_old_names_stay() -> None:
    own = Config.model_validate({"shards": {"source": "folder", "path": "photos/flowers"}})
    assert default_folder(own) == "runs/flowers_evenhand_seed0"
    assert default_folder(Config()) == "runs/digits_rho10_noise0.5_evenhand_seed0"


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(8.41935, "imbalance 8.4 : 1"), (1.0, "balanced"), (100.4, "imbalance 100 : 1"), (None, "a class is empty")],
)
def test_imbalance_in_words(ratio: float | None, text: str) -> None:
    assert imbalance(ratio) == text


def test_a_run_on_shards_of_a_folder_has_its_name_and_claims_nothing_of_digits(tmp_path: Path) -> None:
    said: list[str] = []
    source = BuildConfig(source="folder", path=str(pictures(tmp_path / "flowers")), output=str(tmp_path / "shards"))
    shards = ensure(source, said.append)
    assert any(re.search(r"3 classes, imbalance 4\.\d : 1\.$", line) for line in said)
    assert name_of_shards(shards, read_manifest(shards)) == "flowers"
    config = Config.model_validate({"shards": {"url": shards}, "tracking": {"uri": "", "system_metrics": False}})
    alone: Any = SimpleNamespace(is_main=True, size=1)
    _build_tracker(config, alone, tmp_path / "run", open_split(shards, "train"), None).finish("FINISHED")
    start, dataset, _ = (record for _, record in journal.read(tmp_path / "run" / "journal.jsonl"))
    params, tags = start["params"], start["tags"]
    assert start["name"] == "evenhand seed=0 · flowers"
    assert (tags["dataset"], tags["source"]) == ("flowers", "folder")
    assert not {"rho", "noise"} & tags.keys()
    shown = {key: params[f"shards.{key}"] for key in ("url", "source", "rho", "noise", "path")}
    assert shown == {"url": shards, "source": "folder", "rho": "1.0", "noise": "0.0", "path": source.path}
    assert dataset["facts"]["name"] == "flowers"


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_best_and_last_come_from_the_history() -> None:
    history = [{"test/top1": 50.0, "test/few": 5.0}, {"test/top1": 70.0, "test/few": 7.0}, {"test/top1": 60.0}]
    assert best_and_last(history) == {
        "best/top1": 70.0, "best/few": 7.0, "best/epoch": 2.0,
        "last/top1": 60.0, "last/epoch": 3.0, "last/top1_mean10": 60.0,
    }  # fmt: skip


def test_reports_read_runs_of_either_version() -> None:
    assert with_old_names({"best/top1": 2.0})["final/best"] == 2.0
    assert with_old_names({"final/best": 3.0}) == {"final/best": 3.0}


def test_the_section_that_mlflow_shows_first_is_ours() -> None:
    metrics = {"test/top1": 1.0, "test/few": 2.0, "best/top1": 1.0, "clean/f1": 0.5}
    shown = sorted(with_front(metrics))
    assert shown[:2] == ["accuracy/all", "accuracy/few"]
    assert with_front({"loss/ce": 1.0}) == {"loss/ce": 1.0}


def test_a_real_run_logs_its_ends_and_one_table_of_classes(trained: Trained) -> None:
    client = client_of(trained.uri)
    run = client.get_run(trained.run_id)
    metrics = run.data.metrics
    assert run.info.run_name == "prototypical seed=0 · digits rho=10 noise=0.5"
    assert sorted(key for key in metrics if not key.startswith("system/"))[:2] == ["accuracy/all", "accuracy/few"]
    assert (metrics["best/top1"], metrics["last/top1"]) == (trained.summary["best"], trained.summary["last"])
    assert metrics["best/epoch"] == trained.summary["best_epoch"] + 1
    assert '{"path": "per_class.json", "type": "table"}' in run.data.tags["mlflow.loggedArtifacts"]
    table = json.loads((trained.folder / "per_class.json").read_text())
    assert table["columns"][:3] == ["class", "name", "training_samples"]
    assert [row[1] for row in table["data"]] == [str(k) for k in range(10)]
    log = (trained.folder / "log.txt").read_text()
    assert f"MLflow: experiment tests at {trained.uri}" in log
    assert log.splitlines()[-1].endswith(f"/#/experiments/{run.info.experiment_id}/runs")
    assert "per_class.json" in {item.path for item in client.list_artifacts(trained.run_id)}
    assert not [key for key in metrics if "class" in key and key != "clean/empty_classes"]


def test_runs_of_one_method_have_colours_of_their_own() -> None:
    taken: list[str] = []
    for _ in PALETTE:
        taken.append(free_color(PALETTE[2], taken))
    assert taken[0] == PALETTE[2]
    assert len(set(taken)) == len(PALETTE)
