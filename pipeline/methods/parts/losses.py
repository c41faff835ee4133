"""Losses shared by methods; L_pc is in prototype_method. B rows on this rank, G over all ranks, K classes, D embedding width.

Each returns a value whose average over ranks is the loss of the global batch (see World.global_mean).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.distributed.world import World
from pipeline.models.precision import full_precision


@full_precision
def sample_losses(logits_BK: Tensor, label_B: Tensor) -> Tensor:
    """(B,) cross-entropy of each row."""
    return F.cross_entropy(logits_BK, label_B, reduction="none")


def cross_entropy(logits_BK: Tensor, label_B: Tensor, weight_B: Tensor, world: World) -> Tensor:
    """Weighted mean of the cross-entropy over the global batch."""
    return world.global_mean(sample_losses(logits_BK, label_B), weight_B)


@full_precision
def soft_cross_entropy(logits_BK: Tensor, target_BK: Tensor, weight_B: Tensor, world: World) -> Tensor:
    """The same against a distribution over classes."""
    return world.global_mean(-(target_BK * F.log_softmax(logits_BK, dim=1)).sum(1), weight_B)


@full_precision
def instance_contrastive(
    weak_BD: Tensor, strong_BD: Tensor, valid_B: Tensor, temperature: float, world: World, rows: Sequence[int]
) -> Tensor:
    """L_cc (paper eq. 4): find the strong view of the same sample among 2(G-1) other views of the global batch.

    Anchors are the weak views. Keys are gathered with gradient: the loss of every rank reaches the keys of all ranks.
    """
    keys = torch.cat([weak_BD, strong_BD], 1)  # (B, 2D): one all-gather for both
    keys = world.all_gather_rows(keys, rows, grad=True)
    weak_GD, strong_GD = keys.chunk(2, 1)
    valid_G = world.all_gather_rows(valid_B, rows) > 0
    own = torch.arange(len(weak_BD), device=weak_BD.device)
    offset = sum(rows[: world.rank]) if world.size > 1 else 0
    forbidden = (~valid_G).expand(len(own), -1)  # (B, G): padding rows
    itself = torch.zeros_like(forbidden).scatter_(1, (own + offset)[:, None], True)
    to_weak = (weak_BD @ weak_GD.T / temperature).masked_fill(forbidden | itself, -torch.inf)
    to_strong = (weak_BD @ strong_GD.T / temperature).masked_fill(forbidden & ~itself, -torch.inf)
    loss_B = F.cross_entropy(torch.cat([to_strong, to_weak], 1), own + offset, reduction="none")
    return world.global_mean(loss_B, valid_B)


@full_precision
def prototype_logits(z_BD: Tensor, prototypes_KD: Tensor, temperature: float) -> Tensor:
    """Scores of the prototypical classifier (paper eq. 2), with the temperature its thresholds need."""
    return z_BD @ prototypes_KD.T / temperature


@full_precision
def given_confidence(logits_BK: Tensor, label_B: Tensor) -> Tensor:
    """(B,) probability of the label."""
    return logits_BK.softmax(1).gather(1, label_B[:, None])[:, 0]
