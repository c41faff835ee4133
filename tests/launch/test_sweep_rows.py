"""Rows of a sweep in a file: what stands there is not trained again, on any machine, and only if it is the same run."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch import sweep
from launch.sweep_results import add_run, as_markdown, find_finished, read_runs, record_of, rows_of
from pipeline import config as configuration
from shards.base.errors import UserError

QUICK = ["train.epochs=1", "data.batch=128", "tracking.uri=", "tracking.log_model=false", "tracking.system_metrics=false"]  # fmt: skip
NOISE = "shards.noise=0.3"


@pytest.fixture(autouse=True)
def not_nice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the work of others a test would not come to its end."""
    monkeypatch.setattr(sweep, "NICENESS", 0)


def names_of(folder: Path) -> list[str]:
    return sorted(file.parent.name for file in folder.glob("*/summary.json"))


def test_a_sweep_goes_on_elsewhere_with_nothing_but_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    words = ["out=runs", "rows=results/x.json", "--", "method.name=cross_entropy", NOISE, *QUICK]
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(here)
    assert sweep.main(["vary.draw=0", "jobs=2", *words]) == 0
    assert names_of(here / "runs") == ["draw0"]
    shutil.copytree(here / "results", there / "results")
    monkeypatch.chdir(there)
    assert sweep.main(["vary.draw=0,1", *words]) == 0
    assert names_of(there / "runs") == ["draw1"]  # draw 0 was taken as done
    made = json.loads((there / "results/x.json").read_text())
    (row,) = made["rows"]
    assert (row["draws"], list(row["runs"])) == (2, ["draw0", "draw1"])
    first = json.loads((here / "runs/draw0/summary.json").read_text())
    assert row["last"]["values"][0] == first["last"]
    assert "| 2 |" in (there / "results/x.md").read_text()
    assert not list((there / "results").glob(".*"))
    capsys.readouterr()
    before = (there / "results/x.json").read_bytes()
    assert sweep.main(["vary.draw=0,1", *words]) == 0  # nothing is left to do
    assert "[in results/x.json] draw0" in capsys.readouterr().out
    assert (there / "results/x.json").read_bytes() == before


# -- what is the same run ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(digits: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a real run."""
    folder = tmp_path_factory.mktemp("run")
    words = [f"shards.url={digits}", "method.name=cross_entropy", *QUICK, f"output={folder}"]
    assert sweep._train(words, str(folder / "log")) == 0
    made = record_of("seed0", {"seed": "0"}, configuration.load(words), folder)
    assert made is not None
    return json.loads(json.dumps(made))


def taken(record: dict[str, Any], digits: str, *words: str, choice: str = "seed") -> bool:
    config = configuration.load(
        [f"shards.url={digits}", "method.name=cross_entropy", *QUICK, "output=elsewhere", *words]
    )
    return find_finished([record], {choice: "0"}, config) is not None


@pytest.mark.parametrize(
    "word", ["data.threads=4", "train.log_every=3", "tracking.experiment=x", "checkpoint.keep=2", "shards.writers=1", "data.features=f"]
)  # fmt: skip
def test_settings_that_do_not_matter_are_not_compared(record: dict[str, Any], digits: str, word: str) -> None:
    assert taken(record, digits)
    assert taken(record, digits, word)


@pytest.mark.parametrize(
    "word", ["seed=1", "optim.lr=0.1", "train.epochs=2", "method.name=ldam", "recipe=common", "model.pretrained=w.pth", "data.flip=true"]
)  # fmt: skip
def test_other_settings_are_another_run(record: dict[str, Any], digits: str, word: str) -> None:
    assert not taken(record, digits, word)


def test_other_shards_are_another_run(record: dict[str, Any], digits: str) -> None:
    assert not taken({**record, "manifest": "0" * 64}, digits)


def test_a_draw_is_no_seed(record: dict[str, Any], digits: str) -> None:
    assert not taken(record, digits, choice="draw")


def test_a_setting_that_came_later_had_its_default(record: dict[str, Any], digits: str) -> None:
    old = json.loads(json.dumps(record))
    del old["settings"]["train"]["evaluate_every"]
    assert taken(old, digits)
    assert not taken(old, digits, "train.evaluate_every=2")


# -- the file ----------------------------------------------------------------------------------------


def of(record: dict[str, Any], seed: int, last: float = 50.0, **more: Any) -> dict[str, Any]:
    made = json.loads(json.dumps({**record, "name": f"seed{seed}", "choice": {"seed": str(seed)}, **more}))
    made["settings"]["seed"] = made["summary"]["seed"] = seed
    made["summary"]["last"] = last
    return made


def test_the_same_run_again_takes_the_place_of_the_older_one(record: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for last in (40.0, 60.0):
        add_run(file, of(record, 0, last), "command")
    add_run(file, of(record, 1, 80.0), "command")
    (row,) = json.loads(file.read_text())["rows"]
    assert row["last"]["values"] == [60.0, 80.0]
    assert sum(line.startswith("  {") and '"manifest"' in line for line in file.read_text().splitlines()) == 2


def add_many(file: str, record: dict[str, Any], seeds: range) -> None:
    for seed in seeds:
        add_run(Path(file), of(record, seed), "command")


def test_sweeps_that_write_at_once_lose_nothing(record: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    context = multiprocessing.get_context("fork")
    parts = [range(0, 8), range(8, 16), range(16, 24)]
    workers = [context.Process(target=add_many, args=(str(file), record, part)) for part in parts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert sorted(run["summary"]["seed"] for run in read_runs(file)) == list(range(24))


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"runs": [1]}', '{"runs": [{"name": "a"}]}', '{"rows": []}', "\x00"]
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    file = tmp_path / "rows.json"
    file.write_text(content)
    with pytest.raises(UserError, match="holds no runs with their settings"):
        sweep.main([f"out={tmp_path}/out", f"rows={file}", "vary.seed=0"])
    assert file.read_text() == content
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="rows: "):
        sweep.main([f"out={tmp_path}/out", f"rows={tmp_path}/rows.md", "vary.seed=0"])


# -- the table ---------------------------------------------------------------------------------------


def test_rows_of_several_sweeps_say_in_what_they_differ(record: dict[str, Any]) -> None:
    quick = of(record, 0, choice={"method.name": "cross_entropy", "seed": "0"})
    slow = of(record, 0, choice={"method.name": "cross_entropy", "seed": "0"})
    slow["settings"]["optim"]["lr"] = 0.1
    other = of(record, 0, choice={"method.name": "ldam", "seed": "0"})
    other["settings"]["method"]["name"] = "ldam"
    rows = rows_of([quick, slow, other])
    assert [(row["method.name"], row.get("what differs")) for row in rows] == [
        ("cross_entropy", "optim.lr=0.05"), ("cross_entropy", "optim.lr=0.1"), ("ldam", None),
    ]  # fmt: skip
    text = as_markdown(rows, {"command": "c", "date": "d", "machine": "m", "torch": "t"})
    assert "| ldam | 1 |" in text


def test_seeds_on_other_shards_are_other_rows_and_draws_are_one(record: dict[str, Any]) -> None:
    def drawn(draw: int, key: str, manifest: str, **shards: Any) -> dict[str, Any]:
        made = of(record, draw, choice={key: str(draw)}, manifest=manifest)
        made["shards"] |= {"bias_seed": draw, **shards}
        return made

    seeds = [drawn(0, "seed", "a"), drawn(1, "seed", "b")]
    draws = [drawn(0, "draw", "a"), drawn(1, "draw", "b")]
    assert [row.get("seeds") for row in rows_of(seeds)] == [1, 1]
    assert [(row.get("seeds"), row.get("draws")) for row in rows_of([*seeds, *draws])] == [
        (1, None),
        (1, None),
        (None, 2),
    ]
    assert [row["draws"] for row in rows_of([*draws, drawn(2, "draw", "c", noise=0.1)])] == [2, 1]


# -- cores -------------------------------------------------------------------------------------------


def test_every_job_has_its_share_of_the_cores() -> None:
    assert sweep.shares_of_cores([0, 1], 2) == [[0], [1]]
    assert sweep.shares_of_cores([0, 1], 1) == [[0, 1]]
    assert sweep.shares_of_cores([3, 5], 3) in ([[3], [3], [5]], [[3], [5], [3]])
    assert sweep.shares_of_cores(list(range(8)), 3) == [[0, 1], [2, 3, 4], [5, 6, 7]]


def measure(shares: Any, out: Any) -> None:
    sweep._give_way(shares, 3)
    out.put((sorted(os.sched_getaffinity(0)), os.nice(0)))


def test_a_worker_keeps_to_its_cores_and_gives_way() -> None:
    context = multiprocessing.get_context("spawn")
    shares, out = context.Queue(), context.Queue()
    core = min(os.sched_getaffinity(0))
    shares.put([core])
    worker = context.Process(target=measure, args=(shares, out))
    worker.start()
    assert out.get(timeout=120) == ([core], min(os.nice(0) + 3, 19))
    worker.join()
