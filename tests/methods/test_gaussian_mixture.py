"""Mixture fits: right on two heaps, and an answer for everything that is not two heaps."""

import numpy as np
import pytest
import torch

from pipeline.methods.parts.gaussian_mixture import Fit, normalised, posterior, posterior_by_class, sharpen

FIT = Fit(10, 1e-2, 5e-4)


def two_heaps(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.normal(0.1, 0.04, 150), rng.normal(0.7, 0.1, 50)])


def test_the_better_component_holds_the_better_heap() -> None:
    values = normalised(two_heaps(), "small")
    small, large = posterior(values, "small", FIT), posterior(values, "large", FIT)
    assert (small > 0.5).tolist() == [True] * 150 + [False] * 50
    assert np.allclose(small + large, 1, atol=1e-6)


def test_the_posterior_is_the_formula_of_the_fitted_mixture() -> None:
    """Expectation-maximisation written out, started where k-means ends in one dimension: the best cut."""
    x = normalised(two_heaps(1), "small")
    ranked = np.sort(x)
    spread = [ranked[:i].var() * i + ranked[i:].var() * (len(x) - i) for i in range(1, len(x))]
    cut = ranked[int(np.argmin(spread)) + 1]
    chance = np.stack([x < cut, x >= cut], 1).astype(float)
    bound = -np.inf
    for _ in range(11):  # the first round only turns the cut into Gaussians
        share = chance.sum(0) + 10 * np.finfo(float).eps
        mean = (chance * x[:, None]).sum(0) / share
        variance = (chance * (x[:, None] - mean) ** 2).sum(0) / share + FIT.floor
        bell = np.exp(-((x[:, None] - mean) ** 2) / 2 / variance) / np.sqrt(2 * np.pi * variance)
        density = share / len(x) * bell
        before, bound = bound, np.log(density.sum(1)).mean()
        chance = density / density.sum(1, keepdims=True)
        if abs(bound - before) < FIT.tolerance:
            break
    assert posterior(x, "small", FIT) == pytest.approx(chance[:, 0], abs=2e-3)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_all_are_believed_when_there_is_nothing_to_tell_apart(n) -> None:
    for better in ("small", "large"):
        assert posterior(normalised(np.full(n, 0.3), better), better, FIT).tolist() == [1.0] * n


def test_two_samples_are_enough_for_two_components() -> None:
    assert posterior(np.array([0.0, 1.0]), "small", FIT) == pytest.approx([1, 0], abs=1e-3)


def test_values_that_are_not_finite_are_the_worst() -> None:
    broken = np.array([1.0, np.nan, 3.0, np.inf])
    assert normalised(broken, "small").tolist() == [0, 1, 1, 1]
    assert normalised(broken, "large").tolist() == [0, 0, 1, 0]
    assert normalised(np.full(3, np.nan), "small").tolist() == [0, 0, 0]


def test_each_class_has_a_mixture_of_its_own() -> None:
    """A class with ten times the loss is not called wrong for it; one sample and no sample are no trouble."""
    values = np.concatenate([two_heaps(0), 10 * two_heaps(1), [5.0]])
    label = np.repeat([0, 1, 3], [200, 200, 1])
    found = posterior_by_class(values, label, 5, "small", Fit())
    assert (found > 0.5).tolist() == ([True] * 150 + [False] * 50) * 2 + [True]


def test_sharpening_keeps_distributions() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]], dtype=torch.float64)
    squares = torch.tensor([0.25, 0.09, 0.04], dtype=torch.float64)
    assert torch.allclose(sharpen(p, 0.5), torch.stack([squares / 0.38, p[1]]))
    assert torch.allclose(sharpen(p, 1.0), p)
