"""Votes of the nearest samples on labels. n queries, N samples in the bank, K classes, D features."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.methods.parts.nearest_neighbors import nearest_neighbors
from pipeline.models.precision import full_precision

SIMILARITIES = 1 << 26  # numbers in memory at a time while neighbours are searched


@full_precision
def balanced_votes(
    z_nD: Tensor,
    bank_ND: Tensor,
    label_N: Tensor,
    classes: int,
    k: int,
    block: int,
    *asked_n: Tensor,
    own_n: Tensor | None = None,
) -> list[Tensor]:
    """For each tensor of classes in `asked_n`: (n,) votes for that class, relative to the votes for the class with most.

    The k nearest samples of the bank have one vote each; `own_n` is the place of each query in the bank, -1 if it is not there, and
    takes its own vote away. Votes for a class are divided by the number of samples with that label in the bank, so that large classes
    do not win by their size. Memory: block x (k + classes).
    """
    size_K = torch.bincount(label_N, minlength=classes).clamp_min(1).to(z_nD.dtype)
    parts: list[list[Tensor]] = [[z_nD.new_zeros(0)] for _ in asked_n]
    k = max(min(k, len(bank_ND) - (own_n is not None)), 1)
    for start in range(0, len(z_nD), block):
        rows = slice(start, start + block)
        own = None if own_n is None else own_n[rows]
        bank_block = max(k, SIMILARITIES // block)
        near = label_N[nearest_neighbors(z_nD[rows], bank_ND, k, own, block, bank_block)[1]]  # (b,k)
        votes = z_nD.new_zeros(len(near), classes).scatter_add_(1, near, torch.ones_like(near, dtype=z_nD.dtype))
        votes /= size_K
        most = votes.max(1).values
        for part, asked in zip(parts, asked_n):
            part.append(votes.gather(1, asked[rows, None])[:, 0] / most)
    return [torch.cat(part) for part in parts]
