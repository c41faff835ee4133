"""A sweep: every combination once, one table, finished runs kept, mistakes told before any work."""

import json

import pytest

from launch import sweep
from shards.settings import UserError

QUICK = [
    "train.epochs=1",
    "data.batch=128",
    "tracking.uri=",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
]


def test_a_sweep_makes_one_row_for_all_seeds(digits, tmp_path, capsys) -> None:
    out = tmp_path / "sweep"
    words = [
        "--out",
        str(out),
        "--vary",
        "method.name=cross_entropy",
        "--vary",
        "seed=0,1",
        f"shards.url={digits}",
        *QUICK,
    ]
    assert sweep.main(words) == 0
    made = json.loads((out / "results.json").read_text())
    (row,) = made["rows"]
    assert row["seeds"] == 2
    assert len(row["last"]["values"]) == 2
    assert "cross_entropy" in (out / "results.md").read_text()
    first = (out / "cross_entropy_seed0" / "summary.json").stat().st_mtime_ns
    assert sweep.main(words) == 0  # again: nothing is trained twice
    assert (out / "cross_entropy_seed0" / "summary.json").stat().st_mtime_ns == first


def test_a_mistake_in_any_run_is_told_before_the_first(tmp_path) -> None:
    with pytest.raises(UserError, match="protypical"):
        sweep.main(["--out", str(tmp_path / "s"), "--vary", "method.name=cross_entropy,protypical"])
    assert not (tmp_path / "s").exists()
    with pytest.raises(UserError, match="--vary seed"):
        sweep.main(["--out", str(tmp_path / "s"), "--vary", "seed"])


def test_all_means_every_method() -> None:
    names = sweep.method_names()
    assert {"cross_entropy", "prototypical", "dividemix"} <= set(names)
    assert len(names) == len(set(names))
