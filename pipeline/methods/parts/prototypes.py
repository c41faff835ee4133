"""Class prototypes: weighted means of embeddings, summed over all ranks in float64, put on the unit sphere."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.models.network import unit
from pipeline.models.precision import full_precision

BLOCK = 8192  # rows at a time: intermediate results stay in the cache, and memory does not grow with N


def class_sums(z_ND: Tensor, label_N: Tensor, weight_N: Tensor, classes: int) -> Tensor:
    """(K, D+1) float64: per class the weighted sum of embeddings and, last, the sum of weights."""
    sums = torch.zeros(classes, z_ND.shape[1] + 1, dtype=torch.float64, device=z_ND.device)
    for z, label, weight in zip(*(torch.split(part, BLOCK) for part in (z_ND, label_N, weight_N))):
        rows = torch.cat([z.double(), torch.ones_like(z[:, :1], dtype=torch.float64)], 1)
        sums.index_add_(0, label, rows * weight.double()[:, None])
    return sums


def class_prototypes(
    z_ND: Tensor, label_N: Tensor, weight_N: Tensor, previous_KD: Tensor, world: World
) -> tuple[Tensor, Tensor]:
    """(K,D) unit prototypes (paper eq. 7) and (K,) bool: classes of weight zero, which keep their previous one.

    z, label, weight are this rank's part of the training set; one all-reduce of K x (D+1) numbers joins the parts.
    """
    sums = world.all_reduce_sum(class_sums(z_ND, label_N, weight_N, len(previous_KD)))
    mean = sums[:, :-1] / sums[:, -1:].clamp_min(1e-300)
    length = mean.norm(dim=1, keepdim=True)
    empty = (sums[:, -1] <= 0) | (length[:, 0] < 1e-12)
    fresh = (mean / length.clamp_min(1e-12)).float()
    return torch.where(empty[:, None], previous_KD, fresh), empty


@full_precision
def confirmed_by_prototype(z_nD: Tensor, label_n: Tensor, classes: int, world: World) -> Tensor:
    """(n,) bool: no prototype is nearer than that of the own label, in which the sample itself does not count.

    z, label are this rank's part of the training set; one all-reduce as above. The only sample of a class is never confirmed.
    """
    ones = torch.ones_like(label_n, dtype=z_nD.dtype)
    sum_KD = world.all_reduce_sum(class_sums(z_nD, label_n, ones, classes))[:, :-1]
    prototype_KD = unit(sum_KD).to(z_nD.dtype)
    confirmed = torch.zeros(len(z_nD), dtype=torch.bool, device=z_nD.device)
    for out, z, label in zip(*(torch.split(part, BLOCK) for part in (confirmed, z_nD, label_n))):
        others = unit(sum_KD[label] - z.double()).to(z.dtype)
        cosine = (z @ prototype_KD.T).scatter_(1, label[:, None], (z * others).sum(1, keepdim=True))
        out.copy_((cosine.argmax(1) == label) & (others != 0).any(1))
    return confirmed
