"""Linear separation of two sets of samples, each as important as the other, on any number of ranks.

n rows on this rank, N over all ranks, C features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.distributed.world import World
from pipeline.methods.parts.logistic_regression import minimise
from pipeline.methods.parts.prototypes import BLOCK

STEPS = 100
PENALTY = 1e-4  # of the squared weights beside the mean loss: sets that can be separated would need infinite weights


def linear_separation(x_nC: Tensor, inside_n: Tensor, world: World) -> Tensor:
    """(n,) float64 probability to be of the set, by balanced logistic regression on standardised features; 0 if it has nobody,
    and if it has all."""
    x, inside = x_nC.double(), inside_n.double()
    sums = world.all_reduce_sum(torch.cat([x.sum(0), inside.sum()[None], torch.ones_like(inside).sum()[None]]))
    size, total = float(sums[-2]), float(sums[-1])
    if not 0 < size < total:
        return torch.zeros_like(inside)
    centre = sums[:-2] / total
    spread = (world.all_reduce_sum((x - centre).square().sum(0)) / total).sqrt()
    x = (x - centre) / torch.where(spread > 1e-12, spread, 1.0)
    side, weight = 2 * inside - 1, torch.where(inside > 0, 0.5 / size, 0.5 / (total - size))

    def loss(parameters: Tensor) -> tuple[Tensor, Tensor]:
        slope, shift = parameters[:-1], parameters[-1]
        out = torch.zeros(len(parameters) + 1, dtype=torch.float64, device=x.device)  # loss and gradient
        for rows, sign, share in zip(x.split(BLOCK), side.split(BLOCK), weight.split(BLOCK)):
            margin = sign * (rows @ slope + shift)
            out[0] += (share * F.softplus(-margin)).sum()
            pull = -share * sign * (-margin).sigmoid()
            out[1:-1] += pull @ rows
            out[-1] += pull.sum()
        out = world.all_reduce_sum(out)
        out[0] += 0.5 * PENALTY * slope.square().sum()
        out[1:-1] += PENALTY * slope
        return out[0], out[1:]

    found = minimise(loss, torch.zeros(x.shape[1] + 1, dtype=torch.float64, device=x.device), STEPS)
    return (x @ found[:-1] + found[-1]).sigmoid()
