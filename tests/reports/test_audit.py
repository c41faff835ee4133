"""The audit: which labels are probably wrong, and what to do about it."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
from mlflow_store import client_of
from trained import Trained, command

from pipeline.inference.open_run import open_run
from pipeline.reports.audit import Rate, _neighbours, apply, audit_labels, corrected_labels, detection_quality
from shards.base.errors import UserError
from shards.build import ensure
from shards.config import BuildConfig
from shards.reader import open_split

pytest_plugins = ["mlflow_fixtures"]


@pytest.fixture(scope="module")
def audited(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("audit")
    done = command("pipeline.audit", trained.folder, f"out={out}", "apply=relabel", "log=true")
    return out, done.stdout


def test_every_sample_is_in_the_tables_with_what_is_thought_of_it(trained: Trained, audited: tuple[Path, str]) -> None:
    split = open_split(trained.shards)
    table = parquet.read_table(audited[0] / "audit.parquet")
    assert table.column_names == [
        "index", "key", "given", "suggested", "suspicious", "score", "suggested_score", "weight",
        "epochs_flagged", "neighbours", "true",
    ]  # fmt: skip
    assert table["index"].to_pylist() == list(range(len(split)))
    assert table["key"].to_pylist() == split.keys()
    assert [int(name) for name in table["given"].to_pylist()] == split.given.tolist()
    assert max(table["epochs_flagged"].to_pylist()) == 2  # cleaning began in the second of three epochs
    with (audited[0] / "audit.csv").open() as file:
        assert sum(1 for _ in csv.DictReader(file)) == len(split)


def test_the_results_are_kept_with_the_run(trained: Trained, audited: tuple[Path, str]) -> None:
    kept = client_of(trained.uri).list_artifacts(trained.run_id, "audit")
    assert {item.path for item in kept} == {"audit/audit.html", "audit/audit.csv", "audit/audit.parquet"}


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
    assert page.count("data:image/jpeg;base64,") > 10
    assert page.count('class="card"') == page.count("data:image/jpeg;base64,")
    for part in ("95 % interval", 'id="given"', 'id="suggested"', "really wrong"):
        assert part in page
    assert "http://" not in page
    assert "https://" not in page


def test_the_corrected_labels_build_new_shards(trained: Trained, audited: tuple[Path, str], tmp_path: Path) -> None:
    line = next(line for line in audited[1].splitlines() if line.strip().startswith("python -m shards.build"))
    command("shards.build", *shlex.split(line)[3:], f"output={tmp_path / 'cleaned'}")
    before, after = open_split(trained.shards), open_split(str(tmp_path / "cleaned"))
    assert len(after) == len(before)
    wrong = {split: float((split.given != split.true).mean()) for split in (before, after)}
    assert wrong[before] == pytest.approx(0.5, abs=0.01)
    suspicious = parquet.read_table(audited[0] / "audit.parquet").to_pydict()
    expected = np.where(suspicious["suspicious"], suspicious["suggested"], suspicious["given"])
    assert wrong[after] == pytest.approx(float((expected != np.array(suspicious["true"])).mean()), abs=1e-9)
    assert len(open_split(str(tmp_path / "cleaned"), "test")) == len(open_split(trained.shards, "test"))


@pytest.mark.parametrize("how", ["relabel", "drop"])
def test_a_class_of_which_nothing_would_be_left_keeps_its_labels(trained: Trained, how: str) -> None:
    opened = open_run(str(trained.folder / "model"))
    found = audit_labels(opened, opened.split("train", trained.shards))
    found.suspicious = found.given != 0  # a model that knows two classes only
    found.suggested = np.where(found.given == 3, 7, 0)
    label, keep, spared = corrected_labels(found, 10, how)
    assert spared == list(range(1, 10))  # 7 too: it would have lived on what 3 keeps
    left = np.bincount(label[keep], minlength=10)
    assert (left > 0).all()
    assert left.sum() == len(found.given)


@pytest.mark.parametrize("second", [False, True])
def test_corrected_labels_of_files_leave_the_pictures_where_they_are(
    trained: Trained, tmp_path: Path, second: bool
) -> None:
    """Also where the test pictures lie in a folder of their own."""
    for name, count in (("train", 300), ("test", 60)):
        split = open_split(trained.shards, name)
        for index in range(count):
            folder = tmp_path / "pictures" / name / f"digit {split.true[index]}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"it's {index}.png").write_bytes(bytes(split.read(index)))
    words = {"validation_path": str(tmp_path / "pictures" / "test")} if second else {}
    own = BuildConfig(source="folder", path=str(tmp_path / "pictures" / "train"), output=str(tmp_path / "own"), **words)
    shards = ensure(own)
    opened = open_run(str(trained.folder / "model"))
    opened.model.classes = [f"digit {k}" for k in range(10)]
    opened.model.config = opened.model.config.model_copy(update={"shards": own})
    split, test = opened.split("train", shards), opened.split("test", shards)
    found = audit_labels(opened, split)
    line = apply(found, opened, split, test, tmp_path, "relabel")
    command("shards.build", *shlex.split(line)[3:], f"output={tmp_path / 'cleaned'}")
    assert not (tmp_path / "pictures" / "pictures").exists()
    cleaned = open_split(str(tmp_path / "cleaned"))
    assert len(cleaned) == len(split)
    assert len(open_split(str(tmp_path / "cleaned"), "test")) == len(test)
    label, _, _ = corrected_labels(found, 10, "relabel")
    by_name = {Path(key).name: split.classes[k] for key, k in zip(split.keys(), label)}
    assert {Path(key).name: cleaned.classes[k] for key, k in zip(cleaned.keys(), cleaned.given)} == by_name


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


def test_the_interval_holds_the_share_and_narrows_with_more_samples() -> None:
    few, many = Rate(5, 10), Rate(500, 1000)
    for rate in (few, many, Rate(0, 7), Rate(7, 7)):
        low, high = rate.interval
        assert 0 <= low <= rate.share <= high <= 1
    assert many.interval[1] - many.interval[0] < few.interval[1] - few.interval[0]
    assert few.interval == (
        pytest.approx(0.2366, abs=1e-4),
        pytest.approx(0.7634, abs=1e-4),
    )  # Wilson, by hand


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
