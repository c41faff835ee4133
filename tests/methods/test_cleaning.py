"""Threshold, refined labels, weights and neighbours against the arithmetic of the paper and slow references."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.methods.options import PrototypicalOptions
from pipeline.methods.parts.cleaning import refine, threshold_at, transfer_schedule


def at(epoch: int, epochs: int = 200, classes: int = 10, **options) -> float:
    return threshold_at(PrototypicalOptions(**options), epoch, epochs, classes)


@pytest.mark.parametrize(
    ("start", "first", "last_epoch", "at_first", "at_last"),
    [(0.1, 5, 199, 0.1025, 0.2698), (0.01, 15, 199, 0.0108, 0.0270), (0.05, 15, 39, 0.0539, 0.0607)],
)
def test_exponential_threshold_of_the_three_data_sets(start, first, last_epoch, at_first, at_last) -> None:
    assert at(first, threshold="exponential", threshold_start=start) == pytest.approx(at_first, abs=5e-5)
    assert at(last_epoch, threshold="exponential", threshold_start=start) == pytest.approx(at_last, abs=5e-5)


@pytest.mark.parametrize(("growth", "end"), [(1.003, 0.1815), (1.005, 0.2698), (1.007, 0.4007), (1.01, 0.7244)])
def test_growths_of_the_appendix(growth, end) -> None:
    assert at(199, threshold="exponential", threshold_growth=growth) == pytest.approx(end, abs=5e-5)


@pytest.mark.parametrize(("end", "last"), [(0.2, 0.1995), (0.3, 0.299), (0.4, 0.3985), (0.5, 0.498)])
def test_linear_thresholds_of_the_appendix(end, last) -> None:
    assert at(0, threshold="linear", threshold_end=end) == 0.1
    assert at(199, threshold="linear", threshold_end=end) == pytest.approx(last, abs=1e-9)


def test_fixed_threshold_never_moves() -> None:
    assert at(0, threshold="fixed") == at(199, threshold="fixed") == 0.1


@given(st.integers(2, 2000), st.integers(1, 300))
def test_transferred_threshold_goes_from_chance_to_the_end_cosine(classes, epochs) -> None:
    start, growth = transfer_schedule(classes, epochs, 0.3, 0.33)
    assert start == 1 / classes
    end = start * growth**epochs
    cosine = 0.3 * math.log(end * (classes - 1) / (1 - end))  # the cosine that scores `end` with all others at 0
    assert cosine == pytest.approx(0.33, abs=1e-6)


@pytest.mark.parametrize(
    ("classes", "temperature", "own", "other"),
    [(10, 1, 0.2524, 0.0831), (10, 0.3, 0.8185, 0.0202), (50, 1, 0.0536, 0.0193), (50, 0.3, 0.3798, 0.0127),
     (100, 1, 0.0270, 0.0098), (100, 0.3, 0.2265, 0.0078)],
)  # fmt: skip
def test_scores_of_a_sample_on_a_prototype_of_a_simplex(classes, temperature, own, other) -> None:
    cosines = torch.full((1, classes), -1 / (classes - 1)).double()
    cosines[0, 0] = 1.0
    for label, expected in ((0, own), (1, other)):
        score = refine(cosines / temperature, torch.tensor([label]), 0.0, "half").score
        assert float(score) == pytest.approx(expected, abs=5e-5)


def test_everything_is_doubted_when_the_threshold_passes_the_ceiling() -> None:
    logits = torch.full((4, 10), -1 / 9)
    logits[torch.arange(4), torch.arange(4)] = 1.0
    cleaned = refine(logits / 0.3, torch.arange(4), 0.82, "half")
    assert not cleaned.clean.any()
    assert torch.equal(cleaned.label, torch.arange(4))  # doubtful, unchanged


def slow_refine(logits: np.ndarray, given_labels: np.ndarray, threshold: float, rule: str):
    out = []
    for row, y in zip(logits.astype(np.float64), given_labels):
        q = np.exp(row - row.max())
        q /= q.sum()
        s = q[y]
        if s > threshold:
            out.append((y, True, s))
        else:
            out.append((int(q.argmax()), False, (threshold - s) / 2 if rule == "margin" else s / 2))
    return out


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.01, 0.9), st.sampled_from(["margin", "half"]))
def test_refinement_follows_the_equations(seed, threshold, rule) -> None:
    rng = np.random.default_rng(seed)
    logits, labels = rng.normal(size=(20, 5)) * 3, rng.integers(0, 5, 20)
    cleaned = refine(torch.from_numpy(logits).float(), torch.from_numpy(labels), threshold, rule)
    for i, (label, clean, weight) in enumerate(slow_refine(logits, labels, threshold, rule)):
        if abs(float(cleaned.score[i]) - threshold) < 1e-6:
            continue  # at the edge the precision decides
        assert (int(cleaned.label[i]), bool(cleaned.clean[i])) == (label, clean)
        assert float(cleaned.weight[i]) == pytest.approx(weight, abs=1e-6)
    assert (cleaned.weight >= 0).all()


def test_without_reweighting_everybody_counts_one_but_the_hopeless_can_be_dropped() -> None:
    logits = torch.zeros(3, 100)  # every score is 0.01
    assert (refine(logits, torch.zeros(3, dtype=torch.long), 0.5, "one").weight == 1).all()
    assert (refine(logits, torch.zeros(3, dtype=torch.long), 0.5, "one", min_score=0.02).weight == 0).all()
