"""Long tails and wrong labels, as pure functions of labels and a generator.

Samples are known by their row in the source. Draws are made for all rows of the source and looked up by
row, so taking one unreadable picture out changes next to nothing for the others.
"""

from __future__ import annotations

import math
import zlib
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from shards.base.errors import UserError

Ints = NDArray[np.int64]
MANY, FEW = 100, 20  # more than 100 training samples: many; fewer than 20: few


def generator(seed: int, purpose: str) -> np.random.Generator:
    """An independent stream for each purpose of one seed."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])


def counts_of(labels: NDArray[np.integer], classes: int) -> Ints:
    return np.bincount(labels, minlength=classes).astype(np.int64)


def tail_counts(largest: int, classes: int, rho: float) -> Ints:
    """N_k = floor(N_1 · (1/rho)^(k/(K-1))), k = 0..K-1."""
    if classes == 1:
        return np.array([largest])
    # The power is taken of 1/rho in double precision: other forms lose one sample in the last class.
    return np.array([int(largest * (1.0 / rho) ** (k / (classes - 1.0))) for k in range(classes)])


def sorted_tail_counts(available: Ints, rho: float) -> Ints:
    """The same curve laid over the classes by size; a class gives what it has. Up to 2 nothing changes."""
    if rho <= 2:
        return available.copy()
    by_size = np.argsort(-available, kind="stable")
    counts = np.empty_like(available)
    counts[by_size] = np.minimum(tail_counts(int(available.max()), len(available), rho), available[by_size])
    return counts


def keep_rows(labels: NDArray[np.integer], rows: Ints, counts: Ints, shuffled: Ints) -> Ints:
    """For each class k the first counts[k] of its rows in `shuffled` order; ascending. `labels` is by row."""
    wanted = np.zeros(len(labels), bool)
    wanted[rows] = True
    order = shuffled[wanted[shuffled]]
    by_class = np.argsort(labels[order], kind="stable")
    starts = np.concatenate([[0], np.cumsum(counts_of(labels[order], len(counts)))])
    parts = [order[by_class[a : a + n]] for a, n in zip(starts, counts)]
    return np.sort(np.concatenate([order[:0], *parts]))


def transition(counts: Ints, ratio: float, kind: str, wrong: dict[int, int] | None = None) -> NDArray[np.float64]:
    """T[i, j]: the expected share of samples of class i that get label j."""
    classes, total = len(counts), counts.sum()
    if kind == "none" or ratio == 0:
        return np.eye(classes)
    if kind == "effective":
        share = ratio / (1 - float(np.sum((counts / total) ** 2)))
        return (1 - share) * np.eye(classes) + share * np.tile(counts / total, (classes, 1))
    if kind == "asymmetric":
        out = np.eye(classes)
        for source, target in (wrong or {}).items():
            out[source, source], out[source, target] = 1 - ratio, ratio
        return out
    weights = counts.astype(np.float64) if kind == "prior" else np.ones(classes)
    matrix: NDArray[np.float64] = ratio * weights / (weights.sum() - weights)[:, None]
    np.fill_diagonal(matrix, 1 - ratio)
    return matrix


def flip_count(counts: Ints, ratio: float, kind: str, wrong: dict[int, int] | None = None) -> int:
    """How many samples are drawn for a new label."""
    total = int(counts.sum())
    if kind == "none":
        return 0
    if kind == "effective":
        # Some draws come back with the old label: draw so many more that the ratio of wrong labels is kept.
        drawn = ratio / (1 - np.sum((counts / total) ** 2)) * total
        if drawn > total:
            raise UserError(
                f"noise={ratio:g} cannot be reached with noise_kind=effective: it would draw {drawn:.0f} of "
                f"{total} samples. Lower noise, or use noise_kind=prior."
            )
        return int(drawn)
    if kind == "asymmetric":
        total = int(sum(counts[source] for source in wrong or {}))
    return math.floor(Fraction(str(ratio)) * total)  # 0.29 of 100 is 29, though 0.29 * 100 is a little less


def add_noise(
    labels: NDArray[np.integer],
    rows: Ints,
    classes: int,
    ratio: float,
    kind: str,
    shuffled: Ints,
    draws: NDArray[np.float64],
    wrong: dict[int, int] | None = None,
) -> NDArray[np.int32]:
    """New labels of `rows`: the first in `shuffled` order change. `labels` and uniform `draws` are by row."""
    old = labels[rows]
    new = old.astype(np.int32)
    counts = counts_of(old, classes)
    drawn = flip_count(counts, ratio, kind, wrong)
    if not drawn:
        return new
    position = np.full(len(labels), -1, np.int64)
    position[rows] = np.arange(len(rows))
    order = position[shuffled]
    order = order[order >= 0]
    if kind == "asymmetric":
        target = np.arange(classes)
        target[list(wrong or {})] = list((wrong or {}).values())
        chosen = order[np.isin(old[order], list(wrong or {}))][:drawn]
        new[chosen] = target[old[chosen]]
        return new
    chosen = order[:drawn]
    weights = np.ones(classes, np.int64) if kind == "symmetric" else counts
    own = np.zeros(len(chosen)) if kind == "effective" else weights[old[chosen]]
    # Inverse distribution function with the sample's own class cut out of the line.
    ends = np.cumsum(weights)
    point = draws[rows[chosen]] * (weights.sum() - own)
    point = np.where(point >= (ends - weights)[old[chosen]], point + own, point)
    new[chosen] = np.minimum(np.searchsorted(ends, point, side="right"), classes - 1)
    return new


def hold_out(labels: NDArray[np.integer], rows: Ints, classes: int, fraction: float, shuffled: Ints) -> Ints:
    """A stratified part of the rows: round(fraction · n_k) of each class, at least one if it has two."""
    have = counts_of(labels[rows], classes)
    take = np.clip(np.round(have * fraction).astype(np.int64), np.minimum(1, have // 2), np.maximum(have - 1, 0))
    return keep_rows(labels, rows, take, shuffled)


def class_groups(counts: NDArray[np.integer]) -> dict[str, NDArray[np.bool_]]:
    """(K,) bool for each group: classes with many, a medium number of and few training samples, before noise."""
    return {"many": counts > MANY, "medium": (counts >= FEW) & (counts <= MANY), "few": counts < FEW}
