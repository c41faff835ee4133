"""The audit: which labels are probably wrong, and what to do about it."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
from mlflow_store import client_of
from trained import Trained, command

from pipeline.inference.open_run import open_run
from pipeline.reports.audit.corrections import spare_classes, write_list
from pipeline.reports.audit.findings import _neighbours, audit_labels, detection_quality
from shards.base.errors import UserError
from shards.build import ensure
from shards.config import BuildConfig
from shards.reader import open_split

pytest_plugins = ["mlflow_fixtures"]


@pytest.fixture(scope="module")
def audited(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("audit")
    done = command("pipeline.audit", trained.folder, f"out={out}", "log=true")
    return out, done.stdout


def test_every_sample_is_in_the_tables_with_what_is_thought_of_it(trained: Trained, audited: tuple[Path, str]) -> None:
    split = open_split(trained.shards)
    table = parquet.read_table(audited[0] / "audit.parquet")
    names = table.column_names
    assert names[:11] == [
        "index", "key", "given", "suggested", "suspicious", "score", "suggested_score", "weight",
        "epochs_flagged", "neighbours", "training_score",
    ]  # fmt: skip
    assert {"duplicate_group", "duplicate_keep", "in_train", "blurred", "true"} < set(names)
    assert table["index"].to_pylist() == list(range(len(split)))
    assert table["key"].to_pylist() == split.keys()
    assert [int(name) for name in table["given"].to_pylist()] == split.given.tolist()
    assert max(table["epochs_flagged"].to_pylist()) == 2  # cleaning began in the second of three epochs
    with (audited[0] / "audit.csv").open() as file:
        assert sum(1 for _ in csv.DictReader(file)) == len(split)


def test_the_numbers_are_there_for_programs(trained: Trained, audited: tuple[Path, str]) -> None:
    told = json.loads((audited[0] / "audit.json").read_text())
    table = parquet.read_table(audited[0] / "audit.parquet").to_pydict()
    assert told["labels"] == {"samples": len(table["index"]), "suspicious": sum(table["suspicious"]), "judged": False}
    assert {name: one["samples"] for name, one in told["classes"].items()} == {
        name: table["given"].count(name) for name in open_split(trained.shards).classes
    }
    assert told["issues"]["wrong_label"] == sum(table["suspicious"])  # no features, so no pictures of no class


def test_the_results_are_kept_with_the_run(trained: Trained, audited: tuple[Path, str]) -> None:
    kept = client_of(trained.uri).list_artifacts(trained.run_id, "audit")
    assert {item.path for item in kept} == {
        "audit/audit.html",
        "audit/audit.csv",
        "audit/audit.parquet",
        "audit/audit.json",
    }


def test_neighbours_are_clean_samples_and_never_the_sample_itself(audited: tuple[Path, str]) -> None:
    table = parquet.read_table(audited[0] / "audit.parquet").to_pydict()
    for index, near in zip(table["index"], table["neighbours"]):
        assert len(set(near)) == 3
        assert index not in near
        assert not any(table["suspicious"][k] for k in near)


def test_the_list_agrees_with_what_the_run_measured(trained: Trained, audited: tuple[Path, str]) -> None:
    table = parquet.read_table(audited[0] / "audit.parquet").to_pydict()
    clean = ~np.array(table["suspicious"])
    right = np.array(table["given"]) == np.array(table["true"])
    hit = (clean & right).sum()
    f1 = 2 * hit / (clean.sum() + right.sum())
    assert f1 == pytest.approx(trained.summary["clean_f1"], abs=1e-9)
    assert "precision" in audited[1]
    assert "recall" in audited[1]


def test_the_page_is_one_file_with_pictures_rates_and_a_filter(audited: tuple[Path, str]) -> None:
    page = (audited[0] / "audit.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    table = parquet.read_table(audited[0] / "audit.parquet").to_pydict()
    suspicious = [index for index, flag in zip(table["index"], table["suspicious"]) if flag]
    assert sorted(data["index"][card] for card in data["issues"][0]["cards"]) == suspicious
    assert {str(index) for index in data["index"]} <= set(data["pictures"])
    for part in ("95 % interval", 'id="given"', 'id="suggested"', "really wrong"):
        assert part in page
    assert "http://" not in page
    assert "https://" not in page


def test_what_a_model_says_of_labels_it_has_learned_corrects_nothing(
    trained: Trained, audited: tuple[Path, str]
) -> None:
    assert "a weak judgement" in audited[1]
    assert "not judged" in audited[1]
    told = command("pipeline.audit", trained.folder, f"out={audited[0]}", "apply=relabel", ok=False)
    assert told.returncode == 2
    assert "models that have not learned them" in told.stderr
    assert "pipeline.embed" in told.stderr
    assert not (audited[0] / "labels.csv").exists()


@pytest.mark.parametrize("how", ["relabel", "drop"])
def test_a_class_of_which_nothing_would_be_left_keeps_its_labels(how: str) -> None:
    given = np.arange(200) % 10
    doubted = given != 0  # a model that knows two classes only
    label, keep = (np.where(given == 3, 7, 0), ~np.zeros(200, bool)) if how == "relabel" else (given, ~doubted)
    done = spare_classes(given, label, keep, 10)
    assert done.spared == list(range(1, 10))  # 7 too: it would have lived on what 3 keeps
    assert (done.label == given).all()
    assert done.keep.all()


@pytest.mark.parametrize(("second", "by_url"), [(False, False), (True, False), (True, True)])
def test_corrected_labels_of_files_leave_the_pictures_where_they_are(
    trained: Trained, tmp_path: Path, second: bool, by_url: bool
) -> None:
    """Also where the test pictures lie in a folder of their own. A validation part goes back to the training pictures."""
    for name, count in (("train", 300), ("test", 60)):
        split = open_split(trained.shards, name)
        for index in range(count):
            folder = tmp_path / "pictures" / name / f"digit {split.true[index]}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"it's {index}.png").write_bytes(bytes(split.read(index)))
    words = {"validation_path": str(tmp_path / "pictures" / "test"), "validation": 0.5} if second else {}
    own = BuildConfig(source="folder", path=str(tmp_path / "pictures" / "train"), output=str(tmp_path / "own"), **words)
    shards = ensure(own)
    opened = open_run(str(trained.folder / "model"))
    opened.model.classes = [f"digit {k}" for k in range(10)]
    opened.model.config = opened.model.config.model_copy(update={"shards": own})
    split, test = opened.split("train", shards), opened.split("test", shards)
    found = audit_labels(opened, split)
    done = spare_classes(
        found.given, np.where(found.suspicious, found.suggested, found.given), ~np.zeros(len(split), bool), 10
    )
    if by_url:  # a training on finished shards knows nothing of their source
        opened.model.config = opened.model.config.model_copy(update={"shards": BuildConfig(url=shards)})
    splits = {name: opened.split(name, shards) for name in split.manifest.splits}
    assert ("validation" in splits) == second
    line = write_list(done, opened, splits, tmp_path)
    command("shards.build", *shlex.split(line)[3:], f"output={tmp_path / 'cleaned'}")
    assert not (tmp_path / "pictures" / "pictures").exists()
    cleaned = open_split(str(tmp_path / "cleaned"))
    held = {
        Path(key).name: split.classes[k]
        for part in splits.values()
        if part.name == "validation"
        for key, k in zip(part.keys(), part.given)
    }
    assert len(cleaned) == len(split) + len(held)
    assert len(open_split(str(tmp_path / "cleaned"), "test")) == len(test)
    by_name = {Path(key).name: split.classes[k] for key, k in zip(split.keys(), done.label)}
    assert {Path(key).name: cleaned.classes[k] for key, k in zip(cleaned.keys(), cleaned.given)} == by_name | held


def test_a_model_without_beliefs_is_audited_by_its_answers_or_by_a_threshold(trained: Trained) -> None:
    opened = open_run(str(trained.folder / "model"))
    split = opened.split("train", trained.shards)
    found = audit_labels(opened, split)
    assert (found.suspicious == (found.suggested != found.given)).all()
    strict = audit_labels(opened, split, threshold=0.3)
    assert (strict.suspicious == (strict.score <= 0.3)).all()
    judged = detection_quality(strict)
    assert judged is not None
    assert 0 < judged["f1"] <= 1


def test_without_true_labels_nothing_is_claimed(trained: Trained) -> None:
    opened = open_run(str(trained.folder / "model"))
    found = audit_labels(opened, opened.split("train", trained.shards))
    found.true = np.full_like(found.true, -1)
    assert detection_quality(found) is None


def test_neighbours_where_nothing_is_clean_are_none() -> None:
    assert _neighbours(np.eye(3, dtype=np.float32), np.ones(3, bool), np.zeros(3)) == [[], [], []]


def test_a_checkpoint_is_not_written_into_and_log_without_a_run_is_told_at_once(
    trained: Trained, tmp_path: Path
) -> None:
    newest = max((trained.folder / "checkpoints").iterdir())
    before = sorted(newest.iterdir())
    command("pipeline.audit", newest, f"shards={trained.shards}", cwd=tmp_path)
    assert sorted(newest.iterdir()) == before
    assert (tmp_path / "audit" / "audit.html").is_file()
    told = command("pipeline.audit", trained.folder / "model", "log=true", f"out={tmp_path}/log", ok=False)
    assert told.returncode == 2
    assert "which MLflow run" in told.stderr
    assert not (tmp_path / "log").exists()


def test_shards_of_another_run_are_refused(trained: Trained, tmp_path: Path) -> None:
    other = ensure(BuildConfig(noise=0.2, output=str(tmp_path / "other")))
    with pytest.raises(UserError, match="trained on other shards"):
        open_run(str(trained.folder), shards=other, own_labels=True)
