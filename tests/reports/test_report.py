"""The report: runs compared, the paper's tables beside ours, never a number without its run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow_store import client_of
from trained import ROOT, Trained

from pipeline.config import TrackingConfig
from pipeline.reports import report, run_table
from pipeline.reports.document import Document
from pipeline.reports.run_table import PAPER, Result, compare, mean_of, paper_tables
from pipeline.tracking.__main__ import replay
from pipeline.tracking.tracker import start_tracker
from shards.base.errors import UserError

pytest_plugins = ["mlflow_fixtures"]
FULL = {
    "train.epochs": "200", "data.batch": "128", "model.backbone": "preact_resnet18", "model.width": "64",
    "data.size": "32", "method.threshold": "exponential", "method.threshold_growth": "1.005", "recipe": "own",
}  # fmt: skip


def result(ident: str, method: str = "prototypical", seed: int = 0, last: float = 60.0, **params: str) -> Result:
    tags = {"dataset": "cifar10", "rho": "100", "noise": "0.5"}
    settings = {**FULL, "method.name": method, "seed": str(seed), **params}
    return Result(ident, "name", "FINISHED", settings, {"final/best": last + 1, "final/last": last}, tags)


def cell(runs: list[Result], table: str, shown: str, where: str = "cifar10 rho=100 noise=0.5") -> list[run_table.Cell]:
    _, tables = paper_tables(runs)
    return [c for t in tables if t.id == table for c in t.cells if (c.shown, c.where) == (shown, where)]


# -- the paper's numbers -----------------------------------------------------------------------------


def test_the_papers_numbers_are_all_there_and_known_contradictions_are_noted() -> None:
    data = json.loads(PAPER.read_text())
    cells = {table["id"]: len(table["cells"]) for table in data["tables"]}
    assert cells == {
        "table1": 36,
        "table2": 36,
        "table3": 6,
        "table4": 4,
        "table5": 14,
        "table6": 12,
        "tableA1": 9,
        "tableA2": 36,
    }
    (ours,) = cell([], "table1", "Prototypical Classifier")
    assert ours.paper == {"best": 66.33, "last": 64.69}
    assert "reported here as 63.85" in " ".join(data["tables"][4]["notes"])


def test_a_cell_nobody_ran_has_no_number() -> None:
    _, tables = paper_tables([])
    assert all(not c.rows and set(c.ours.values()) == {None} for t in tables for c in t.cells)


def test_seeds_become_mean_and_spread_with_their_run_ids() -> None:
    (found,) = cell(
        [result("a", seed=0, last=60.0), result("b", seed=1, last=64.0)], "table1", "Prototypical Classifier"
    )
    mean = found.ours["last"]
    assert mean is not None
    assert (mean.value, round(mean.spread or 0, 3), mean.runs) == (62.0, 2.828, ("a", "b"))
    assert found.reduced == ()


def test_a_number_of_ours_stands_in_one_line_with_its_scale_and_its_runs(tmp_path: Path) -> None:
    doc = Document(tmp_path)
    runs = [result("aaa", seed=0, last=60.0), result("bbb", seed=1, last=64.0)]
    report.paper(doc, [*runs, result("ccc", "cross_entropy", last=30.0, **{"train.epochs": "30"})])
    ours = [line for line in doc.markdown if line.startswith("| rho=") and "not run" not in line]
    assert len(ours) == 3  # the same runs answer the appendix's table of thresholds
    rival, method, _ = ours
    assert "| 62.00 ± 2.83 | 2 | as in the paper |" in method
    assert method.endswith("preact_resnet18 width 64: aaa, bbb |")
    assert "| [reduced] epochs 30 of 200 |" in rival
    assert rival.endswith(": ccc |")


def test_a_smaller_run_stands_on_its_own_line_and_says_in_what_it_is_smaller() -> None:
    short = result("c", **{"train.epochs": "30", "model.width": "16"})
    lines = cell([result("a"), short], "table1", "Prototypical Classifier")
    assert [line.reduced for line in lines] == [(), ("epochs 30 of 200", "width 16 of 64")]


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, "full method"),
        ({"method.mixup": "0.0"}, "w/o mixup"),
        ({"data.augmix": "none"}, "w/o AugMix"),
        ({"method.threshold": "fixed"}, "w/o dynamic threshold"),
        ({"method.relabel_weight": "one"}, "w/o re-weighting"),
        ({"method.contrastive": "0.0"}, "w/o L_cc"),
    ],
)
def test_an_ablation_answers_its_own_cell_and_no_other(settings: dict[str, str], shown: str) -> None:
    run = result("a", **settings)
    _, tables = paper_tables([run])
    (table,) = [t for t in tables if t.id == "table5"]
    assert [c.shown for c in table.cells if c.rows] == [shown]


def test_a_run_that_names_its_table_answers_only_there() -> None:
    run = result("a", table_cell="table5")
    _, tables = paper_tables([run])
    assert [t.id for t in tables if t.run[0]] == ["table5"]


# -- comparing ---------------------------------------------------------------------------------------


def test_runs_that_differ_in_more_than_the_seed_are_told_apart_by_what_differs() -> None:
    runs = [
        result("a"),
        result("b", seed=1),
        result("c", **{"method.mixup": "0"}),
        result("d", "cross_entropy"),
    ]
    (rows,) = compare(runs).values()
    assert [(row.label, len(row.runs)) for row in rows] == [
        ("prototypical", 2), ("prototypical method.mixup=0", 1), ("cross_entropy", 1),
    ]  # fmt: skip


def test_different_data_is_never_averaged() -> None:
    def on(ident: str, dataset: str, manifest: str) -> Result:
        tags = {"dataset": dataset, "rho": "1", "noise": "0", "manifest": manifest * 8}
        return Result(ident, "", "FINISHED", FULL | {"method.name": "ldam", "seed": ident}, {"final/last": 1.0}, tags)

    found = compare([on("0", "folder", "a"), on("1", "folder", "b"), on("2", "cifar10", "c"), on("3", "cifar10", "d")])
    assert {bias[0]: [row.label for row in rows] for bias, rows in found.items()} == {
        "folder aaaaaaaa": ["ldam"],
        "folder bbbbbbbb": ["ldam"],
        "cifar10": ["ldam manifest=cccccccc", "ldam manifest=dddddddd"],  # another draw of the noise
    }


def test_a_seed_that_was_run_twice_counts_once_and_the_older_run_is_named(tmp_path: Path) -> None:
    runs = [result("a", last=50.0), result("b", last=60.0), result("c", seed=1, last=70.0)]
    (row,) = next(iter(compare(runs).values()))
    assert [run.run_id for run in row.runs] == ["b", "c"]
    assert [run.run_id for run in row.repeated] == ["a"]
    doc = Document(tmp_path)
    report.comparison(doc, runs)
    assert "the newest counts. Left out: a." in "\n".join(doc.markdown)


def test_an_unfinished_run_counts_in_no_number() -> None:
    running = Result("x", "n", "RUNNING", {}, {"final/last": 99.0}, {})
    assert compare([running]) == {}
    assert mean_of([], "final/last") is None


# -- the command -------------------------------------------------------------------------------------


def test_the_report_of_a_real_run_is_one_file_without_network_and_carries_its_run_id(
    trained: Trained, tmp_path: Path
) -> None:
    runs = report.write_report(trained.uri, ["tests"], tmp_path)
    html, markdown = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    assert [run.run_id for run in runs] == [trained.run_id]
    for text in (html, markdown):
        assert trained.run_id in text
        assert f"{trained.summary['last']:.2f}" in text
        assert "The paper's tables" not in text  # digits are in none
    assert "http://" not in html
    assert "https://" not in html
    assert html.count("data:image/png;base64,") >= 5
    assert all(
        (tmp_path / line.split("](")[1][:-1]).is_file() for line in markdown.splitlines() if line.startswith("![")
    )


def test_runs_of_others_are_left_alone_and_one_that_never_came_to_an_epoch_is_listed(
    database: Path, tmp_path: Path
) -> None:
    client = client_of(database)
    client.log_metric(client.create_run("0", run_name="of others").info.run_id, "rmse", 1.0)
    tracker = start_tracker(TrackingConfig(uri="", system_metrics=False), tmp_path, "early", {}, {"method": "ldam"})
    tracker.finish("FAILED")
    replay(tmp_path, f"sqlite:///{database}")
    report.write_report(f"sqlite:///{database}", [], tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| early | FAILED |" in text
    assert "of others" not in text
    assert "?" not in text.split("## The paper")[0]


def test_wrong_names_are_answered_with_what_there_is(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no experiment 'test' .* It has .*tests"):
        report.write_report(trained.uri, ["test"], tmp_path)
    with pytest.raises(UserError, match="no MLflow database"):
        report.write_report(f"sqlite:///{tmp_path / 'none.db'}", [], tmp_path)
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(UserError, match="no answer"):
        report.write_report("http://127.0.0.1:9", [], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be a folder"):
        report.write_report(trained.uri, [], tmp_path / "file")


def test_help_answers_without_mlflow_or_torch() -> None:
    script = "import sys; import pipeline.report, pipeline.predict, pipeline.audit, pipeline.tracking.tracker\n"
    script += "print({'mlflow', 'torch', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"


def test_a_report_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no MLflow database"):
        report.write_report(f"sqlite:///{tmp_path / 'nothing.db'}", [], tmp_path / "report")
    assert not (tmp_path / "report").exists()
