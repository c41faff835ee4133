"""Random numbers by key (seed, order_key, index, view, draw): independent of threads, workers and ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of SplitMix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(key: tuple[int, ...], index: np.ndarray, draws: int) -> np.ndarray:
    """(B, draws) float64 in [0,1): row i depends on `key` and index[i] alone."""
    with np.errstate(over="ignore"):
        state = np.full(1, len(key), np.uint64)
        for part in key:
            state = _mix(state + _GOLDEN + np.uint64(part))
        rows = _mix(state + _GOLDEN * (np.asarray(index).astype(np.uint64) + np.uint64(1)))  # (B,)
        cells = _mix(rows[:, None] + _GOLDEN * np.arange(1, draws + 1, dtype=np.uint64))  # (B, draws)
    return (cells >> np.uint64(11)).astype(np.float64) * 2.0**-53


def keyed_generator(*key: int) -> np.random.Generator:
    """A generator for numbers drawn once per step or epoch."""
    # The length comes first because SeedSequence pads with zeros: (1, 2) and (1, 2, 0) would be one stream.
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([len(key), *key])))
