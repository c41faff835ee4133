"""The bias that is injected is exactly the one the literature describes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shards_help import Build

from shards import bias
from shards.base.errors import UserError
from shards.reader import open_split

CIFAR10 = {
    10: [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500],
    50: [5000, 3237, 2096, 1357, 878, 568, 368, 238, 154, 100],
    100: [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50],
}


def clean(counts: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(counts)), counts).astype(np.int32)


def noisy(
    labels: np.ndarray, ratio: float, kind: str, seed: int = 0, wrong: dict[int, int] | None = None
) -> np.ndarray:
    rng = bias.generator(seed, "noise")
    shuffled, draws = rng.permutation(len(labels)), rng.random(len(labels))
    return bias.add_noise(labels, np.arange(len(labels)), labels.max() + 1, ratio, kind, shuffled, draws, wrong)


@pytest.mark.parametrize("rho", [10, 50, 100])
def test_cifar10_class_sizes(rho: int) -> None:
    assert bias.tail_counts(5000, 10, rho).tolist() == CIFAR10[rho]


@pytest.mark.parametrize(
    ("classes", "largest", "rho", "total", "smallest"),
    [
        (10, 5000, 1, 50000, 5000),
        (10, 5000, 10, 20431, 500),
        (10, 5000, 50, 13996, 100),
        (10, 5000, 100, 12406, 50),
        (100, 500, 1, 50000, 500),
        (100, 500, 10, 19573, 50),
        (100, 500, 50, 12608, 10),
        (100, 500, 100, 10847, 5),
    ],
)
def test_totals_of_the_literature(classes: int, largest: int, rho: float, total: int, smallest: int) -> None:
    counts = bias.tail_counts(largest, classes, rho)
    assert (counts.sum(), counts[0], counts[-1]) == (total, largest, smallest)


@pytest.mark.parametrize(("rho", "groups"), [(10, (69, 31, 0)), (50, (41, 41, 18)), (100, (35, 35, 30))])
def test_many_medium_few_of_cifar100(rho: int, groups: tuple[int, int, int]) -> None:
    members = bias.class_groups(bias.tail_counts(500, 100, rho))
    assert tuple(int(members[name].sum()) for name in ("many", "medium", "few")) == groups


@pytest.mark.parametrize(
    ("counts", "ratio", "k", "count", "correct"),
    [
        (CIFAR10[100], 0.5, 0, 4277.7, 0.584),
        (CIFAR10[100], 0.5, 1, 3098.4, 0.484),
        (CIFAR10[100], 0.5, 9, 59.6, 0.420),
        (CIFAR10[100], 0.2, 0, 4711.1, 0.849),
        (CIFAR10[100], 0.2, 9, 53.8, 0.743),
        (bias.tail_counts(500, 100, 100).tolist(), 0.5, 0, 494.1, 0.506),
        (bias.tail_counts(500, 100, 100).tolist(), 0.5, 99, 5.1, 0.494),
    ],
)
def test_expected_noisy_counts(counts: list[int], ratio: float, k: int, count: float, correct: float) -> None:
    sizes = np.array(counts)
    matrix = bias.transition(sizes, ratio, "prior")
    expected = sizes @ matrix
    assert expected[k] == pytest.approx(count, abs=0.05)
    assert sizes[k] * matrix[k, k] / expected[k] == pytest.approx(correct, abs=0.0005)


@pytest.mark.parametrize("kind", ["prior", "symmetric", "effective"])
def test_drawn_labels_follow_the_expected_matrix(kind: str) -> None:
    counts = np.array(CIFAR10[100])
    labels = clean(CIFAR10[100])
    expected = counts[:, None] * bias.transition(counts, 0.5, kind)
    seen = np.mean(
        [np.bincount(labels * 10 + noisy(labels, 0.5, kind, seed), minlength=100) for seed in range(40)],
        axis=0,
    ).reshape(10, 10)
    # 5 standard errors of a mean of 40 draws, and a little for the exact total
    assert np.all(np.abs(seen - expected) < 5 * np.sqrt(expected.clip(0.1) / 40) + 0.5)


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 60), min_size=2, max_size=12),
    ratio=st.floats(0, 0.99),
    kind=st.sampled_from(["prior", "symmetric"]),
    seed=st.integers(0, 5),
)
def test_exactly_so_many_flips_and_never_to_itself(counts: list[int], ratio: float, kind: str, seed: int) -> None:
    labels = clean(counts)
    changed = noisy(labels, ratio, kind, seed)
    assert (changed != labels).sum() == int(ratio * len(labels))
    assert changed.min() >= 0
    assert changed.max() < len(counts)


def test_effective_noise_keeps_the_ratio_although_labels_may_come_back() -> None:
    labels = clean(CIFAR10[100])
    wrong = [(noisy(labels, 0.4, "effective", seed) != labels).mean() for seed in range(20)]
    assert np.mean(wrong) == pytest.approx(0.4, abs=0.005)
    assert bias.flip_count(np.array(CIFAR10[100]), 0.4, "effective") > int(0.4 * len(labels))


def test_effective_noise_says_when_it_cannot_be_reached() -> None:
    with pytest.raises(UserError, match=r"noise=0\.9 cannot be reached.*noise_kind=prior"):
        bias.flip_count(np.array([100, 10]), 0.9, "effective")


def test_asymmetric_noise_follows_the_map_only() -> None:
    labels = clean([50, 40, 30])
    changed = noisy(labels, 0.4, "asymmetric", wrong={2: 0})
    assert (changed != labels).sum() == 12
    assert set(labels[changed != labels]) == {2}
    assert set(changed[changed != labels]) == {0}


def test_noise_is_a_function_of_its_seed() -> None:
    labels = clean([50, 40, 30])
    assert np.array_equal(noisy(labels, 0.5, "prior", 1), noisy(labels, 0.5, "prior", 1))
    assert not np.array_equal(noisy(labels, 0.5, "prior", 1), noisy(labels, 0.5, "prior", 2))


def test_the_sorted_tail_takes_what_there_is() -> None:
    available = np.array([40, 100, 7, 90])
    # by size: 100, 90, 40, 7 against targets 100, 27, 7, 1 (rho = 50 over four classes)
    assert bias.tail_counts(100, 4, 50).tolist() == [100, 27, 7, 2]
    assert bias.sorted_tail_counts(available, 50).tolist() == [7, 100, 2, 27]
    short = np.array([100, 5, 4, 3])
    assert bias.sorted_tail_counts(short, 10).tolist() == [100, 5, 4, 3]
    assert bias.sorted_tail_counts(available, 2).tolist() == available.tolist()


def test_a_class_keeps_the_first_of_its_shuffled_rows() -> None:
    labels = np.array([0, 1, 0, 1, 0, 1])
    shuffled = np.array([4, 5, 0, 3, 2, 1])
    assert bias.keep_rows(labels, np.arange(6), np.array([2, 1]), shuffled).tolist() == [0, 4, 5]
    without_four = np.array([0, 1, 2, 3, 5])
    assert bias.keep_rows(labels, without_four, np.array([2, 1]), shuffled).tolist() == [0, 2, 5]


def test_the_held_out_part_is_stratified() -> None:
    labels = clean([100, 50, 2, 1])
    test = bias.hold_out(labels, np.arange(len(labels)), 4, 0.1, bias.generator(0, "x").permutation(len(labels)))
    assert bias.counts_of(labels[test], 4).tolist() == [10, 5, 1, 0]


def test_manifest_and_evaluation_share_the_bounds_of_many_medium_and_few(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.evaluation.accuracy import class_groups

    monkeypatch.setattr(bias, "MANY", 60)
    monkeypatch.setattr(bias, "FEW", 30)
    split = open_split(build())
    expected = {name: np.flatnonzero(members).tolist() for name, members in class_groups(split.clean_counts).items()}
    assert split.manifest.groups == expected
    assert expected["many"] == np.flatnonzero(split.clean_counts > 60).tolist()
    assert expected["few"] == np.flatnonzero(split.clean_counts < 30).tolist()
