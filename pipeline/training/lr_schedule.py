"""The learning rate as a pure function of the epoch."""

from __future__ import annotations

import math

from pipeline.config import OptimConfig


def lr_at(optim: OptimConfig, epoch: int, epochs: int, constant: bool = False) -> float:
    """Learning rate of `epoch` (from 0).

    Cosine is stepped before the epoch, as the released code does: epoch 0 already has the first decay and the last epoch
    runs at final_lr.
    """
    if constant or not epochs or optim.schedule == "constant":  # a stage measured in steps has no schedule
        return optim.lr
    if epoch < optim.warmup_epochs:
        return optim.lr * (epoch + 1) / optim.warmup_epochs
    if optim.schedule == "steps":
        passed = sum(epoch >= round(part * epochs) for part in optim.milestones)
        return optim.lr * optim.decay**passed
    if optim.schedule == "restarts":
        done = (epoch % optim.restart_epochs) / optim.restart_epochs
    else:
        done = (epoch + 1) / epochs
    return optim.final_lr + 0.5 * (optim.lr - optim.final_lr) * (1 + math.cos(math.pi * done))
