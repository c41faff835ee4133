"""Mixup whose pairs do not depend on the number of ranks.

Partners are drawn inside the small groups of neighbouring rows that the loader keeps together on one rank. The epoch's order is
itself random, so a partner from the group is a random partner; and the same pairs arise however the batch is cut over ranks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pipeline.data.batch import Batch


def coefficient(batch: Batch, alpha: float, purpose: int, fold: bool = False) -> float:
    """lambda ~ Beta(alpha, alpha), one per step and the same on all ranks; `fold` takes max(lambda, 1 - lambda)."""
    if alpha <= 0:
        return 1.0
    value = float(batch.generator(purpose).beta(alpha, alpha))
    return max(value, 1 - value) if fold else value


def partners(batch: Batch, copies: int, purpose: int) -> Tensor:
    """(copies*B,) row numbers: for each row of `copies` stacked views, whom it is mixed with."""
    group = torch.where(batch.valid > 0, batch.groups, -1).repeat(copies)
    row_key = (batch.index[None] * copies + torch.arange(copies, device=batch.index.device)[:, None]).flatten()
    return pair_within(group, row_key, _seed(batch, purpose))


def chances(batch: Batch, purpose: int) -> Tensor:
    """(B,) float64 in [0,1): a draw for every row of this step, decided by its sample, not by the rank that holds it."""
    return _hash_uniform(batch.index + _seed(batch, purpose) * 2654435761)


def _seed(batch: Batch, purpose: int) -> int:
    return int(np.random.SeedSequence([*batch.key, purpose]).generate_state(1)[0])


def pair_within(group: Tensor, row_key: Tensor, seed: int) -> Tensor:
    """A random permutation that keeps every row inside its group; decided by (seed, row_key) alone."""
    chance = _hash_uniform(row_key + seed * 2654435761)
    by_key = torch.argsort(row_key, stable=True)  # the places of a group in an order that ranks agree on
    places = by_key[torch.argsort(group[by_key], stable=True)]
    by_chance = torch.argsort(chance, stable=True)
    drawn = by_chance[torch.argsort(group[by_chance], stable=True)]
    out = torch.empty_like(places)
    out[places] = drawn
    return out


def _hash_uniform(x: Tensor) -> Tensor:
    """(n,) float64 in [0,1) from int64, on the device (SplitMix64 finaliser with arithmetic shifts masked to logical ones)."""

    def shifted(value: Tensor, bits: int) -> Tensor:
        return (value >> bits) & ((1 << (64 - bits)) - 1)

    x = x * -7046029254386353131
    x = (x ^ shifted(x, 30)) * -4658895280553007687
    x = (x ^ shifted(x, 27)) * -7723592293110705685
    x = x ^ shifted(x, 31)
    return shifted(x, 11).double() * 2.0**-53


def mix(value: Tensor, partner: Tensor, lam: float) -> Tensor:
    return value if lam == 1.0 else lam * value + (1 - lam) * value[partner]
