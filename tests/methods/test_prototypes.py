"""Prototypes: weighted means on the sphere, whoever holds which samples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.distributed.world import World
from pipeline.methods.parts.prototypes import class_prototypes, class_sums


def random_part(seed: int, n: int = 40, classes: int = 5, width: int = 6):
    rng = np.random.default_rng(seed)
    z = torch.nn.functional.normalize(torch.from_numpy(rng.normal(size=(n, width))).float(), dim=1)
    return z, torch.from_numpy(rng.integers(0, classes, n)), torch.from_numpy(rng.random(n)).float()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_prototypes_are_normalised_weighted_means(seed) -> None:
    z, label, weight = random_part(seed)
    found, empty = class_prototypes(z, label, weight, torch.zeros(5, 6), World())
    for k in range(5):
        rows = label == k
        if not rows.any():
            assert empty[k]
            continue
        mean = (weight[rows, None].double() * z[rows].double()).sum(0) / weight[rows].double().sum()
        assert torch.allclose(found[k].double(), mean / mean.norm(), atol=1e-6)
        assert float(found[k].norm()) == pytest.approx(1, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_the_order_of_samples_changes_nothing(seed) -> None:
    z, label, weight = random_part(seed)
    mixed = torch.randperm(len(z))
    a, _ = class_prototypes(z, label, weight, torch.zeros(5, 6), World())
    b, _ = class_prototypes(z[mixed], label[mixed], weight[mixed], torch.zeros(5, 6), World())
    assert torch.allclose(a, b, atol=1e-7)


def test_a_class_nobody_stands_for_keeps_its_prototype() -> None:
    z, label, weight = random_part(0)
    previous = torch.nn.functional.normalize(torch.randn(5, 6), dim=1)
    weight[label == 2] = 0.0  # present, but nobody is believed
    found, empty = class_prototypes(z, label, weight, previous, World())
    assert empty.tolist() == [False, False, True, False, False]
    assert torch.equal(found[2], previous[2])
    assert torch.isfinite(found).all()


def test_sums_are_in_float64_and_carry_the_weight_last() -> None:
    z, label, weight = random_part(1)
    sums = class_sums(z, label, weight, 5)
    assert sums.dtype == torch.float64
    assert sums.shape == (5, 7)
    assert float(sums[:, -1].sum()) == pytest.approx(float(weight.double().sum()))
