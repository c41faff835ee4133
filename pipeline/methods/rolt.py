"""RoLT+ (Wei et al., 2021): DivideMix that divides each class by the distance of its samples to the centroid.

Losses of rare classes are large whether their labels are right or wrong. Here distances are compared inside a class
only. n rows of the survey on this rank, N in all, K classes, D features.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.data.batch import Batch, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.decoupling import normalize_features
from pipeline.methods.dividemix import DivideMix
from pipeline.methods.ldam import class_weights
from pipeline.methods.options import RoLTOptions
from pipeline.methods.parts.gaussian_mixture import Fit, posterior_by_class
from pipeline.methods.parts.prototypes import class_sums
from pipeline.methods.parts.survey import Survey
from pipeline.models.precision import full_precision

FIT = Fit()


class RoLT(DivideMix):
    options: RoLTOptions
    class_weight: Tensor  # (K,) for the labelled rows, late in the training

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        weights = class_weights(data.counts, self.options.beta)
        self.register_buffer("class_weight", weights, persistent=False)

    def survey_outputs(self, images: Tensor, given: Tensor) -> dict[str, Tensor]:
        features, logits = zip(*(self.eval_network(n)(images) for n in range(2)))
        return {f"features{n}": features[n] for n in range(2)} | self.votes_and_losses(list(logits), given)

    def divide(self, survey: Survey) -> list[np.ndarray]:
        return [self.divide_by_network(n, survey) for n in range(2)]

    def divide_by_network(self, n: int, survey: Survey) -> np.ndarray:
        """(N,) belief of one network: centroids of all samples, the near ones, centroids of these, the near ones of these."""
        rows, given = self.normalize_features(survey[f"features{n}"]), self.data.labels(survey.index)
        belief = self.clean_probability(survey, rows, self.centroids(rows, given, torch.ones_like(rows[:, 0]))[0])
        trusted = torch.from_numpy(belief > 0.5).to(rows)[survey.index]
        return self.clean_probability(survey, rows, self.centroids(rows, given, trusted)[0])

    def normalize_features(self, features: Tensor) -> Tensor:
        """(n,D) features minus the mean of the training set, normalised to unit length."""
        centre = self.world.all_reduce_sum(features.sum(0, dtype=torch.float64)) / len(self.data)
        return normalize_features(features, centre.float())

    def centroids(self, rows: Tensor, given: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(K,D) means of the weighted rows of all ranks, and (K,) how many there are.

        A class whose rows all have weight zero takes the mean of all of them.
        """
        K, ones = self.data.classes, torch.ones_like(weight)
        sums = self.world.all_reduce_sum(torch.stack([class_sums(rows, given, w, K) for w in (weight, ones)]))
        chosen = torch.where(sums[0, :, -1:] > 0, sums[0], sums[1])
        return chosen[:, :-1] / chosen[:, -1:].clamp_min(1e-12), sums[0, :, -1]

    def clean_probability(self, survey: Survey, rows: Tensor, centroids: Tensor) -> np.ndarray:
        """(N,) probability to belong to the nearer component of the own class."""
        similarity = survey.all_gather(negative_distance(rows, centroids[self.data.labels(survey.index)])).cpu().numpy()
        given, K = self.data.given, self.data.classes
        return self.on_main_rank(lambda: posterior_by_class(similarity, given, K, "large", FIT))

    def labelled_weight(self, batch: Batch) -> Tensor:
        late = self.epoch >= round(self.options.reweight_start * self.config.train.epochs)
        weight = batch.valid * self.class_weight[batch.label] if late else batch.valid
        return weight.repeat(2)


@full_precision
def negative_distance(rows_nD: Tensor, centroid_nD: Tensor) -> Tensor:
    """(n,) minus the squared distance of each row to its centroid."""
    return -(rows_nD - centroid_nD).square().sum(1)
