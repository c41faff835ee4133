"""How given labels arise from true ones: class prior, transition matrix and temperature, fitted by EM.

A sample of true class k has the given label j with probability transition[k, j]. Scores S (n,K) stand for log p(x | k) up
to a temperature:  P(k | x, given j) ~ prior[k] exp(S[k] / temperature) transition[k, j].
n rows on this rank, N over all ranks, K classes. A step of EM takes N x K operations and sums K x K numbers over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.distributed.world import World

# Numbers at a time, rows x classes or classes x classes: there are thousands of passes, and what one makes should stay in the cache.
AT_ONCE = 1 << 20
START = 0.2  # share of wrong labels that EM starts from
RIGHT_PRIOR = 100.0  # samples for which the mean share of right labels counts in each class
WRONG_PRIOR = 6.0  # wrong labels for which their mean distribution counts in each class
OFFSET_PRIOR = 20.0  # samples that no class is taken to be favoured for
FLAT = 0.1  # of that distribution, the part that is uniform
STEPS = 8  # of EM for each temperature
GRID = [2.0**i for i in range(-3, 6)]  # temperatures tried at first,
SPREAD = 0.5  # of the logarithm of the temperature, which is expected to be 1
SOFTNESS = 0.002  # log-likelihood per sample that scores e times as soft must gain; it decides between equals
REFINEMENTS = (2**0.5, 2**0.25, 2**0.125)  # and factors to try around the best


@dataclass(frozen=True)
class Noise:
    prior: Tensor  # (K,) float64, class frequency over how much the scores favour the class
    transition: Tensor  # (K,K) float64, rows: true class
    temperature: float

    def posterior(self, scores_nK: Tensor, given_n: Tensor) -> Tensor:
        """(n,K) probability of each true class, from features and given label."""
        out = torch.empty_like(scores_nK)
        for rows, (joint, total, _) in zip(out.split(_rows(out.shape[1])), self.blocks(scores_nK, given_n)):
            torch.div(joint, total, out=rows)
        return out

    def predictive(self, scores_nK: Tensor, given_n: Tensor) -> Tensor:
        """(n,) probability of the given label, from features alone."""
        return torch.cat([joint.sum(1) for joint, _, _ in self.blocks(scores_nK, given_n)])

    def blocks(self, scores_nK: Tensor, given_n: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Some rows at a time: (b,K) probability of each true class together with the given label, (b,1) their sum, which
        is positive, and (b,) the given label."""
        prior = self.prior.log().to(scores_nK.dtype)
        by_given_KK = self.transition.T.to(scores_nK.dtype).contiguous()  # rows are looked up in it
        rows = _rows(scores_nK.shape[1])
        for scores, given in zip(scores_nK.split(rows), given_n.split(rows)):
            joint = (scores / self.temperature).add_(prior).softmax(1).mul_(by_given_KK[given])
            yield joint, joint.sum(1, keepdim=True).clamp_min(torch.finfo(joint.dtype).tiny), given


def fit_noise(scores_nK: Tensor, given_n: Tensor, world: World) -> Noise:
    """The prior, transition matrix and temperature under which the given labels are likeliest.

    Soft scores explain wrong labels as well as a transition matrix does, nearly; EM that changes all of them at a time stays
    where it starts. So every temperature gets its own transition matrix before they are compared. The first start has
    equally many wrong labels in all classes. From there EM often does not see that most labels of a rare class belong
    to its large look-alike, so it starts again from what it predicts without looking at the labels.
    """
    classes = scores_nK.shape[1]
    count_K = world.all_reduce_sum(torch.bincount(given_n, minlength=classes).double())
    start_KK = (1 - START) * torch.diag(count_K) + START * count_K[:, None] / classes
    start = Noise(_class_prior(count_K), transition_matrix(start_KK), 1.0)
    best = _predicted(_best(start, GRID, scores_nK, given_n, world), scores_nK, given_n, world)
    for width in REFINEMENTS:
        near = [best.temperature * factor for factor in (1 / width, 1, width)]
        best = _best(best, near, scores_nK, given_n, world)
    return best


def _predicted(noise: Noise, scores_nK: Tensor, given_n: Tensor, world: World) -> Noise:
    """Taken from the class that is likeliest for the features of every sample, and its given label.

    The prior keeps how much the scores favour each class; class sizes are those of the predictions.
    """
    classes = scores_nK.shape[1]
    sums = torch.zeros(classes + classes**2, dtype=torch.float64, device=scores_nK.device)
    prior, rows = noise.prior.log().to(scores_nK.dtype), _rows(classes)
    for scores, (joint, total, given) in zip(scores_nK.split(rows), noise.blocks(scores_nK, given_n)):
        sums[:classes] += joint.div_(total).sum(0, dtype=torch.float64)
        likeliest = (scores / noise.temperature).add_(prior).argmax(1)
        sums[classes:] += torch.bincount(likeliest * classes + given, minlength=classes**2)
    sums = world.all_reduce_sum(sums)
    believed_K, joint_KK = sums[:classes], sums[classes:].view(classes, classes)
    prior_K = noise.prior * (joint_KK.sum(1) + 1) / (believed_K + 1)
    return Noise(prior_K / prior_K.sum(), transition_matrix(joint_KK), noise.temperature)


def _best(start: Noise, temperatures: Sequence[float], scores_nK: Tensor, given_n: Tensor, world: World) -> Noise:
    """EM from one start at every temperature, as many at once as fit; the likeliest."""
    found: list[tuple[float, Noise]] = []
    samples = float(world.all_reduce_sum(torch.tensor(float(len(given_n)), dtype=torch.float64, device=given_n.device)))
    group = max(1, AT_ONCE // start.transition.numel())
    for first in range(0, len(temperatures), group):
        few = temperatures[first : first + group]
        prior_TK, transition_TKK = start.prior.expand(len(few), -1), start.transition.expand(len(few), -1, -1)
        for _ in range(STEPS):
            prior_TK, transition_TKK, value_T = _em_step(prior_TK, transition_TKK, few, scores_nK, given_n, world)
        for prior, transition, value, t in zip(prior_TK, transition_TKK, value_T.tolist(), few):
            against = 0.5 * (math.log(t) / SPREAD) ** 2 + SOFTNESS * samples * math.log(t)
            found.append((value - against, Noise(prior, transition, t)))
    return max(found, key=lambda one: one[0])[1]


def _rows(numbers: int) -> int:
    """So many rows of this length at a time."""
    return max(AT_ONCE // numbers, 256)


def _class_prior(count_K: Tensor) -> Tensor:
    return (count_K + 1) / (count_K.sum(-1, keepdim=True) + count_K.shape[-1])


def _em_step(
    prior_TK: Tensor,
    transition_TKK: Tensor,
    temperatures: Sequence[float],
    scores_nK: Tensor,
    given_n: Tensor,
    world: World,
) -> tuple[Tensor, Tensor, Tensor]:
    """The next estimates of prior and transition matrix, and (T,) the log-likelihood of the given labels under the last.

    Scores made from few samples favour some classes. Were the prior the expected class sizes, EM would take such a
    favour for a large class with many wrong labels. So it is scaled until as many samples of each class are predicted as
    believed (generalised iterative scaling): it holds the favour as well, and is a class frequency only if there is none.
    """
    number, classes = prior_TK.shape
    sums = torch.zeros((number, classes * (classes + 1) + 1), dtype=torch.float64, device=scores_nK.device)
    predicted_TK, by_given_TKK = sums[:, 1 : classes + 1], sums[:, classes + 1 :].unflatten(1, (classes, classes))
    prior = prior_TK.log().to(scores_nK.dtype)[:, None]
    by_label_TKK = transition_TKK.to(scores_nK.dtype).mT.contiguous()  # rows are looked up in it
    divisor = torch.tensor(temperatures, dtype=scores_nK.dtype, device=scores_nK.device)[:, None, None]
    rows = _rows(number * classes)
    for scores, given in zip(scores_nK.split(rows), given_n.split(rows)):
        joint = (scores / divisor).add_(prior).softmax(2)
        predicted_TK += joint.sum(1, dtype=torch.float64)
        joint.mul_(by_label_TKK[:, given])
        likely = joint.sum(2, keepdim=True).clamp_min(torch.finfo(joint.dtype).tiny)
        sums[:, 0] += likely.log().sum((1, 2), dtype=torch.float64)
        by_given_TKK.index_add_(1, given, joint.div_(likely).double())
    sums = world.all_reduce_sum(sums)
    joint_TKK = sums[:, classes + 1 :].unflatten(1, (classes, classes)).mT
    prior_TK = prior_TK * (joint_TKK.sum(2) + OFFSET_PRIOR) / (sums[:, 1 : classes + 1] + OFFSET_PRIOR)
    return prior_TK / prior_TK.sum(1, keepdim=True), transition_matrix(joint_TKK), sums[:, 0]


def transition_matrix(joint_KK: Tensor) -> Tensor:
    """(..., K, K) rows of given labels by true class, from (expected) counts.

    Few counts say little, so each row is drawn towards what all classes have in common: the share of right labels, and how
    often each label is given wrongly. Two strengths, because the share is much the same in all classes while
    confusions are often those of a pair.
    """
    classes = joint_KK.shape[-1]
    if classes == 1:
        return torch.ones_like(joint_KK)
    count_K, right_K = joint_KK.sum(-1), joint_KK.diagonal(dim1=-2, dim2=-1)
    wrong_KK = joint_KK - torch.diag_embed(right_K)
    wrong_K, total = (count_K - right_K).clamp_min(0), count_K.sum(-1, keepdim=True)
    wrong = wrong_K.sum(-1, keepdim=True) + 1
    share = wrong / (total + 2)
    column_K = wrong_KK.sum(-2) + FLAT * wrong / classes
    expected_KK = column_K[..., None, :] * (1 - torch.eye(classes, dtype=column_K.dtype, device=column_K.device))
    expected_KK = expected_KK / expected_KK.sum(-1, keepdim=True)
    keep_K = (right_K + RIGHT_PRIOR * (1 - share)) / (count_K + RIGHT_PRIOR)
    spread_KK = (wrong_KK + WRONG_PRIOR * expected_KK) / (wrong_K + WRONG_PRIOR)[..., None]
    return torch.diag_embed(keep_K) + (1 - keep_K)[..., None] * spread_KK
