"""RoLT+: its division written the slow way, and classes too small or too alike for a mixture."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from rivals import Course, Pictures, batch_of, make_method, small_config, survey_of
from sklearn.mixture import GaussianMixture

from pipeline.methods.ldam import class_weights
from pipeline.methods.rolt import RoLT

K, D, N = 3, 5, 90


def divider(given: np.ndarray, classes: int = K, **options: object) -> RoLT:
    config = small_config({"name": "rolt", "warmup": 0.25, **options}, train={"epochs": 8})
    method = make_method(config, given, classes)
    assert isinstance(method, RoLT)
    method.set_epoch(0, 4)
    return method


def clouds() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features around a point per true class, every fifth label wrong; classes differ in spread and size."""
    rng = np.random.default_rng(0)
    true = np.repeat([0, 1, 2], [50, 25, 15])
    given = np.where(np.arange(N) % 5 == 0, (true + 1) % K, true).astype(np.int32)
    features = rng.normal(size=(K, D))[true] * 3 + rng.normal(size=(N, D)) * np.array([0.2, 0.6, 0.4])[true][:, None]
    return features, given, true


def slow_belief(features: np.ndarray, given: np.ndarray) -> np.ndarray:
    """As published, one sample and one class at a time."""
    mean = sum(features) / N
    rows = [(f - mean) / math.sqrt(sum((f - mean) ** 2)) for f in features]

    def fit(trusted: list[int]) -> np.ndarray:
        out = np.zeros(N)
        for k in range(K):
            members = [i for i in range(N) if given[i] == k]
            near = [i for i in members if i in trusted] or members
            centroid = sum(rows[i] for i in near) / len(near)
            value = np.array([-sum((rows[i] - centroid) ** 2) for i in members])
            value = ((value - value.min()) / (value - value.min()).max())[:, None]
            mixture = GaussianMixture(2, random_state=0).fit(value)
            out[members] = mixture.predict_proba(value)[:, mixture.means_[:, 0].argmax()]
        return out

    first = fit(list(range(N)))
    return fit([i for i in range(N) if first[i] > 0.5])


def test_the_division_is_the_published_one() -> None:
    features, given, true = clouds()
    method = divider(given)
    outputs = {"features0": torch.from_numpy(features).float(), "features1": torch.randn(N, D)}
    outputs |= method.votes_and_losses([torch.zeros(N, K)] * 2, torch.from_numpy(given).long())
    method.begin_epoch(survey_of(outputs))
    assert method.belief[0].numpy() == pytest.approx(slow_belief(features, given), abs=1e-3)
    assert ((method.belief[0].numpy() > 0.5) == (given == true)).mean() > 0.95


def test_labelled_rows_are_weighted_by_class_late_in_the_training() -> None:
    given = Pictures().given
    method = divider(given, reweight_start=0.5)
    batch = batch_of(method, 6, views=("weak", "weak2"))
    late = method.labelled_weight(batch)
    method.set_epoch(0, 3)
    early = method.labelled_weight(batch)
    expected = batch.valid * class_weights(np.bincount(given), 0.9999)[batch.label]
    assert torch.equal(early, batch.valid.repeat(2))
    assert torch.equal(late, expected.repeat(2))


# -- what breaks the original --------------------------------------------------------------------------------


def test_a_class_with_one_sample_or_equal_features_is_believed() -> None:
    """Class 0 is ordinary, class 1 has one sample, class 2 nobody, class 3 ten times the same picture."""
    rng = np.random.default_rng(0)
    given = np.repeat([0, 1, 3], [20, 1, 10]).astype(np.int32)
    features = torch.from_numpy(rng.normal(size=(31, D))).float()
    features[21:] = 1.0
    method = divider(given, 4)
    outputs = {"features0": features, "features1": torch.zeros(31, D)}
    outputs |= method.votes_and_losses([torch.zeros(31, 4)] * 2, torch.from_numpy(given).long())
    method.begin_epoch(survey_of(outputs))
    assert (method.belief[0, 20:] == 1).all()
    assert (method.belief[1] == 1).all()  # a network that says the same of everybody
    assert torch.isfinite(method.belief).all()


def test_a_class_nobody_trusts_takes_the_mean_of_all_its_samples() -> None:
    method = divider(np.array([0, 0, 1, 1], np.int32), 2)
    rows = torch.tensor([[1.0, 0], [0, 1], [2, 0], [4, 0]])
    centroids, count = method.centroids(rows, torch.tensor([0, 0, 1, 1]), torch.tensor([0.0, 0, 1, 0]))
    assert centroids.tolist() == [[0.5, 0.5], [2, 0]]
    assert count.tolist() == [0, 1]


def test_a_hundred_classes_with_five_pictures_each_train() -> None:
    config = small_config({"name": "rolt", "warmup": 0.5}, train={"epochs": 2}, data={"batch": 256, "mix_group": 64})
    losses = list(Course(config, Pictures(500, 100, even=True), 100).steps())
    assert all(math.isfinite(found["loss"]) for found in losses)
