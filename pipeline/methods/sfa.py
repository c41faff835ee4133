"""SFA (Li et al., IJCAI 2023): RoLT+ with centroids averaged over epochs and a second, balanced classifier.

The balanced classifier selects the samples of a centroid; the centroids of large classes are drawn from the Gaussian
of their averages. n rows of the survey on this rank, N in all, K classes, D features.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.data.batch import TrainingSet
from pipeline.data.keyed_random import keyed_generator
from pipeline.distributed.world import World
from pipeline.methods.options import SFAOptions
from pipeline.methods.parts.flag import Flag
from pipeline.methods.parts.losses import given_confidence
from pipeline.methods.parts.survey import Survey
from pipeline.methods.rolt import RoLT
from pipeline.methods.two_heads import TwoHeads

CENTROID_NOISE = 3  # purpose of random numbers


class SFA(TwoHeads, RoLT):
    options: SFAOptions
    mean: Tensor  # (2,K,D) float64: moving average of the centroids, by network
    square: Tensor  # (2,K,D) float64: of their squares

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        K, D = data.classes, self.network(0).features
        self.register_buffer("mean", torch.zeros(2, K, D, dtype=torch.float64))
        self.register_buffer("square", torch.zeros(2, K, D, dtype=torch.float64))
        self.has_average = Flag(self, "averaged")  # whether `mean` and `square` are set

    # -- beliefs ---------------------------------------------------------------------------------------------

    def survey_outputs(self, images: Tensor, given: Tensor) -> dict[str, Tensor]:
        out = super().survey_outputs(images, given)
        for n in range(2):
            out[f"balanced{n}"] = given_confidence(self.balanced_eval_head(n)(out[f"features{n}"]), given)
        return out

    def begin_epoch(self, survey: Survey | None) -> None:
        super().begin_epoch(survey)
        if survey is not None:
            self.has_average.set(True)

    @property
    def candidate_threshold(self) -> float:
        """Confidence in the given label from which a sample counts for its centroid; it grows."""
        done = (self.epoch + 1) / self.config.train.epochs
        return float(self.options.candidate_growth**done / self.data.classes)

    def divide_by_network(self, n: int, survey: Survey) -> np.ndarray:
        rows, given = self.normalize_features(survey[f"features{n}"]), self.data.labels(survey.index)
        candidates = (survey[f"balanced{n}"] > self.candidate_threshold).to(rows)
        fresh, count = self.centroids(rows, given, candidates)
        keep = self.options.averaging if self.has_average else 0.0
        self.mean[n].lerp_(fresh, 1 - keep)
        self.square[n].lerp_(fresh.square(), 1 - keep)
        return self.clean_probability(survey, rows, self._draw_centroids(n, count > self.options.sampled_above))

    def _draw_centroids(self, n: int, large: Tensor) -> Tensor:
        """(K,D) the average, or for large classes a draw from the Gaussian of mean and square."""
        spread = (self.square[n] - self.mean[n].square()).clamp_min(0).sqrt()
        noise = keyed_generator(self.data.seed, self.order_key(), n, CENTROID_NOISE).standard_normal(spread.shape)
        return self.mean[n] + large[:, None] * spread * torch.from_numpy(noise).to(spread)
