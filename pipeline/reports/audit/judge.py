"""The judgement of labels by models that did not learn them: k-fold on frozen features, and simulations of it.

`pipeline/methods/parts/cross_fitting.py` has the mathematics. It gives the probability that a label is right, but not how far
off the sum of these probabilities is. So the judgement is repeated on simulated labels: true labels are drawn from
what is believed, wrong ones from the fitted transition matrix. There the truth is known, and the error can be seen.
N samples, K classes, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from shards.features import FeatureSplit

BLOCK = 8192  # rows at a time
NEAREST = 10  # samples that a picture is compared with
BANK = 20_000  # they are looked for among at most so many
_LABELS, _FOLDS = 0x51A7, 0xF01D  # purposes of random numbers


@dataclass(frozen=True)
class Judgement:
    """What is believed of every label by models that did not learn it."""

    given: np.ndarray  # (N,) int
    right: np.ndarray  # (N,) probability that the given label is right
    other: np.ndarray  # (N,) int, the likeliest other label
    other_right: np.ndarray  # (N,) its probability
    true: np.ndarray | None = None  # (N,) int, of simulated labels


def judge(
    features_ND: torch.Tensor,
    given: np.ndarray,
    classes: int,
    seed: int,
    components: int,
    simulations: int,
    done: Callable[[], None] = lambda: None,
) -> tuple[Judgement, list[Judgement]]:
    """The judgement of the given labels, and those of simulated ones."""
    import torch

    from pipeline.data.keyed_random import keyed_generator
    from pipeline.distributed.world import World
    from pipeline.methods.latent import threads_for
    from pipeline.methods.parts.cross_fitting import OutOfFold, out_of_fold, stratified_folds
    from pipeline.methods.parts.principal_components import principal_components

    def found(labels: np.ndarray, folds: int) -> OutOfFold:
        fold = torch.from_numpy(stratified_folds(labels, folds))
        return out_of_fold(x, torch.from_numpy(labels), fold, classes, World())

    given = given.astype(np.int64)
    with threads_for(len(given) * classes):
        centre, basis = principal_components(features_ND, components, World())
        x = (features_ND - centre.float()) @ basis.float()
        own = found(given, seed)
        done()
        simulated = []
        for number in range(simulations):
            random = keyed_generator(seed, _LABELS + number)
            true = _draw(own.posterior.numpy(), random)
            labels = _draw(own.calibration.noise.transition.numpy()[true], random)
            judged = found(labels, seed + _FOLDS + number)
            simulated.append(_judgement(judged.posterior, labels, true))
            done()
    return _judgement(own.posterior, given, None), simulated


def _draw(probability_NK: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """(N,) a class for every row."""
    below = np.cumsum(probability_NK, axis=1, dtype=np.float64)
    drawn: np.ndarray = (below > random.random((len(below), 1)) * below[:, -1:]).argmax(1)
    return drawn


def _judgement(posterior_NK: torch.Tensor, given: np.ndarray, true: np.ndarray | None) -> Judgement:
    import torch

    label = torch.from_numpy(given)[:, None]
    right = posterior_NK.gather(1, label)[:, 0]
    other_right, other = posterior_NK.scatter(1, label, -1.0).max(1)
    return Judgement(given, right.numpy(), other.numpy(), other_right.clamp_min(0).numpy(), true)


def typicality(features: np.ndarray, right: np.ndarray, trusted: np.ndarray) -> np.ndarray:
    """(N,) the share of trusted samples that stand less firmly among pictures with right labels than this one does.

    A sample's standing is the mean over its nearest neighbours of the cosine times the probability that the neighbour's
    label is right. It is low for a picture far from all others, and for one of many alike whose labels do not agree: near 0
    both are like none of the classes. `features` have unit length.
    """
    import torch

    from pipeline.methods.parts.nearest_neighbors import nearest_neighbors

    bank = np.arange(len(features))
    if not trusted.any() or len(bank) <= NEAREST:
        return np.ones(len(features))
    if len(bank) > BANK:
        bank = np.sort(np.random.default_rng(0).choice(bank, BANK, replace=False))
    rows = torch.from_numpy(features)
    own = torch.full((len(features),), -1)
    own[torch.from_numpy(bank)] = torch.arange(len(bank))
    cosine, near = nearest_neighbors(rows, rows[torch.from_numpy(bank)], NEAREST, own, max(1, (1 << 25) // len(bank)))
    standing = (cosine.numpy() * right[bank][near.numpy()]).mean(1)
    ordered = np.sort(standing[trusted])
    share: np.ndarray = np.searchsorted(ordered, standing, side="left") / len(ordered)
    return share


def stored_features(features: FeatureSplit, samples: int) -> np.ndarray:
    """(N,D) the test view of every sample, as `latent` sees it (model.feature_norm=power)."""
    import torch

    from pipeline.models.network import power_norm
    from shards.features import TEST

    out = np.empty((samples, features.width), np.float32)
    part = np.empty((min(BLOCK, samples), features.width), np.float16)
    for start in range(0, samples, BLOCK):
        index = np.arange(start, min(start + BLOCK, samples))
        rows = part[: len(index)]
        features.read(np.full(len(index), features.views[TEST]), index, rows)
        out[index] = power_norm(torch.from_numpy(rows.astype(np.float32))).numpy()
    return out
