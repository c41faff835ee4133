"""Mixup whose pairs do not depend on the number of ranks.

Partners come from small groups of neighbouring rows, which the loader keeps together on one rank. The order of an epoch is
random, so another sample of the group is a random sample, and the pairs are the same on any number of ranks. No row is mixed
with a view of its own sample, unless the sample is alone in its group.
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
    """(copies*B,) row numbers: the partner of each row of `copies` stacked views."""
    rows = torch.arange(copies * len(batch.index), device=batch.index.device).view(copies, -1)
    return pair_within(mixing_groups(batch), batch.index, rows, _seed(batch, purpose))


def mixing_groups(batch: Batch) -> Tensor:
    """(B,) mixing groups; rows that do not count are in groups of their own."""
    return torch.where(batch.valid > 0, batch.groups, -1 - batch.groups)


def row_uniforms(batch: Batch, purpose: int) -> Tensor:
    """(B,) float64 in [0,1): one draw per row and step; it depends on the sample, not on the rank."""
    return _hash_uniform(batch.index, _seed(batch, purpose))


def _seed(batch: Batch, purpose: int) -> int:
    return int(np.random.SeedSequence([*batch.key, purpose]).generate_state(1)[0])


def pair_within(group_S: Tensor, key_S: Tensor, rows_VS: Tensor, seed: int) -> Tensor:
    """(V*S,) the partner of every row: a permutation inside groups, decided by (seed, key) alone.

    S samples with V views each; rows_VS is the row of each view of a sample. For every view the samples of a group form a
    random ring, and each is mixed with a view of the next; a sample alone in its group is mixed with itself.
    """
    views = len(rows_VS)
    following_VS = torch.stack([_next_in_ring(group_S, _hash_uniform(key_S * views + v, seed)) for v in range(views)])
    turn_S = (
        _hash_uniform(key_S, seed + 1) * views
    ).long()  # rotates the views of the partner: each of them is used once
    view_VS = (torch.arange(views, device=key_S.device)[:, None] + turn_S[following_VS]) % views
    partner = torch.empty(rows_VS.numel(), dtype=torch.long, device=key_S.device)
    partner[rows_VS] = rows_VS[view_VS, following_VS]
    return partner


def _next_in_ring(group_S: Tensor, chance_S: Tensor) -> Tensor:
    """(S,) the next sample of the same group in the order of `chance_S`, the first again after the last."""
    ring = torch.argsort(chance_S, stable=True)
    ring = ring[torch.argsort(group_S[ring], stable=True)]
    group = group_S[ring]
    first, end = torch.searchsorted(group, group), torch.searchsorted(group, group, right=True)
    position = torch.arange(len(ring), device=ring.device)
    following = torch.empty_like(ring)
    following[ring] = ring[torch.where(position + 1 < end, position + 1, first)]
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
    """lam * value + (1 - lam) * the partner's value."""
    return value if lam == 1.0 else lam * value + (1 - lam) * value[partner]
