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
    weak_GD, strong_GD, valid_G = _gathered(weak_BD, strong_BD, valid_B, world, rows)
    loss_B = _found_among(weak_BD, strong_GD, weak_GD, valid_G, temperature, world, rows)
    return world.global_mean(loss_B, valid_B)


@full_precision
def nt_xent(
    first_BD: Tensor, second_BD: Tensor, valid_B: Tensor, temperature: float, world: World, rows: Sequence[int]
) -> Tensor:
    """The loss of SimCLR: as `instance_contrastive`, with both views as anchors in turn."""
    first_GD, second_GD, valid_G = _gathered(first_BD, second_BD, valid_B, world, rows)
    loss_B = _found_among(first_BD, second_GD, first_GD, valid_G, temperature, world, rows)
    loss_B = loss_B + _found_among(second_BD, first_GD, second_GD, valid_G, temperature, world, rows)
    return world.global_mean(loss_B / 2, valid_B)


def _gathered(
    first_BD: Tensor, second_BD: Tensor, valid_B: Tensor, world: World, rows: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Both views of all ranks, with gradient, and which rows count."""
    keys = torch.cat([first_BD, second_BD], 1)  # (B, 2D): one all-gather for both
    keys = world.all_gather_rows(keys, rows, grad=True)
    first_GD, second_GD = keys.chunk(2, 1)
    return first_GD, second_GD, world.all_gather_rows(valid_B, rows) > 0


def _found_among(
    anchor_BD: Tensor,
    other_GD: Tensor,
    same_GD: Tensor,
    valid_G: Tensor,
    temperature: float,
    world: World,
    rows: Sequence[int],
) -> Tensor:
    """(B,) loss of finding the other view of a sample among the other views and the anchors' views of all samples."""
    own = torch.arange(len(anchor_BD), device=anchor_BD.device)
    offset = sum(rows[: world.rank]) if world.size > 1 else 0
    forbidden = (~valid_G).expand(len(own), -1)  # (B, G): padding rows
    itself = torch.zeros_like(forbidden).scatter_(1, (own + offset)[:, None], True)
    to_same = (anchor_BD @ same_GD.T / temperature).masked_fill(forbidden | itself, -torch.inf)
    to_other = (anchor_BD @ other_GD.T / temperature).masked_fill(forbidden & ~itself, -torch.inf)
    return F.cross_entropy(torch.cat([to_other, to_same], 1), own + offset, reduction="none")


@full_precision
def prototype_logits(z_BD: Tensor, prototypes_KD: Tensor, temperature: float) -> Tensor:
    """Scores of the prototypical classifier (paper eq. 2), with the temperature its thresholds need."""
    return z_BD @ prototypes_KD.T / temperature


@full_precision
def given_confidence(logits_BK: Tensor, label_B: Tensor) -> Tensor:
    """(B,) probability of the label."""
    return logits_BK.softmax(1).gather(1, label_B[:, None])[:, 0]
