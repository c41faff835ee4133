"""A sweep: every combination once, one table, finished runs kept, mistakes told before any work."""

import json
import re

import pytest
import yaml
from mlflow_store import runs_in

from launch import sweep
from pipeline.reports import run_table
from shards.base.errors import UserError

pytest_plugins = ["mlflow_fixtures"]
QUICK = [
    "train.epochs=1",
    "data.batch=128",
    "tracking.uri=",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
]


@pytest.fixture(autouse=True)
def not_nice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the work of others a test would not come to its end."""
    monkeypatch.setattr(sweep, "NICENESS", 0)


def test_a_sweep_makes_one_row_for_all_seeds(digits, tmp_path, capsys) -> None:
    out = tmp_path / "sweep"
    words = [
        f"out={out}",
        "vary.method.name=cross_entropy",
        "vary.seed=0,1",
        "--",
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
    # With other settings the old numbers are not passed off as new ones.
    (out / "results.json").unlink()
    assert sweep.main([*words, "optim.lr=0.1"]) == 1
    assert "optim.lr was 0.05, is 0.1" in (out / "cross_entropy_seed0.log").read_text()
    assert not (out / "results.json").exists()
    assert "exit code 2" in capsys.readouterr().err


def test_a_sweep_is_one_parent_with_its_children_however_often_it_goes_on(digits, database, tmp_path) -> None:
    out, uri = tmp_path / "lr", f"sqlite:///{database}"
    base = [
        f"out={out}",
        "--",
        f"shards.url={digits}",
        *QUICK,
        f"tracking.uri={uri}",
        "tracking.tags.key=http://a:hunter2@b",
    ]
    assert sweep.main(["vary.seed=0", *base]) == 0
    assert sweep.main(["vary.seed=0,1", *base]) == 0
    runs = {run.info.run_name: run for run in runs_in(database)}
    parent = runs.pop("sweep lr")
    assert parent.info.status == "FINISHED"
    assert len(runs) == 2
    for run in runs.values():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.tags["sweep"] == "lr"
        assert run.info.run_id in (out / "results.md").read_text()
    for file in (path for path in out.rglob("*") if path.suffix in (".md", ".json", ".jsonl", ".yaml", ".log", ".txt")):
        assert "hunter2" not in file.read_text(), file


def test_a_draw_is_seed_and_bias_together_and_the_table_averages_over_draws(database, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # the shards of every draw go below data/
    out, uri = tmp_path / "draws", f"sqlite:///{database}"
    words = [f"out={out}", "--", "method.name=cross_entropy", "shards.validation=0.2", *QUICK, f"tracking.uri={uri}"]
    assert sweep.main(["vary.draw=0", *words]) == 0
    assert re.search(r"\| 1 \|.*\(\d+ pictures, \d+ training samples\)", (out / "results.md").read_text())
    assert sweep.main(["vary.draw=0,1", *words]) == 0
    (row,) = json.loads((out / "results.json").read_text())["rows"]
    assert (row["draws"], "seeds" in row) == (2, False)
    assert len(row["validation_last"]["values"]) == 2
    text = (out / "results.md").read_text()
    assert "over draws of seed and bias together" in text
    assert "best on the validation part" in text
    assert "training samples)" not in text
    for draw in (0, 1):
        used = yaml.safe_load((out / f"draw{draw}" / "config.yaml").read_text())
        assert (used["seed"], used["shards"]["bias_seed"]) == (draw, draw)
    manifests = {json.loads((out / f"draw{draw}" / "summary.json").read_text())["manifest"] for draw in (0, 1)}
    assert len(manifests) == 2
    runs = {run.info.run_name for run in runs_in(database)} - {"sweep draws"}
    assert runs == {f"cross_entropy draw={draw} · digits rho=10 noise=0.5" for draw in (0, 1)}
    (rows,) = run_table.compare(run_table.read_runs(f"sqlite:///{database}", [])).values()
    (line,) = rows
    assert (line.count, line.seeds, line.differs) == ("2 draws", "draws 0, 1", "")


def test_a_mistake_in_any_run_is_told_before_the_first(tmp_path) -> None:
    with pytest.raises(UserError, match="protypical"):
        sweep.main([f"out={tmp_path}/s", "vary.method.name=cross_entropy,protypical"])
    assert not (tmp_path / "s").exists()
    with pytest.raises(UserError, match=r"vary\.seed: write it as"):
        sweep.main([f"out={tmp_path}/s", "vary.seed="])
    with pytest.raises(UserError, match="twice"):
        sweep.main([f"out={tmp_path}/s", "vary.seed=0,0"])
    with pytest.raises(UserError, match=r"vary\.draw sets seed already"):
        sweep.main([f"out={tmp_path}/s", "vary.draw=0,1", "vary.seed=0"])
    with pytest.raises(UserError, match=r"vary\.draw draws the bias of the data anew, but shards\.url="):
        sweep.main([f"out={tmp_path}/s", "vary.draw=0,1", "--", "shards.url=data/finished"])
    with pytest.raises(UserError, match="jobs: input should be greater than 0"):
        sweep.main([f"out={tmp_path}/s", "vary.seed=0", "jobs=0"])
    with pytest.raises(UserError, match="out is missing: folder for runs and table"):
        sweep.main(["vary.seed=0"])
    with pytest.raises(
        UserError, match=r"There is no setting 'recipe'(.|\n)*Settings of the training stand after a `--`"
    ):
        sweep.main([f"out={tmp_path}/s", "recipe=common"])
    with pytest.raises(UserError, match=r"^--vary seed=0,1 is written vary\.seed=0,1 here\.$"):
        sweep.main(["--vary", "seed=0,1", "--out", "x"])
    assert not (tmp_path / "s").exists()


def test_a_sweep_may_be_written_in_a_file_of_its_own(tmp_path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("out: a\nvary: {seed: [0, 1], optim: {lr: [0.1]}, method.name: all}\n")
    config, passed_on = sweep.COMMAND.load_own(["--config", str(file), "out=2024", "--", "seed=3"])
    assert (config.out, passed_on) == ("2024", ["seed=3"])
    assert config.vary == {"seed": ["0", "1"], "optim.lr": ["0.1"], "method.name": ["all"]}


def test_all_means_every_method() -> None:
    names = sweep.method_names()
    assert {"cross_entropy", "prototypical", "dividemix"} <= set(names)
    assert len(names) == len(set(names))
