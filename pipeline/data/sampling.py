"""Which samples, in which order, on which rank: pure functions of a few integers.

A global batch is cut into groups of consecutive rows. Micro-batches and ranks take contiguous runs of whole
groups, so the same groups exist for any number of ranks, and the rows of all ranks are the global batch.
The state of a pass is (order_key, step): resuming is calling the same functions from that step on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.data.keyed_random import keyed_generator

_SHUFFLED, _BALANCED = 1, 2  # part of the random key: the two kinds of order differ


def shuffled(
    n: int,
    seed: int,
    order_key: int,
    stream: int = 0,
    subset: np.ndarray | None = None,
    shard_sizes: Sequence[int] = (),
    window: int = 0,
) -> np.ndarray:
    """Every sample of 0..n-1 (or of the subset) once.

    With `window`, shards are shuffled, and samples only among `window` neighbouring shards of that order:
    a reader needs at most that many shards at a time.
    """
    rng = keyed_generator(seed, order_key, stream, 0, _SHUFFLED)
    if not window:
        return rng.permutation(n if subset is None else np.asarray(subset, np.int64)).astype(np.int64, copy=False)
    ends = np.cumsum(np.asarray(shard_sizes, np.int64))  # (S,) sample indices run through the shards in order
    if not len(ends) or ends[-1] != n:
        raise ValueError(f"the shards hold {ends[-1] if len(ends) else 0} samples, not {n}")
    shards = rng.permutation(len(ends))
    wanted = np.arange(n) if subset is None else np.sort(np.asarray(subset, np.int64))
    starts = ends - np.asarray(shard_sizes, np.int64)
    cuts = np.searchsorted(wanted, np.stack([starts, ends]))  # (2, S) where each shard's wanted samples lie
    parts = []
    for first in range(0, len(shards), window):
        near = [wanted[cuts[0, s] : cuts[1, s]] for s in shards[first : first + window]]
        parts.append(rng.permutation(np.concatenate(near)))
    return np.concatenate(parts)


def balanced(given: np.ndarray, classes: int, seed: int, order_key: int, length: int, stream: int = 0) -> np.ndarray:
    """`length` samples in rounds; a round holds every class that has samples once, in random order.

    Inside a class the samples come in shuffled order, all of them before any is repeated.
    """
    rng = keyed_generator(seed, order_key, stream, 0, _BALANCED)
    members = [np.flatnonzero(given == k) for k in range(classes)]
    members = [m for m in members if len(m)]
    if not members:
        return np.zeros(0, np.int64)
    rounds = -(-length // len(members))
    columns = []
    for member in members:
        cycles = np.tile(member, (-(-rounds // len(member)), 1))  # (cycles, members)
        columns.append(rng.permuted(cycles, axis=1).ravel()[:rounds])
    table = rng.permuted(np.stack(columns, 1), axis=1)  # (rounds, classes present)
    return table.ravel()[:length]


def occurrence(order: np.ndarray) -> np.ndarray:
    """(n,) how often each sample came earlier in the order: 0 at its first position, 1 at its second, ..."""
    by_sample = np.argsort(order, kind="stable")
    ranked = order[by_sample]
    place = np.arange(len(order))
    first = np.concatenate([[True], ranked[1:] != ranked[:-1]]) if len(order) else np.zeros(0, bool)
    out = np.empty(len(order), np.int64)
    out[by_sample] = place - np.maximum.accumulate(np.where(first, place, 0))
    return out


def steps(n: int, batch: int) -> int:
    """Global batches in a pass over n samples; the last may be short."""
    return -(-n // batch)


def batch_rows(n: int, batch: int, step: int) -> slice:
    """Positions of the order in global batch `step`."""
    return slice(min(n, step * batch), min(n, (step + 1) * batch))


def rank_rows(n: int, rank: int, world: int, group: int) -> slice:
    """A rank's contiguous run of whole groups among n rows; empty when there are fewer groups than ranks.

    The same cut makes micro-batches: part `rank` of `world` parts.
    """
    groups = -(-n // group)
    return slice(min(n, groups * rank // world * group), min(n, groups * (rank + 1) // world * group))


def micro_slices(n: int, parts: int, group: int) -> list[slice]:
    """A global batch of n rows cut into `parts` runs of whole groups; fewer if too short, none empty."""
    parts = max(1, min(parts, -(-n // group)))
    return [rank_rows(n, part, parts, group) for part in range(parts)]
