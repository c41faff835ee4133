"""Pictures: whatever a run can offer is drawn, whatever it lacks is left out."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from pipeline.reports import figures
from pipeline.reports.figures import Run, write_figures
from pipeline.tracking.colors import METHODS, style


def data(classes: int = 10, method: str = "prototypical") -> dict[str, Any]:
    random = np.random.default_rng(0)
    history = [
        {"epoch": e, "metrics": {"test/top1": 50.0 + e, "test/many": 60.0, "test/few": float("nan"),
                                 "loss/ce": 1.0, "clean/threshold": 0.1, "clean/share": 0.5, "clean/f1": 0.9}}
        for e in range(1, 4)
    ]  # fmt: skip
    return {
        "method": method,
        "history": history,
        "class_names": [f"class {k}" for k in range(classes)],
        "class_counts": np.linspace(100, 10, classes).astype(int),
        "per_class_accuracy": np.linspace(1, 0, classes),
        "confusion": np.eye(classes, dtype=int),
        "marginal": {"prototype": np.full(classes, 1 / classes), "linear": np.full(classes, 1 / classes)},
        "confidence": {"prototype": np.full(classes, 0.5)},
        "group_f1": {"many": 0.9, "few": None},
        "embedding": random.normal(size=(30, 8)),
        "embedding_labels": np.arange(30) % classes,
    }


def test_every_picture_of_a_complete_run_is_drawn(tmp_path: Path) -> None:
    files = {path.name for path in write_figures(tmp_path, data())}
    pictures = {f"{name}.png" for name in (*figures.COMPARISON_PLOTS, *figures.SINGLE_RUN_PLOTS)}
    assert files == pictures | {"data.json"}
    for name in pictures:
        assert (tmp_path / "figures" / name).read_bytes().startswith(b"\x89PNG")
    kept = json.loads((tmp_path / "figures" / "data.json").read_text())
    assert kept["per_class_accuracy"][0] == 1.0


@pytest.mark.parametrize(
    ("missing", "gone"),
    [
        ("marginal", "marginal"), ("confidence", "confidence"), ("class_counts", "class_size"),
        ("history", "accuracy"), ("history", "cleaning"), ("history", "losses"),
        ("confusion", "confusion"), ("embedding", "embedding"),
    ],
)  # fmt: skip
def test_what_a_method_does_not_know_is_left_out(missing: str, gone: str) -> None:
    whole, some = data(), {key: value for key, value in data().items() if key != missing}
    if gone in figures.COMPARISON_PLOTS:
        assert figures.COMPARISON_PLOTS[gone]([Run("a", "a", whole)]) is not None
        assert figures.COMPARISON_PLOTS[gone]([Run("a", "a", some)]) is None
    else:
        assert figures.SINGLE_RUN_PLOTS[gone](whole) is not None
        assert figures.SINGLE_RUN_PLOTS[gone](some) is None


def test_a_run_without_anything_to_show_is_no_error(tmp_path: Path) -> None:
    assert [path.name for path in write_figures(tmp_path, {"method": "x"})] == ["data.json"]


def test_a_training_of_one_epoch_has_no_curve() -> None:
    once = {"history": [{"epoch": 1, "metrics": {"test/top1": 5.0}}]}
    twice = {"history": [{"epoch": e, "metrics": {"test/top1": 5.0}} for e in (1, 2)]}
    assert figures.plot_accuracy([Run("a", "a", once)]) is None
    assert figures.plot_accuracy([Run("a", "a", once), Run("b", "b", twice)]) is not None


def test_names_of_classes_do_not_lie_on_each_other() -> None:
    some = data(classes=6) | {"class_counts": [40] * 6, "per_class_accuracy": [0.5] * 6}
    figure = figures.plot_class_size([Run("a", "a", some)])
    assert figure is not None
    heights = sorted(text.xyann[1] for text in figure.axes[0].texts)  # of equal points
    assert len(heights) == 6
    assert min(b - a for a, b in pairwise(heights)) > 7  # points, the size of the letters


def test_the_axis_is_the_whole_training_in_whole_epochs_even_for_a_single_point() -> None:
    late = data()
    late["history"] = [{"epoch": e, "metrics": {"clean/f1": 0.5} if e == 9 else {}} for e in range(1, 10)]
    once = {"history": [{"epoch": 1, "metrics": {"test/top1": 5.0, "loss/ce": 1.0}}]}
    for figure, last in (
        (figures.plot_cleaning([Run("a", "a", late)]), 9),
        (figures.plot_losses(once), 1),
    ):
        assert figure is not None
        (ax,) = figure.axes
        low, high = ax.get_xlim()
        assert low <= 1 <= last <= high
        shown = [order_key for order_key in ax.get_xticks() if low <= order_key <= high]
        assert shown
        assert all(order_key == round(order_key) for order_key in shown)


def test_a_hundred_classes_and_several_runs_fit_into_one_picture() -> None:
    runs = [Run(name, name, data(100, name)) for name in ("prototypical", "cross_entropy", "dividemix")]
    for draw in figures.COMPARISON_PLOTS.values():
        assert draw(runs) is not None


def test_all_methods_at_once_are_named_below_the_picture_not_on_top_of_it() -> None:
    runs = [Run(name, name, data(method=name)) for name in METHODS]
    for draw in figures.COMPARISON_PLOTS.values():
        figure = draw(runs)
        assert figure is not None
        assert all(ax.get_legend() is None for ax in figure.axes)
        (legend,) = figure.legends
        assert len(legend.get_texts()) >= len(METHODS)


def test_the_names_have_the_colours_of_their_bars_where_a_run_has_only_one_of_the_panels() -> None:
    runs = [Run(name, name, data(method=name)) for name in ("prototypical", "cross_entropy")]
    del runs[1].data["group_f1"]
    figure = figures.plot_groups(runs)
    assert figure is not None
    (legend,) = figure.legends
    shown = [to_hex(patch.get_facecolor()).upper() for patch in legend.get_patches()]
    assert shown == [style(run.method)["color"] for run in runs]


def test_two_runs_of_a_method_differ_in_everything() -> None:
    names = ("prototypical", "prototypical", "ldam", "prototypical")
    found = figures.line_styles([Run(f"{k}", name, {}) for k, name in enumerate(names)])
    assert found[0] == style("prototypical")
    assert len({look["color"] for look in found}) == 4
    assert len({(look["linestyle"], look["marker"]) for look in found}) == 4


def test_a_method_looks_the_same_everywhere_and_no_two_known_methods_look_alike() -> None:
    looks = [tuple(style(name).values()) for name in METHODS]
    assert len(set(looks)) == len(looks)
    assert style("somebody's own") == style("somebody's own")


def test_the_embedding_shows_each_class_with_its_own_points() -> None:
    labels = np.array([0] * 20 + [1] * 7 + [2] * 3)
    figure = figures.plot_embedding({**data(3), "embedding_labels": labels})
    assert figure is not None
    drawn = {points.get_label(): len(points.get_offsets()) for points in figure.axes[0].collections}
    assert drawn == {"class 0": 20, "class 1": 7, "class 2": 3}
