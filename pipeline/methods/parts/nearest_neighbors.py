"""Exact nearest neighbours by inner product, in blocks. n queries, N candidates, D embedding width, k neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.models.precision import full_precision


@full_precision
def nearest_neighbors(
    query_nD: Tensor, bank_ND: Tensor, k: int, own_n: Tensor | None = None, block: int = 1024, bank_block: int = 0
) -> tuple[Tensor, Tensor]:
    """Similarity and bank index of the most similar candidates, each (n, min(k, N)), the most similar first.

    Equal similarities are ordered by index, the smallest first, and the smallest are taken. `own_n` is the bank index of
    the query itself, -1 where it is not in the bank. Its similarity counts as -inf: it is returned only where there are
    fewer than k others. Memory: `block` x `bank_block` similarities; `bank_block` 0 means all N at once.
    """
    k = min(k, len(bank_ND))
    similarity = query_nD.new_empty(len(query_nD), k)
    index = torch.empty(len(query_nD), k, dtype=torch.long, device=query_nD.device)
    for start in range(0, len(query_nD) if k else 0, block):
        rows = slice(start, start + block)
        own = None if own_n is None else own_n[rows]
        similarity[rows], index[rows] = _search(query_nD[rows], bank_ND, k, own, bank_block or len(bank_ND))
    return similarity, index


def _search(query_bD: Tensor, bank_ND: Tensor, k: int, own_b: Tensor | None, bank_block: int) -> tuple[Tensor, Tensor]:
    """The same for one block of queries: the best so far, joined with the best of each part of the bank."""
    value, index = query_bD.new_empty(len(query_bD), 0), query_bD.new_empty(len(query_bD), 0, dtype=torch.long)
    for first in range(0, len(bank_ND), bank_block):
        similarity = query_bD @ bank_ND[first : first + bank_block].T
        if own_b is not None:
            own = (own_b - first)[:, None]
            place = own.clamp(0, similarity.shape[1] - 1)
            similarity.scatter_(1, place, torch.where(own == place, -torch.inf, similarity.gather(1, place)))
        top, place = _top(similarity, min(k, similarity.shape[1]))
        value, index = torch.cat([value, top], 1), torch.cat([index, place + first], 1)
        # Earlier parts have smaller indices and stand first, so a stable sort keeps the order of equal values.
        value, order = value.sort(dim=1, descending=True, stable=True)
        value, index = value[:, :k], index.gather(1, order[:, :k])
    return value, index


def _top(similarity_bM: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(b,k) largest values and their columns, by value and then by column. torch.topk alone leaves ties undefined."""
    if k == 1:
        value, place = similarity_bM.max(1, keepdim=True)  # the first of equal ones
        return value, place
    value, place = similarity_bM.topk(k, 1)
    least = value[:, -1:]
    tied = ((similarity_bM >= least).sum(1) > k).nonzero()[:, 0]
    if len(tied):  # more columns than k reach the least value: of those equal to it take the first
        rows, bound = similarity_bM[tied], least[tied]
        equal = rows == bound
        room = k - (rows > bound).sum(1, keepdim=True)
        taken = (rows > bound) | (equal & (equal.cumsum(1, dtype=torch.int32) <= room))
        place[tied] = taken.nonzero()[:, 1].view(-1, k)
    place = place.sort(1).values
    value, order = similarity_bM.gather(1, place).sort(dim=1, descending=True, stable=True)
    return value, place.gather(1, order)
