"""A report of one's own runs: names of the data, what differs, colours, no noise that nobody knows."""

from __future__ import annotations

from pathlib import Path

from pipeline.reports import figures, report
from pipeline.reports.document import Document
from pipeline.reports.run_table import Result, compare, titles


def run(ident: str, dataset: str = "flowers", source: str = "folder", manifest: str = "a", **params: str) -> Result:
    tags = {"method": "ldam", "dataset": dataset, "source": source, "manifest": manifest * 8, "imbalance": "8.41935"}
    settings = {"method.name": "ldam", "seed": "0", "optim.lr": "0.1", "train.epochs": "3", **params}
    return Result(ident, "", "FINISHED", settings, {"final/last": 60.0}, tags)


def test_own_pictures_have_their_name_and_imbalance_and_no_noise() -> None:
    named = titles(compare([run("a"), run("b", "digits", "digits", **{"shards.rho": "10", "shards.noise": "0.5"})]))
    assert list(named.values()) == ["flowers, imbalance 8.4 : 1", "digits, rho=10, noise=0.5"]
    injected = run("c", **{"shards.rho": "4", "shards.noise": "0.2"})
    assert list(titles(compare([injected])).values()) == ["flowers, rho=4, noise=0.2"]


def test_two_folders_of_one_name_are_two_data_sets() -> None:
    named = titles(compare([run("a"), run("b", manifest="b")]))
    assert [title.split(",")[0] for title in named.values()] == ["flowers aaaaaaaa", "flowers bbbbbbbb"]


def test_an_older_run_is_named_by_the_path_of_its_pictures() -> None:
    tags = {"dataset": "folder", "rho": "1", "noise": "0", "manifest": "a" * 8}
    old = Result("a", "", "FINISHED", {"method.name": "ldam", "shards.path": "/data/flowers"}, {}, tags)
    assert list(titles(compare([old])).values()) == ["flowers"]


def test_what_differs_has_a_column_and_is_the_legend(tmp_path: Path) -> None:
    runs = [run("a"), run("b", **{"optim.lr": "0.02", "method.mixup": "8.0"})]
    (rows,) = compare(runs).values()
    header, body = report.comparison_table(rows)
    assert header[:4] == ["method", "what differs", "n", "best"]
    assert [line[:2] for line in body] == [["ldam", "lr=0.1"], ["ldam", "mixup=8 lr=0.02"]]
    assert report.legends(rows) == ["lr=0.1", "mixup=8 lr=0.02"]
    assert report.comparison_table(rows[:1])[0][:3] == ["method", "what differs", "n"]
    weights = run("c", **{"model.pretrained": "/a/long/way/to/weights.pth"})
    (rows,) = compare([run("a"), weights]).values()
    assert report.legends(rows) == ["ldam", "pretrained=…y/to/weights.pth"]
    doc = Document(tmp_path)
    report.comparison(doc, runs)
    doc.write("own")
    assert 'class="left wrap">mixup=8 lr=0.02<' in (tmp_path / "report.html").read_text()


def test_without_a_difference_there_is_no_such_column() -> None:
    (rows,) = compare([run("a")]).values()
    assert report.comparison_table(rows)[0][:2] == ["method", "n"]


def test_the_paper_is_left_out_where_no_run_fits_it(tmp_path: Path) -> None:
    doc = Document(tmp_path)
    report.paper(doc, [run("a"), run("b", "cifar10")])  # a folder of that name is not the paper's data
    assert doc.blocks == []


def test_bars_of_one_method_differ_in_colour() -> None:
    history = [{"epoch": 1, "metrics": {"test/many": 50.0, "test/few": 20.0}}]
    plot = figures.plot_groups([figures.Run(name, "ldam", {"history": history}) for name in ("lr=0.1", "lr=0.02")])
    assert plot is not None
    assert len({patch.get_facecolor() for patch in plot.axes[0].patches}) == 2
