"""Contrast against a queue of keys, the newest of earlier steps. B rows on this rank, G over all ranks, Q keys, D width.

A queue is a buffer (Q+1,D), whose last row takes the keys of rows that do not count, and a count of keys ever written.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.distributed.world import World
from pipeline.models.precision import full_precision


@full_precision
def queue_contrastive(
    z_BD: Tensor,
    key_BD: Tensor,
    queue_QD: Tensor,
    written: Tensor,
    valid_B: Tensor,
    temperature: float,
    world: World,
) -> Tensor:
    """Find the key of the same sample among those in the filled part of the queue."""
    empty = torch.arange(len(queue_QD), device=queue_QD.device) >= written
    others = (z_BD @ queue_QD.T).masked_fill(empty, -torch.inf)
    logits = torch.cat([(z_BD * key_BD).sum(1, keepdim=True), others], 1) / temperature
    return world.global_mean(
        F.cross_entropy(logits, torch.zeros_like(valid_B, dtype=torch.long), reduction="none"), valid_B
    )


def enqueue(queue: Tensor, written: Tensor, key_GD: Tensor, valid_G: Tensor) -> None:
    """Write the valid keys over the oldest ones. Keys of padding rows go to the last row of the queue."""
    size, valid = len(queue) - 1, valid_G > 0
    position = (written + valid.cumsum(0) - 1) % size
    queue.index_copy_(0, torch.where(valid, position, size), key_GD.to(queue.dtype))
    queue[size] = 0
    written += valid.sum()
