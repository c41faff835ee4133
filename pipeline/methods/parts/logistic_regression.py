"""Logistic regression with soft labels by L-BFGS, on any number of ranks.

Every step is one pass over the samples in blocks: 4 x N x K x D operations, and K x D numbers summed over ranks. Every
rank computes the same steps from the same sums. n rows on this rank, N over all ranks, K classes, D features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.methods.parts.linear import Linear

BLOCK = 8192  # rows at a time
STEPS = 40
MEMORY = 10  # past steps that L-BFGS estimates the curvature from
BALANCE = 0.5  # power of the class size in class weights and in the logit adjustment

Loss = Callable[[Tensor], tuple[Tensor, Tensor]]  # parameters -> (loss, gradient), equal on all ranks


def logistic_regression(x_nD: Tensor, soft_nK: Tensor, world: World, penalty: float | None = None) -> Linear:
    """Scores that stand for log p(x | class) up to a number common to all classes.

    Half of the class imbalance is undone by class weights, half by logit adjustment: weights alone give a few
    samples of a rare class too much say. `penalty` is that of the squared weights beside the summed loss, for features of
    mean length one.
    """
    classes, width = soft_nK.shape[1], x_nD.shape[1]
    length = torch.linalg.vector_norm(x_nD, dim=1, dtype=torch.float64).sum()
    sums = world.all_reduce_sum(torch.cat([soft_nK.sum(0, dtype=torch.float64), length[None]]))
    count_K, samples = sums[:-1], float(sums[:-1].sum())
    scale = max(samples, 1.0) / max(float(sums[-1]), 1e-12) if float(sums[-1]) > 1e-12 else 1.0
    present = count_K > 1e-9
    classes_seen = max(int(present.sum()), 1)
    size_K = torch.where(present, count_K, 1.0)
    weight_K = torch.where(present, (samples / (classes_seen * size_K)) ** BALANCE, 0.0)
    prior_K = torch.where(present, BALANCE * size_K.log(), -30.0)  # a class without samples needs no learning
    if penalty is None:
        penalty = min(max(samples / (70 * classes_seen), 0.3), 3.0)

    def loss(parameters: Tensor) -> tuple[Tensor, Tensor]:
        table = parameters.view(classes, width + 1)
        model = Linear(scale * table[:, :-1], table[:, -1] + prior_K)
        total = torch.zeros(classes * (width + 1) + 1, dtype=torch.float64, device=x_nD.device)
        gradient = total[1:].view(classes, width + 1)
        for x, soft in zip(x_nD.split(BLOCK), soft_nK.split(BLOCK)):
            target = soft * weight_K.to(soft.dtype)
            log_p = model(x).log_softmax(1)
            total[0] -= (target * log_p).sum(dtype=torch.float64)
            residual = log_p.exp() * target.sum(1, keepdim=True) - target
            gradient[:, :-1] += scale * (residual.T @ x).double()
            gradient[:, -1] += residual.sum(0, dtype=torch.float64)
        total = world.all_reduce_sum(total)
        gradient = total[1:].view(classes, width + 1)
        total[0] += 0.5 * penalty * (table[:, :-1] ** 2).sum()
        gradient[:, :-1] += penalty * table[:, :-1]
        return total[0], total[1:]

    start = torch.zeros(classes * (width + 1), dtype=torch.float64, device=x_nD.device)
    table = minimise(loss, start, STEPS).view(classes, width + 1)
    return Linear(scale * table[:, :-1], table[:, -1])


def minimise(loss: Loss, start: Tensor, steps: int) -> Tensor:
    """L-BFGS with backtracking. Parameters, losses and gradients are equal on all ranks, so decisions are, too."""
    point, (value, gradient) = start, loss(start)
    past: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=MEMORY)  # step, change of the gradient, their product
    for _ in range(steps):
        direction = _direction(gradient, past)
        slope = direction @ gradient
        if not float(slope) < -1e-18:
            break
        size = 1.0 if past else min(1.0, 1.0 / float(gradient.norm()))
        for _ in range(20):
            trial = point + size * direction
            trial_value, trial_gradient = loss(trial)
            if float(trial_value) <= float(value + 1e-4 * size * slope):
                break
            size /= 2
        else:
            break
        change = trial_gradient - gradient
        product = (trial - point) @ change
        if float(product) > 0:
            past.append((trial - point, change, product))
        point, value, gradient = trial, trial_value, trial_gradient
    return point


def _direction(gradient: Tensor, past: deque[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Minus the inverse curvature times the gradient, by the two-loop recursion (Nocedal 1980)."""
    direction, factors = -gradient, []
    for step, change, product in reversed(past):
        factors.append((step @ direction) / product)
        direction = direction - factors[-1] * change
    if past:
        _, change, product = past[-1]
        direction = direction * (product / (change @ change))
    for (step, change, product), factor in zip(past, reversed(factors)):
        direction = direction + step * (factor - (change @ direction) / product)
    return direction
