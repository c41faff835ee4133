"""Posteriors of true labels by nested cross-fitting: no label takes part in the scores its own sample is judged by.

For every pair of folds, classifiers are fitted on the other folds with given labels. For every fold A, those of the pairs
with A score the samples outside A, which gives them soft labels that no sample of A has touched; classifiers fitted on
these score the samples of A. n rows on this rank, N over all ranks, K classes, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pipeline.data.keyed_random import keyed_generator
from pipeline.distributed.world import World
from pipeline.methods.parts.discriminant import linear_discriminant
from pipeline.methods.parts.linear import Linear
from pipeline.methods.parts.logistic_regression import logistic_regression
from pipeline.methods.parts.transition import Noise, fit_noise

FOLDS = 5
BLOCK = 8192  # rows at a time
SHIFT_STEPS = 5
SHIFT_PRIOR = 5.0  # samples that no shift of a class counts for
_FOLD = 0x1A7E  # purpose of random numbers
SCORERS: tuple[Callable[[Tensor, Tensor, World], Linear], ...] = (linear_discriminant, logistic_regression)


@dataclass(frozen=True)
class Calibration:
    """How the scores of several classifiers become one posterior."""

    temperatures: tuple[float, ...]  # of each classifier
    shift: Tensor  # (K,) added to the mean of their scores
    noise: Noise

    def join(self, scores: Sequence[Tensor]) -> Tensor:
        """(n,K) mean of the scores, each divided by its temperature, and shifted."""
        return join(scores, self.temperatures).add_(self.shift.to(scores[0].dtype))

    def classifier(self, models: Sequence[Linear]) -> Linear:
        """One linear classifier whose softmax is the probability of each class if all are equally frequent."""
        total = models[0] * (1 / self.temperatures[0])
        for model, temperature in zip(models[1:], self.temperatures[1:]):
            total = total + model * (1 / temperature)
        return (total * (1 / len(models))).shifted(self.shift) * (1 / self.noise.temperature)


@dataclass(frozen=True)
class CrossFit:
    posterior: Tensor  # (n,K) of the true label, from features and given label
    predictive: Tensor  # (n,) of the given label, from features alone
    classifier: Linear  # fitted on all samples with the posteriors as soft labels
    calibration: Calibration


@dataclass(frozen=True)
class OutOfFold:
    """What models say about samples whose labels they have not learned."""

    joint: Tensor  # (n,K) calibrated scores, from features alone
    posterior: Tensor  # (n,K) of the true label, from features and given label
    calibration: Calibration


def cross_fit(x_nD: Tensor, given_n: Tensor, fold_n: Tensor, classes: int, world: World) -> CrossFit:
    found = out_of_fold(x_nD, given_n, fold_n, classes, world)
    classifier = found.calibration.classifier(_fit(x_nD, found.posterior, world))
    predictive = found.calibration.noise.predictive(found.joint, given_n)
    return CrossFit(found.posterior, predictive, classifier, found.calibration)


def out_of_fold(x_nD: Tensor, given_n: Tensor, fold_n: Tensor, classes: int, world: World) -> OutOfFold:
    return _judge(out_of_fold_scores(x_nD, given_n, fold_n, classes, world), given_n, world)


def _judge(scores: list[Tensor], given_n: Tensor, world: World) -> OutOfFold:
    """Takes the scores out of the list: they are the largest arrays, and three of them at a time are enough."""
    calibration = calibrate(scores, given_n, world)
    joint = calibration.join(scores)
    scores.clear()
    return OutOfFold(joint, calibration.noise.posterior(joint, given_n), calibration)


def stratified_folds(given: np.ndarray, seed: int) -> np.ndarray:
    """(N,) fold of every sample: the samples of a class, in random order, are dealt to the folds in turn."""
    shuffled = keyed_generator(seed, _FOLD).permutation(len(given))
    by_class = shuffled[np.argsort(given[shuffled], kind="stable")]
    out = np.empty(len(given), np.int64)
    out[by_class] = np.arange(len(given)) % FOLDS
    return out


def out_of_fold_scores(x_nD: Tensor, given_n: Tensor, fold_n: Tensor, classes: int, world: World) -> list[Tensor]:
    """(n,K) scores of every classifier; those of a sample depend on its features, never on its given label."""
    firsts = {}
    for pair in combinations(range(FOLDS), 2):
        rows = (fold_n != pair[0]) & (fold_n != pair[1])
        firsts[frozenset(pair)] = _fit(x_nD[rows], one_hot(given_n[rows], classes).to(x_nD.dtype), world)
    models = {}
    for held in range(FOLDS):
        rest = fold_n != held
        others = {fold: firsts[frozenset((held, fold))] for fold in range(FOLDS) if fold != held}
        models[held] = _fit_again(x_nD[rest], given_n[rest], fold_n[rest], others, classes, world)
    return _score_by_fold(x_nD, fold_n, models, classes)


def _fit(x_nD: Tensor, soft_nK: Tensor, world: World) -> list[Linear]:
    return [scorer(x_nD, soft_nK, world) for scorer in SCORERS]


def _fit_again(
    x_nD: Tensor, given_n: Tensor, fold_n: Tensor, models: Mapping[int, Sequence[Linear]], classes: int, world: World
) -> list[Linear]:
    """With the soft labels that these models give."""
    soft_nK = _judge(_score_by_fold(x_nD, fold_n, models, classes), given_n, world).posterior
    return _fit(x_nD, soft_nK, world)


def _score_by_fold(x_nD: Tensor, fold_n: Tensor, models: Mapping[int, Sequence[Linear]], classes: int) -> list[Tensor]:
    """(n,K) scores of each kind of classifier: every fold by the models that stand for it."""
    scores = [x_nD.new_zeros(len(x_nD), classes) for _ in SCORERS]
    for fold, fitted in models.items():
        rows = (fold_n == fold).nonzero()[:, 0]
        for out, model in zip(scores, fitted):
            out[rows] = model(x_nD[rows])
    return scores


def calibrate(scores: Sequence[Tensor], given_n: Tensor, world: World) -> Calibration:
    """Temperatures one by one, then of the mean, which is shifted so that no class is predicted too often."""
    temperatures = tuple(fit_noise(part, given_n, world).temperature for part in scores)
    mean = join(scores, temperatures)
    shift = balancing_shift(mean, fit_noise(mean, given_n, world), given_n, world)
    return Calibration(temperatures, shift, fit_noise(mean.add_(shift.to(mean.dtype)), given_n, world))


def join(scores: Sequence[Tensor], temperatures: Sequence[float]) -> Tensor:
    out = torch.zeros_like(scores[0])
    for part, temperature in zip(scores, temperatures):
        out.add_(part, alpha=1 / (temperature * len(scores)))
    return out


def balancing_shift(scores_nK: Tensor, noise: Noise, given_n: Tensor, world: World) -> Tensor:
    """(K,) to add to scores: then, if all classes were equally frequent, they would be predicted equally often."""
    classes = scores_nK.shape[1]
    blocks = list(zip(scores_nK.split(BLOCK), given_n.split(BLOCK)))
    count_K = scores_nK.new_zeros(classes, dtype=torch.float64)
    for scores, given in blocks:
        count_K += noise.posterior(scores, given).sum(0, dtype=torch.float64)
    count_K = world.all_reduce_sum(count_K)
    share_K = (1 / count_K.clamp_min(1e-9)).to(scores_nK.dtype)
    shift_K = torch.zeros_like(count_K)
    for _ in range(SHIFT_STEPS):
        marginal_K = torch.zeros_like(count_K)
        for scores, given in blocks:
            share_n = noise.posterior(scores, given) @ share_K
            shifted = (scores + shift_K.to(scores.dtype)) / noise.temperature
            marginal_K += (share_n @ shifted.softmax(1)).double()
        shift_K = shift_K - noise.temperature * world.all_reduce_sum(marginal_K).clamp_min(1e-12).log()
    return shift_K * count_K / (count_K + SHIFT_PRIOR)
