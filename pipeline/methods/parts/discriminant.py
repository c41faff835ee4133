"""Shrunken linear discriminant analysis with soft labels, on any number of ranks.

n rows on this rank, N over all ranks, K classes, D features. Time N x D x (D + K); every rank holds D x D numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.methods.parts.linear import Linear

BLOCK = 8192  # rows at a time
SHRINKAGE = 0.5  # share of the scaled identity in the covariance
PSEUDO = 1.0  # samples at the mean of all class means that every class has besides its own


def linear_discriminant(x_nD: Tensor, soft_nK: Tensor, world: World) -> Linear:
    """Scores that stand for log p(x | class) up to a number common to all classes; scale is left to calibration.

    Class means are drawn towards the mean of means; the covariance is common to all classes and drawn towards a
    multiple of the identity. The mean of a small class is noisy, which makes every sample seem further from it: the
    expected excess of the squared distance is taken off again.
    """
    count_K, square_K, first_KD, second_DD = _moments(x_nD, soft_nK, world)
    present = count_K > 0
    raw_KD = first_KD / count_K.clamp_min(1e-12)[:, None]
    centre_D = raw_KD[present].mean(0) if bool(present.any()) else first_KD.sum(0)
    mean_KD = (first_KD + PSEUDO * centre_D) / (count_K + PSEUDO)[:, None]
    within_DD = (second_DD - (raw_KD * count_K[:, None]).T @ raw_KD) / count_K.sum().clamp_min(1)
    level = within_DD.trace().clamp_min(0) / len(within_DD)
    # Equal features have no variance; any positive one will do, since their distances are zero as well.
    level = torch.where(level > 1e-12 * second_DD.trace() / count_K.sum().clamp_min(1), level, torch.ones_like(level))
    identity = torch.eye(len(within_DD), dtype=within_DD.dtype, device=within_DD.device)
    inverse_DD = torch.linalg.inv((1 - SHRINKAGE) * within_DD + SHRINKAGE * level * identity)
    weight_KD = mean_KD @ inverse_DD
    excess_K = (inverse_DD * within_DD).sum() * torch.minimum(count_K, square_K) / (count_K + PSEUDO) ** 2
    return Linear(weight_KD, 0.5 * (excess_K - (weight_KD * mean_KD).sum(1)))


def _moments(x_nD: Tensor, soft_nK: Tensor, world: World) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over the samples of all ranks, float64: soft labels, their squares, soft labels times x, x times x."""
    classes, width = soft_nK.shape[1], x_nD.shape[1]
    sums = torch.zeros(classes, width + 2, dtype=torch.float64, device=x_nD.device)
    second_DD = torch.zeros(width, width, dtype=torch.float64, device=x_nD.device)
    for x, soft in zip(x_nD.split(BLOCK), soft_nK.split(BLOCK)):
        x, soft = x.double(), soft.double()
        sums[:, 0] += soft.sum(0)
        sums[:, 1] += (soft**2).sum(0)
        sums[:, 2:] += soft.T @ x
        second_DD += x.T @ x
    sums, second_DD = world.all_reduce_sum(sums), world.all_reduce_sum(second_DD)
    return sums[:, 0], sums[:, 1], sums[:, 2:], second_DD
