"""Seeds and draws: runs on one draw of the bias are seeds; runs whose bias was drawn with the seed are draws."""

from __future__ import annotations

from pathlib import Path

from pipeline.reports import report
from pipeline.reports.document import Document
from pipeline.reports.run_table import Result, Row, compare


def run(seed: int, bias: int, draw: bool = False, source: str = "digits", few: float = 10.0, **params: str) -> Result:
    tags = {
        "method": "ldam",
        "dataset": source,
        "source": source,
        "rho": "10",
        "noise": "0.5",
        "manifest": f"{bias}" * 8,
    }
    tags |= {"draw": str(seed)} if draw else {}
    tags |= {"few_test_pictures": "72", "few_training_samples": "31"}
    shards = {"shards.source": source, "shards.rho": "10", "shards.noise": "0.5", "shards.bias_seed": str(bias)}
    settings = {"method.name": "ldam", "seed": str(seed), "optim.lr": "0.1", "train.epochs": "3", **shards, **params}
    metrics = {"final/last": 60.0 + bias, "test/few": few}
    return Result(f"{seed}-{bias}", "", "FINISHED", settings, metrics, tags)


def lines(runs: list[Result]) -> list[tuple[str, str, str]]:
    return [(row.count, row.seeds, row.differs) for row in rows_of(runs)]


def rows_of(runs: list[Result]) -> list[Row]:
    (rows,) = compare(runs).values()
    return rows


def test_several_seeds_on_one_draw_are_seeds() -> None:
    assert lines([run(0, 0), run(1, 0), run(2, 0)]) == [("3", "0, 1, 2", "")]


def test_seed_and_bias_that_vary_together_are_draws_of_one_row() -> None:
    assert lines([run(0, 0), run(1, 1), run(2, 2)]) == [("3 draws", "draws 0, 1, 2", "")]
    assert lines([run(0, 10), run(1, 11)]) == [("2 draws", "draws 0, 1", "")]


def test_seeds_crossed_with_draws_are_not_averaged() -> None:
    assert lines([run(0, 0), run(1, 0), run(0, 1), run(1, 1)]) == [
        ("2", "0, 1", "bias_seed=0"),
        ("2", "0, 1", "bias_seed=1"),
    ]


def test_one_seed_on_several_draws_is_not_averaged() -> None:
    """The seed of a training does not vary, so the spread would leave out its part."""
    assert [line[:2] for line in lines([run(0, 0), run(0, 1)])] == [("1", "0"), ("1", "0")]


def test_draws_of_a_sweep_are_not_mixed_with_older_seeds_on_one_of_their_shards() -> None:
    runs = [run(0, 0), run(1, 0), run(2, 0), run(0, 0, True), run(1, 1, True), run(2, 2, True)]
    assert [line[:2] for line in lines(runs)] == [("3", "0, 1, 2"), ("3 draws", "draws 0, 1, 2")]


def test_other_settings_are_other_rows_and_no_bias_seed_is_named_there() -> None:
    runs = [run(k, k, **{"optim.lr": lr}) for lr in ("0.1", "0.2") for k in (0, 1)]
    assert lines(runs) == [("2 draws", "draws 0, 1", "lr=0.1"), ("2 draws", "draws 0, 1", "lr=0.2")]


def test_other_shards_are_never_taken_for_another_draw() -> None:
    runs = [run(0, 0, **{"shards.validation": "0.2"}), run(1, 1), run(2, 2, **{"shards.labels": "b.csv"})]
    assert [line[0] for line in lines(runs)] == ["1", "1", "1"]
    unknown = [run(0, 0, **{"shards.url": "a"}), run(1, 1, **{"shards.url": "b"})]  # nobody knows how these were built
    assert [line[0] for line in lines(unknown)] == ["1", "1"]


def test_draws_of_a_bias_in_own_pictures_are_one_data_set() -> None:
    own = [run(k, k, source="folder", **{"shards.path": "/pictures"}) for k in (0, 1)]
    assert lines(own) == [("2 draws", "draws 0, 1", "")]
    assert len(compare([*own, run(0, 0, source="folder", **{"shards.path": "/others"})])) == 2


def test_the_report_says_what_was_averaged_and_on_how_little_one_run_stands(tmp_path: Path) -> None:
    doc = Document(tmp_path)
    report.comparison(doc, [run(0, 0, few=10.0), run(1, 1, few=30.0)])
    text = "\n".join(doc.markdown)
    assert "| ldam | 2 draws |" in text
    assert "20.00 ± 14.14" in text
    assert "the bias of the data drawn anew with every seed" in text
    assert "pictures" not in text
    doc = Document(tmp_path)
    report.comparison(doc, [run(0, 0)])
    assert "10.00 (72 pictures, 31 training samples)" in "\n".join(doc.markdown)


def test_columns_of_a_validation_part_are_there_if_a_run_has_one() -> None:
    plain = run(0, 0)
    assert "validation" not in report.comparison_table(rows_of([plain]))[0]
    held = run(0, 0)
    held.metrics["validation/top1"] = 55.0
    header, (line,) = report.comparison_table(rows_of([held]))
    assert line[header.index("validation")] == "55.00"
