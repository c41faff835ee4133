"""The split `validation`: clean, balanced, the same for every bias, and no sample of it in the training set."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from shards_help import Build, contents, fill

from shards import verify
from shards.base.errors import UserError
from shards.config import BuildConfig
from shards.plan import make_plan
from shards.reader import Split, open_split
from shards.sources import Collection, SourceTable, collect
from shards.sources.validation import with_validation


class Nothing:
    def read(self, split: str, row: int, key: str) -> bytes:
        raise AssertionError


def collection(given: list[int], true: list[int]) -> Collection:
    keys = pa.array([str(row) for row in range(len(given))])
    table = SourceTable(keys, np.array(given, np.int32), np.array(true, np.int32))
    return Collection("made up", ["a", "b", "c"], {"train": table, "test": table}, Nothing())


def by_key(split: Split) -> dict[str, tuple[int, int, bytes]]:
    labels = zip(split.given.tolist(), split.true.tolist())
    return {key: (*pair, bytes(split.read(n))) for n, (key, pair) in enumerate(zip(split.keys(), labels))}


def test_it_is_clean_balanced_and_cut_from_the_training_pool_before_the_bias(build: Build) -> None:
    url = build(validation=0.2, rho=10, noise=0.5)
    train, validation, test = (open_split(url, name) for name in ("train", "validation", "test"))
    pool = open_split(build("whole", rho=1, noise=0))
    smallest = int(np.bincount(pool.given).min())
    assert np.bincount(validation.given).tolist() == [smallest // 5] * 10
    assert (validation.given == validation.true).all()
    whole = by_key(pool)
    for key, found in by_key(validation).items():  # the right labels and pictures
        assert found == whole[key]
    assert not set(train.keys()) & set(validation.keys())
    assert not set(test.keys()) & set(validation.keys())
    assert (train.given != train.true).mean() == pytest.approx(0.5, abs=0.01)
    assert train.clean_counts.max() / train.clean_counts.min() == pytest.approx(10, rel=0.1)
    assert set(test.keys()) == set(open_split(str(build("whole", rho=1, noise=0)), "test").keys())
    problems: list[str] = []
    verify.verify(verify.VerifyConfig(url=url, decode=True), problems.append)
    assert problems == []


def test_no_bias_and_no_draw_of_it_changes_who_is_in_it() -> None:
    def members(**options: object) -> set[str]:
        config = BuildConfig.model_validate({"validation": 0.1, **options})
        found = collect(config, print)
        rows = make_plan(found, config, {})["validation"].rows
        return {found.splits["validation"].keys[int(row)].as_py() for row in rows}

    usual = members()
    assert usual == members(bias_seed=7) == members(rho=1, noise=0) == members(noise_kind="symmetric", tail="sorted")
    assert usual != members(validation_seed=1)


def test_without_it_shards_are_what_they_were(build: Build) -> None:
    """Names, options and samples of the embedded default, as they were before the setting existed."""
    config = BuildConfig()
    assert config.place() == "data/digits-rho10-noise0.5-seed0-d54bce37"
    assert "validation" not in config.content()
    plans = make_plan(collect(config, print), config, {})
    assert {name: plan.digest(0, len(plan))[:16] for name, plan in plans.items()} == {
        "train": "acccb68491639b6e",
        "test": "31d63fd5149312b6",
    }
    url = build()
    assert sorted(Path(url).glob("validation*")) == []


def test_shards_with_and_without_it_are_not_taken_for_each_other(build: Build) -> None:
    assert BuildConfig(validation=0.1).place() != BuildConfig().place()
    build("with", validation=0.1)
    build("with", validation=0.1)  # finished already
    assert build.said == []  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"validation=0\.1 \(now 0\.0\)"):
        build("with")
    build("without")
    with pytest.raises(UserError, match=r"validation=0\.0 \(now 0\.1\)"):
        build("without", validation=0.1)


def test_true_labels_count_where_they_are_known() -> None:
    given, true = [0, 0, 1, 1, 2, 2, 0, 1, 2], [0, 1, 1, 2, 2, 0, -1, -1, -1]
    found = with_validation(collection(given, true), BuildConfig(validation=0.4, noise=0, rho=1))
    held = found.splits["validation"]
    truth = np.where(np.array(true) >= 0, true, given)
    assert sorted(held.given.tolist()) == [0, 1, 2]
    assert held.given.tolist() == [truth[int(key)] for key in held.names()]
    assert held.true.tolist() == [true[int(key)] for key in held.names()]
    left = found.splits["train"]
    assert sorted([*left.names(), *held.names()]) == [str(n) for n in range(9)]
    assert left.given.tolist() == [given[int(key)] for key in left.names()]


def test_a_picture_that_cannot_be_used_takes_one_of_every_other_class_with_it(build: Build, tmp_path: Path) -> None:
    root = fill(tmp_path / "in", {"ant": 40, "bee": 30})
    options = {"source": "folder", "path": str(root), "validation": 0.3, "max_rejected": 0.1}
    whole = open_split(build("whole", **options), "validation")
    assert np.bincount(whole.given).tolist() == [8, 8]  # 0.3 of the 27 that are not in the test split
    bad = next(key for key, label in zip(whole.keys(), whole.given) if label == 1)
    (root / bad).write_bytes(b"no picture")
    split = open_split(build("hurt", **options), "validation")
    assert np.bincount(split.given).tolist() == [7, 7]
    assert bad not in split.keys()  # noqa: SIM118 - a list, not a dictionary


def test_several_writers_and_ranks_write_the_same_bytes(build: Build, tmp_path: Path) -> None:
    root = fill(tmp_path / "in", {"ant": 30, "bee": 40})
    options = {"source": "folder", "path": str(root), "validation": 0.3, "rho": 2, "noise": 0.2, "shard_samples": 7}
    one, three = build("one", **options, writers=1), build("three", **options, writers=3)
    assert contents(one) == contents(three)


def test_published_noisy_labels_leave_it_clean(build: Build, tmp_path: Path) -> None:
    plain = open_split(build("plain", rho=1, noise=0))
    with open(tmp_path / "noisy.csv", "w", newline="") as file:
        csv.writer(file).writerows([["given"], *([3] for _ in range(10)), *([k % 10] for k in range(len(plain) - 10))])
    url = build("noisy", labels=str(tmp_path / "noisy.csv"), validation=0.2, rho=1)
    validation, train = open_split(url, "validation"), open_split(url)
    assert (validation.given == validation.true).all()
    assert (train.given != train.true).mean() > 0.5


def test_a_share_that_gives_no_picture_is_refused(build: Build, tmp_path: Path) -> None:
    root = fill(tmp_path / "in", {"ant": 30, "bee": 6})
    with pytest.raises(UserError, match=r"of the 5 training pictures of class 'bee' is less than one picture"):
        build(source="folder", path=str(root), validation=0.1)
