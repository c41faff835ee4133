"""Nearest neighbours against every pair in float64: exact in any blocks, ties by index, never the sample itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.methods.parts.nearest_neighbors import nearest_neighbors


def slow(query: np.ndarray, bank: np.ndarray, k: int, own: list[int]) -> tuple[list[list[float]], list[list[int]]]:
    """Every pair, sorted by similarity and then by index; the sample itself counts as -inf."""
    values, indices = [], []
    for row, itself in zip(query.astype(np.float64), own):
        pairs = [(-math.inf if j == itself else float(row @ other), j) for j, other in enumerate(bank)]
        best = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:k]
        values.append([value for value, _ in best])
        indices.append([j for _, j in best])
    return values, indices


def found(query: np.ndarray, bank: np.ndarray, k: int, own: list[int] | None, block: int, bank_block: int):
    own_n = None if own is None else torch.tensor(own, dtype=torch.long)
    value, index = nearest_neighbors(
        torch.from_numpy(query).float(), torch.from_numpy(bank).float(), k, own_n, block, bank_block
    )
    assert value.dtype == torch.float32
    return value.tolist(), index.tolist()


SIZES = dict(
    seed=st.integers(0, 10_000), n=st.integers(1, 30), k=st.integers(1, 12), block=st.integers(1, 9),
    bank_block=st.integers(0, 9),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(**SIZES)
def test_ties_and_duplicates_are_ordered_by_index_in_any_blocks(seed, n, k, block, bank_block) -> None:
    """Small whole numbers: products are exact, and most rows have ties, also at the last place and across blocks."""
    bank = np.random.default_rng(seed).integers(-1, 2, (n, 3)).astype(np.float64)
    own = list(range(n))
    assert found(bank, bank, k, own, block, bank_block) == slow(bank, bank, k, own)
    assert found(bank, bank, k, None, block, bank_block) == slow(bank, bank, k, [-1] * n)


@settings(max_examples=30, deadline=None)
@given(**SIZES)
def test_unit_vectors_have_the_neighbours_of_float64(seed, n, k, block, bank_block) -> None:
    z = np.random.default_rng(seed).normal(size=(n, 4))
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    part = slice(n // 3, n)  # a rank that holds only some rows
    own = list(range(n))[part]
    value, index = found(z[part], z, k, own, block, bank_block)
    expected, _ = slow(z[part], z, k, own)
    assert np.array(value) == pytest.approx(np.array(expected), abs=1e-6)
    for row, itself, columns, values in zip(z[part], own, index, value):
        assert len(set(columns)) == len(columns)
        real = [-math.inf if j == itself else float(row @ z[j]) for j in columns]
        assert real == pytest.approx(values, abs=1e-6)


def test_fewer_candidates_than_asked_for() -> None:
    z = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert found(z, z, 5, None, 4, 0) == ([[1, 0], [1, 0]], [[0, 1], [1, 0]])
    assert found(z, z, 5, [0, 1], 4, 0) == ([[0, -math.inf], [0, -math.inf]], [[1, 0], [0, 1]])
    assert found(z[:1], z[:1], 1, [0], 4, 4) == ([[-math.inf]], [[0]])  # alone
    assert found(z, z[:0], 3, None, 4, 0) == ([[], []], [[], []])
    assert found(z[:0], z, 3, None, 4, 0) == ([], [])
    assert found(z, z, 0, None, 4, 0) == ([[], []], [[], []])


def test_queries_that_are_not_in_the_bank_leave_nothing_out() -> None:
    z = np.eye(3)
    assert found(z, z[:2], 2, [0, -1, -1], 2, 1)[1] == [[1, 0], [1, 0], [0, 1]]


def test_half_precision_is_searched_in_float32() -> None:
    z = torch.tensor([[1.0, 1.0], [1.0, 1.0078125], [1.0, 1.0]], dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, index = nearest_neighbors(z, z, 1, torch.arange(3))
    assert value.dtype == torch.float32
    assert index[:, 0].tolist() == [1, 0, 1]
