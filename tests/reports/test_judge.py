"""Labels judged by models that have not learned them: scores, shares with intervals, safe corrections."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.reports.audit.actions import corrected_by, forecast
from pipeline.reports.audit.corrections import (
    How,
    corrected_labels,
    expected_after,
    safe_correction,
    safe_ways,
    surely_wrong,
)
from pipeline.reports.audit.findings import Findings, wrong_share
from pipeline.reports.audit.judge import Judgement, judge, typicality
from pipeline.reports.audit.shares import MIN_JUDGED, by_class, overall

CLASSES = 5


def clouds(seed: int, sizes: tuple[int, ...], noise: float, apart: float = 2.5) -> tuple[np.ndarray, ...]:
    """(features, given, true): a normal cloud for every class, and labels of which a part is wrong."""
    rng = np.random.default_rng(seed)
    centre = rng.normal(size=(len(sizes), 12)) * apart / 12**0.5 * 2
    true = np.repeat(np.arange(len(sizes)), sizes)
    x = centre[true] + rng.normal(size=(len(true), 12))
    flip = rng.random(len(true)) < noise
    given = np.where(flip, (true + rng.integers(1, len(sizes), len(true))) % len(sizes), true)
    return x.astype(np.float32), given, true


def judged(x: np.ndarray, given: np.ndarray, classes: int, simulations: int = 0) -> tuple[Judgement, list[Judgement]]:
    return judge(torch.from_numpy(x), given, classes, 0, 256, simulations)


def test_no_label_takes_part_in_its_own_judgement_and_wrong_ones_are_found() -> None:
    x, given, true = clouds(1, (80, 60, 40, 30, 20), 0.3, apart=4)
    found, _ = judged(x, given, CLASSES)
    wrong = given != true
    assert found.right[wrong].mean() < 0.2 < 0.8 < found.right[~wrong].mean()
    assert (found.other[wrong] == true[wrong]).mean() > 0.9
    assert (found.other != given).all()
    assert (found.right + found.other_right <= 1 + 1e-5).all()


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Four data sets: of 20 classes nine in ten are held, and intervals are no wider than they need to be. benchmarks/audit.py
    has many more."""
    held, total_held, width = [], [], []
    for seed, noise in enumerate((0.0, 0.15, 0.3, 0.4)):
        x, given, true = clouds(10 + seed, (90, 60, 40, 30, 20), noise)
        own, simulated = judged(x, given, CLASSES, simulations=3)
        wrong = given != true
        none = np.zeros(len(given), bool)
        for k, share in enumerate(by_class(own, simulated, given, none, CLASSES)):
            held.append(share.low <= wrong[given == k].mean() <= share.high)
            width.append(share.high - share.low)
        everything = overall(own, simulated, given, none, CLASSES)
        total_held.append(everything.low <= wrong.mean() <= everything.high)
    assert np.mean(held) >= 0.9
    assert sum(total_held) >= 3
    assert np.mean(width) < 0.35


def test_what_is_not_known_is_not_judged() -> None:
    given = np.repeat([0, 1, 2], [40, 40, MIN_JUDGED - 1])
    x = np.random.default_rng(0).normal(size=(len(given), 6)) + 3 * given[:, None]
    own, simulated = judged(x.astype(np.float32), given, 3, simulations=2)
    none = np.zeros(len(given), bool)
    assert [share.judged for share in by_class(own, simulated, given, none, 3)] == [True, True, False]
    assert overall(own, simulated, given, none, 3).total == 80
    assert not overall(own, [], given, none, 3).judged  # without simulations no interval
    assert not overall(None, [], given, none, 3).judged


def test_corrections_act_only_above_the_bound_and_never_on_what_is_not_judged() -> None:
    given = np.repeat([0, 1, 2], [20, 20, 5])
    right, other = np.full(45, 0.95), (given + 1) % 2
    right[[0, 20, 40]] = 0.02  # sure, of each class; the last has too few labels to be judged
    right[[1, 21]] = 0.15  # not sure enough
    other[3], right[3] = 2, 0.01  # into the class that is not judged
    one = Judgement(given, right, other, 1 - right)
    dropped = corrected_labels(one, 3, ["drop"], 0.9, 45)
    assert np.flatnonzero(~dropped.keep).tolist() == [0, 3, 20]
    assert (dropped.label == given).all()
    relabelled = corrected_labels(one, 3, ["relabel"], 0.9, 45)
    assert np.flatnonzero(relabelled.label != given).tolist() == [0, 20]
    assert relabelled.keep.all()
    emptied = Judgement(given, np.where(given == 1, 0.01, 0.99), other, np.where(given == 1, 0.99, 0.01))
    assert corrected_labels(emptied, 3, ["drop"], 0.9, 45).spared == [1]
    assert corrected_labels(emptied, 3, ["drop"], 0.9, 45).keep.all()
    both = corrected_labels(one, 3, ["drop", "relabel"], 0.9, 45)
    assert np.flatnonzero(both.label != given).tolist() == [0, 20]
    assert np.flatnonzero(~both.keep).tolist() == [3]  # it has no other label to go to
    right[20] = 0.01
    fewer = corrected_labels(Judgement(given, right, other, 1 - right), 3, ["drop", "relabel"], 0.9, 1)
    assert np.flatnonzero(fewer.label != given).tolist() == [20]  # the surest
    assert np.flatnonzero(~fewer.keep).tolist() == [0, 3]
    untouched = corrected_labels(one, 3, ["drop", "relabel"], 0.9, 0)
    assert not untouched.changed(given).any()


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.4])
def test_no_correction_makes_labels_worse_and_the_forecast_holds(noise: float) -> None:
    x, given, true = clouds(int(100 * noise) + 3, (90, 60, 40, 30, 20), noise)
    own, simulated = judged(x, given, CLASSES, simulations=3)
    found = Findings(given, true, own.other, own.right, own.other_right, None, given, own.right < 0.5, "", [])
    found.judgement, found.simulated = own, simulated
    before = (given != true).mean()
    assert wrong_share(found, CLASSES).low <= before <= wrong_share(found, CLASSES).high
    hows: tuple[How, ...] = ("drop", "relabel")
    for how in hows:
        done = safe_correction(found, CLASSES, [how], 0.9)
        after = (done.label != true)[done.keep].mean()
        assert after <= before
        assert noise == 0 or after < 0.75 * before
        forecast = expected_after(found, CLASSES, [how], 0.9)
        assert forecast is not None
        assert forecast.low <= after <= forecast.high


def swapped(seed: int, wrong: bool) -> Judgement:
    """200 labels of two classes, 60 of them judged to be wrong. They are, or (`wrong`) the judge has taken the classes for each
    other and a third of these 60 are right."""
    rng = np.random.default_rng(seed)
    given = np.repeat([0, 1], 100)
    doubted = np.isin(np.arange(200), rng.permutation(200)[:60])
    misjudged = doubted & (rng.random(200) < 0.35) & wrong
    right = np.where(doubted, 0.03, 0.97)
    return Judgement(given, right, 1 - given, 1 - right, np.where(doubted & ~misjudged, 1 - given, given))


def test_nothing_is_corrected_where_simulated_corrections_do_not_lower_the_share() -> None:
    """The judge is sure of every label, but in two of four simulations it is wrong about a third of what it doubts."""
    own = swapped(0, False)
    found = Findings(
        own.given, own.given, own.other, own.right, own.other_right, None, own.given, own.right < 0.5, "", []
    )
    found.judgement = own
    found.simulated = [swapped(k, False) for k in range(1, 5)]
    assert safe_ways(found, 2, ["drop", "relabel"], 0.9) == ["drop", "relabel"]
    assert safe_correction(found, 2, ["relabel"], 0.9).changed(own.given).sum() > 40
    found.simulated = [swapped(k, k % 2 == 0) for k in range(1, 5)]
    assert surely_wrong(found, 2) > 0
    assert safe_ways(found, 2, ["relabel"], 0.9) == []
    assert not safe_correction(found, 2, ["relabel"], 0.9).changed(own.given).any()
    assert "relabel changes nothing" in forecast(["relabel"], found, 2, 0.9)


def test_pictures_of_no_class_are_dropped_but_not_from_classes_that_are_not_judged() -> None:
    own = swapped(0, False)
    given = np.where(np.arange(200) >= 195, 2, own.given)  # five labels of a third class
    found = Findings(given, given, own.other, own.right, own.other_right, None, given, own.right < 0.5, "", [])
    found.judgement, found.simulated = own, [swapped(k, False) for k in range(1, 5)]
    found.outlier = np.isin(np.arange(200), [3, 120, 197])
    done = corrected_by(["drop-outliers"], found, None, None, 3, 0.9)
    assert np.flatnonzero(~done.keep).tolist() == [3, 120]
    assert (done.label == given).all()


def test_a_picture_like_none_of_the_classes_is_not_typical() -> None:
    """One that is far from all others, and one of many that are alike but have all kinds of labels."""
    x, _, true = clouds(5, (50, 50, 50), 0.0, apart=4)
    far = np.random.default_rng(1).normal(size=(1, 12)).astype(np.float32) * 0.1
    far[:, 0] = -9
    alike = np.random.default_rng(2).normal(size=(20, 12)).astype(np.float32) * 0.3
    alike[:, 1] = 9
    rows = np.concatenate([x, far, alike])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    inside = np.arange(len(rows)) < len(true)
    right = np.where(inside, 0.99, 0.1)
    right[-3:] = 0.9  # by chance their labels agree with those of their neighbours
    trusted = right > 0.5
    found = typicality(rows, right, trusted)
    assert (found[~inside] < 0.03).all()
    assert found[inside].mean() == pytest.approx(0.5, abs=0.04)
    assert (typicality(rows, right, np.zeros(len(rows), bool)) == 1).all()
