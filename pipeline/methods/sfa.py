"""SFA (Li et al., IJCAI 2023): RoLT+ with centroids averaged over epochs and a second, balanced classifier.

The balanced classifier selects the samples of a centroid; the centroids of large classes are drawn from the Gaussian
of their averages. n rows of the survey on this rank, N in all, K classes, D features.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.config import Config
from pipeline.data.batch import Batch, TrainingSet
from pipeline.data.keyed_random import keyed_generator
from pipeline.distributed.world import World
from pipeline.methods.options import SFAOptions
from pipeline.methods.parts.flag import Flag
from pipeline.methods.parts.losses import cross_entropy, given_confidence
from pipeline.methods.parts.survey import Survey
from pipeline.methods.rolt import RoLT
from pipeline.models.network import Average
from pipeline.models.precision import full_precision

CENTROID_NOISE = 3  # purpose of random numbers


class SFA(RoLT):
    options: SFAOptions
    counts: Tensor  # (2,K) labels each network trusts, by class
    mean: Tensor  # (2,K,D) float64: moving average of the centroids, by network
    square: Tensor  # (2,K,D) float64: of their squares

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        K, D = data.classes, self.network(0).features
        self.balanced = nn.ModuleList(nn.Linear(D, K) for _ in range(2))
        self.balanced_average = Average(self.balanced, config.model.ema) if config.model.ema else None
        self.register_buffer("counts", torch.from_numpy(data.counts).float().repeat(2, 1))
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
        if survey is None:
            return
        self.has_average.set(True)
        given, K = self.data.given_on(self.belief.device), self.data.classes
        for n in range(2):
            trusted = given[self.belief[n] > self.options.threshold]
            self.counts[n].copy_(torch.bincount(trusted, minlength=K))

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

    def balanced_eval_head(self, n: int) -> nn.Module:
        heads = self.balanced if self.balanced_average is None else self.balanced_average.network
        return heads[n]

    # -- training --------------------------------------------------------------------------------------------

    def trained_parameters(self, n: int) -> tuple[str, ...]:
        return (f"networks.{n}.", f"balanced.{n}.")

    def after_step(self) -> None:
        super().after_step()
        if self.balanced_average is not None:
            self.balanced_average.update(self.balanced)

    def warmup_losses(self, n: int, batch: Batch) -> dict[str, Tensor]:
        features, logits = self.network(n)(batch.views["weak"], batch.mask)
        parts = {"ce": cross_entropy(logits, batch.label, batch.valid, self.world)}
        logits = balanced_softmax_logits(self.balanced[n](features), self.counts[n])
        parts["balanced"] = cross_entropy(logits, batch.label, batch.valid, self.world)
        return {"loss": parts["ce"] + parts["balanced"], **parts}

    def mixed_losses(
        self, n: int, batch: Batch, features: Tensor, logits: Tensor, target: Tensor, valid: Tensor
    ) -> dict[str, Tensor]:
        losses = super().mixed_losses(n, batch, features, logits, target, valid)
        logits = balanced_softmax_logits(self.balanced[n](features), self.counts[1 - n])
        parts = self.semi_supervised(logits, target, valid, self.labelled_weight(batch))
        loss = parts["labelled"] + self.unlabelled_weight * parts.get("unlabelled", 0.0)
        named = {f"balanced_{name}": value for name, value in parts.items()}
        return {**losses, **named, "loss": losses["loss"] + loss}

    # -- evaluation ------------------------------------------------------------------------------------------

    def scores(self, images: Tensor) -> dict[str, Tensor]:
        """First the mean of both classifiers of both networks, then each kind."""
        outputs = [self.eval_network(n)(images) for n in range(2)]
        linear = torch.stack([logits.float() for _, logits in outputs]).mean(0)
        balanced = torch.stack([self.balanced_eval_head(n)(outputs[n][0]).float() for n in range(2)]).mean(0)
        return {"both": (linear + balanced) / 2, "linear": linear, "balanced": balanced}


@full_precision
def balanced_softmax_logits(logits_BK: Tensor, counts_K: Tensor) -> Tensor:
    """Balanced softmax: class frequencies are added in training, so the plain logits are class-balanced.

    A class without samples counts as one sample; its logit would be minus infinity.
    """
    return logits_BK + counts_K.clamp_min(1).log()
