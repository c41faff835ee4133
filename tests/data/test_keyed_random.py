"""Keyed random numbers: the same key gives the same number anywhere, different keys give unrelated ones."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.keyed_random import keyed_generator, uniform

index = np.arange(20_000)


def test_a_row_depends_on_its_index_alone():
    whole = uniform((1, 2, 3), index, 4)
    assert (uniform((1, 2, 3), index[::-1], 4)[::-1] == whole).all()
    assert (uniform((1, 2, 3), index[777:778], 4) == whole[777]).all()


@given(st.integers(1, 8))
def test_more_draws_leave_the_first_ones_as_they_were(draws):
    assert (uniform((5,), index[:50], 8)[:, :draws] == uniform((5,), index[:50], draws)).all()


def test_numbers_are_uniform():
    cells = uniform((0, 0, 0), index, 5)
    assert cells.min() >= 0
    assert cells.max() < 1
    counts = np.histogram(cells, 50, (0, 1))[0]
    expected = cells.size / 50
    assert ((counts - expected) ** 2 / expected).sum() < 86  # chi-square, 49 degrees of freedom, p = 0.001


def test_neighbouring_keys_indices_and_draws_are_uncorrelated():
    base = uniform((3, 4, 5), index, 3)
    others = [uniform(key, index, 3)[:, 0] for key in ((4, 4, 5), (3, 5, 5), (3, 4, 6), (3, 4), (3, 4, 5, 0))]
    others += [base[:, 1], base[:, 2], np.roll(base[:, 0], 1)]
    for other in others:
        assert abs(np.corrcoef(base[:, 0], other)[0, 1]) < 0.03  # 4 sigma at 20 000 pairs


def test_generators_of_different_keys_differ_even_by_trailing_zeros():
    keys = [(1, 2), (1, 2, 0), (1, 2, 0, 0), (2, 1), (1, 3)]
    assert len({keyed_generator(*key).integers(1 << 62) for key in keys}) == len(keys)
    assert keyed_generator(1, 2).integers(1 << 62) == keyed_generator(1, 2).integers(1 << 62)
