"""Mixup whose pairs do not depend on the number of ranks.

Partners are drawn inside the small groups of neighbouring rows that the loader keeps together on one rank. The epoch's order is
itself random, so another sample of the group is a random other sample; and the same pairs arise however the batch is cut over
ranks. Inside a group nobody meets a view of its own sample, which in so small a group would happen to one row in eight.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pipeline.data.batch import Batch


def mixup_lambda(batch: Batch, alpha: float, purpose: int, fold: bool = False) -> float:
    """lambda ~ Beta(alpha, alpha), one per step and the same on all ranks; `fold` takes max(lambda, 1 - lambda)."""
    if alpha <= 0:
        return 1.0
    value = float(batch.generator(purpose).beta(alpha, alpha))
    return max(value, 1 - value) if fold else value


def mixup_partners(batch: Batch, copies: int, purpose: int) -> Tensor:
    """(copies*B,) row numbers: for each row of `copies` stacked views, whom it is mixed with."""
    places = torch.arange(copies * len(batch.index), device=batch.index.device).view(copies, -1)
    return pair_within(mixing_groups(batch), batch.index, places, _seed(batch, purpose))


def mixing_groups(batch: Batch) -> Tensor:
    """(B,) mixing groups in which rows that do not count are among themselves."""
    return torch.where(batch.valid > 0, batch.groups, -1 - batch.groups)


def row_uniforms(batch: Batch, purpose: int) -> Tensor:
    """(B,) float64 in [0,1): a draw for every row of this step, decided by its sample, not by the rank that holds it."""
    return _hash_uniform(batch.index, _seed(batch, purpose))


def _seed(batch: Batch, purpose: int) -> int:
    return int(np.random.SeedSequence([*batch.key, purpose]).generate_state(1)[0])


def pair_within(group_S: Tensor, key_S: Tensor, places_VS: Tensor, seed: int) -> Tensor:
    """(V*S,) the partner of every row: a permutation inside groups, decided by (seed, key) alone.

    S samples with V views each; places_VS says which row holds a view of a sample. For every view the samples of a group stand
    in a random ring of its own, and each meets a view of the next; alone in its group it meets itself.
    """
    views = len(places_VS)
    following_VS = torch.stack([_next_in_ring(group_S, _hash_uniform(key_S * views + v, seed)) for v in range(views)])
    turn_S = (_hash_uniform(key_S, seed + 1) * views).long()  # the one who is met turns: each view of it is met once
    view_VS = (torch.arange(views, device=key_S.device)[:, None] + turn_S[following_VS]) % views
    partner = torch.empty(places_VS.numel(), dtype=torch.long, device=key_S.device)
    partner[places_VS] = places_VS[view_VS, following_VS]
    return partner


def _next_in_ring(group_S: Tensor, chance_S: Tensor) -> Tensor:
    """(S,) the next sample of the same group in the order of `chance_S`, the first again after the last."""
    ring = torch.argsort(chance_S, stable=True)
    ring = ring[torch.argsort(group_S[ring], stable=True)]
    group = group_S[ring]
    first, end = torch.searchsorted(group, group), torch.searchsorted(group, group, right=True)
    place = torch.arange(len(ring), device=ring.device)
    following = torch.empty_like(ring)
    following[ring] = ring[torch.where(place + 1 < end, place + 1, first)]
    return following


def _hash_uniform(key: Tensor, seed: int) -> Tensor:
    """(n,) float64 in [0,1) from int64, on the device (SplitMix64 finaliser with arithmetic shifts masked to logical ones)."""

    def shifted(value: Tensor, bits: int) -> Tensor:
        return (value >> bits) & ((1 << (64 - bits)) - 1)

    x = (key + seed * 2654435761) * -7046029254386353131
    x = (x ^ shifted(x, 30)) * -4658895280553007687
    x = (x ^ shifted(x, 27)) * -7723592293110705685
    x = x ^ shifted(x, 31)
    return shifted(x, 11).double() * 2.0**-53


def mix(value: Tensor, partner: Tensor, lam: float) -> Tensor:
    return value if lam == 1.0 else lam * value + (1 - lam) * value[partner]
