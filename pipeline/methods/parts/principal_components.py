"""Principal components of the samples of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.distributed.world import World

BLOCK = 8192  # rows at a time


def principal_components(x_nD: Tensor, most: int, world: World) -> tuple[Tensor, Tensor]:
    """(D,) the mean and (D,d) the directions of largest variance, float64; d = min(most, D, N - 1), at least 1.

    The mean is taken off before squares are summed, which keeps digits. Directions may differ in sign, or inside a space
    of equal variance, between numbers of ranks; what is fitted on them must not depend on that.
    """
    width = x_nD.shape[1]
    sums = torch.cat([x_nD.sum(0, dtype=torch.float64), x_nD.new_full((1,), len(x_nD), dtype=torch.float64)])
    sums = world.all_reduce_sum(sums)
    total = float(sums[-1])
    mean_D = sums[:-1] / max(total, 1.0)
    second_DD = torch.zeros(width, width, dtype=torch.float64, device=x_nD.device)
    for x in x_nD.split(BLOCK):
        centred = x.double() - mean_D
        second_DD += centred.T @ centred
    _, vectors_DD = torch.linalg.eigh(world.all_reduce_sum(second_DD))  # by rising variance
    kept = max(1, min(most, width, int(total) - 1))
    return mean_D, vectors_DD[:, -kept:]
