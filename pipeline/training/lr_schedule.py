"""The learning rate as a pure function of the epoch, or of the step in it."""

from __future__ import annotations

import math

from pipeline.config import OptimConfig


def lr_at(optim: OptimConfig, epoch: int, epochs: int, constant: bool = False, step: int = 0, steps: int = 1) -> float:
    """Learning rate of `epoch` (from 0), or with schedule_by=step of `step` (from 0) of the `steps` of a pass in it.

    Cosine is stepped before the epoch or step, as the released code does: the first already has a decay and the last runs
    at final_lr.
    """
    if constant or not epochs or optim.schedule == "constant":  # a stage measured in steps has no schedule
        return optim.lr
    if optim.schedule_by == "epoch":
        step, steps = 0, 1
    start, end = epoch + step / steps, epoch + (step + 1) / steps
    if start < optim.warmup_epochs:
        return optim.lr * min(end, optim.warmup_epochs) / optim.warmup_epochs
    if optim.schedule == "steps":
        passed = sum(start >= round(part * epochs) for part in optim.milestones)
        return optim.lr * optim.decay**passed
    done = (start % optim.restart_epochs) / optim.restart_epochs if optim.schedule == "restarts" else end / epochs
    return optim.final_lr + 0.5 * (optim.lr - optim.final_lr) * (1 + math.cos(math.pi * done))
