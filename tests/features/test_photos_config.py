"""configs/photos.yaml as a stranger uses it: a folder of photographs, real ImageNet weights, commands."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images
from trained import command


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Crops of two photographs and of nothing but colours; three flowers lie in the folder of temples."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("photos")
    temple, flower = load_sample_images().images
    grey = rng.integers(0, 256, (4, 6, 3), dtype=np.uint8)
    for name, source in (("temple", temple), ("flower", flower), ("colours", grey)):
        (folder / name).mkdir()
        for number in range(12):
            whole = Image.fromarray(source)
            if name != "colours":
                left, top = (int(rng.integers(0, edge // 3)) for edge in whole.size)
                whole = whole.crop((left, top, left + whole.width * 2 // 3, top + whole.height * 2 // 3))
            elsewhere = name == "flower" and number < 3
            target = folder / ("temple" if elsewhere else name) / f"{name}{number}.jpg"
            whole.resize((160, 120), Image.Resampling.BICUBIC).save(target, quality=90 - number)
    return folder


def test_from_a_folder_to_a_model_and_the_wrong_labels(pictures: Path, tmp_path: Path) -> None:
    words = ("--config", "photos", "tracking.uri=", "output=runs/mine", "shards.output=data/mine")
    place = ("shards.source=folder", f"shards.path={pictures}", "shards.validation_fraction=0.2")
    command("pipeline.train", *words, *place, cwd=tmp_path)
    summary = json.loads((tmp_path / "runs/mine/summary.json").read_text())
    assert summary["method"] == "latent"
    assert summary["last"] > 60  # some held-out labels are wrong, too
    told = command("pipeline.predict", "runs/mine", pictures / "flower", "jsonl=true", cwd=tmp_path).stdout
    answers = [json.loads(line)["label"] for line in told.splitlines()]
    assert answers == ["flower"] * 9
    command("pipeline.audit", "runs/mine", "simulations=2", cwd=tmp_path)
    audit = tmp_path / "runs/mine/audit"
    table = parquet.read_table(audit / "audit.parquet").to_pydict()
    labels = json.loads((audit / "audit.json").read_text())["labels"]
    assert labels["judged"]
    assert labels["low"] <= labels["wrong"] <= labels["high"]
    suspicious = [key for key, doubted in zip(table["key"], table["suspicious"]) if doubted]
    assert set(suspicious) == {key for key in table["key"] if key.startswith("temple/flower")} != set()
    assert_decisions_are_applied_and_remembered(tmp_path, table, suspicious)


def assert_decisions_are_applied_and_remembered(
    folder: Path, table: dict[str, list[Any]], suspicious: list[str]
) -> None:
    """One label is right after all, the other suspicious ones are corrected, another sample is dropped."""
    audit, right, other = folder / "runs/mine/audit", suspicious[0], table["key"].index("flower/flower7.jpg")
    rows = [[table["index"][table["key"].index(key)], key, "temple", "relabel", "flower"] for key in suspicious[1:]]
    rows += [[0, right, "temple", "keep", ""], [other, "flower/flower7.jpg", "flower", "drop", ""]]
    with (audit / "decisions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["index", "key", "given", "decision", "label"], *rows])
    words = ("simulations=2", "apply=decisions,drop-leaks", "export=cleanlab")
    told = command("pipeline.audit", "runs/mine", *words, cwd=folder).stdout
    assert f"{len(rows)} decisions" in told
    listed = {row["path"]: row for row in csv.DictReader((audit / "labels.csv").open()) if row["split"] == "train"}
    assert listed[right]["given"] == "temple"
    assert {listed[key]["given"] for key in suspicious[1:]} <= {"flower"}
    assert "flower/flower7.jpg" not in listed
    again = parquet.read_table(audit / "cleanlab.parquet").to_pydict()
    assert dict(zip(again["key"], again["is_label_issue"]))[right] is False  # it is remembered


def test_the_bias_of_another_config_is_refused_for_a_folder(pictures: Path, tmp_path: Path) -> None:
    place = ("shards.source=folder", f"shards.path={pictures}")
    done = command("pipeline.train", "--config", "digits", *place, cwd=tmp_path, ok=False)
    assert done.returncode == 2
    assert "falsify labels of your own collection" in done.stderr
    assert not (tmp_path / "data").exists()
