"""Decoupled representation and classifier (Kang et al., ICLR 2020): cRT and NCM.

Both learn the representation by cross-entropy on all samples. cRT then freezes it and trains a new linear
classifier on class-balanced samples; NCM classifies by the nearest class mean. B rows, K classes, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.config import Config
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import OneNetwork, Stage
from pipeline.methods.cross_entropy import CrossEntropy
from pipeline.methods.options import CRTOptions, NCMOptions
from pipeline.methods.parts.flag import Flag
from pipeline.methods.parts.losses import cross_entropy
from pipeline.methods.parts.prototypes import class_sums
from pipeline.methods.parts.survey import Survey
from pipeline.models.network import unit
from pipeline.models.precision import full_precision

REPRESENTATION, CLASSIFIER = 0, 1
FAR = -1e4  # score of a class without samples; the scores of others are at least -4


class CRT(OneNetwork[CRTOptions]):
    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        self.balanced = nn.Linear(self.network.features, data.classes)
        self.uses_balanced = Flag(self, "retrained")  # whether the second classifier makes the prediction

    def stages(self) -> list[Stage]:
        epochs = max(1, round(self.options.classifier_part * self.config.train.epochs))
        # One cycle of `restarts` is a cosine whose rate is not yet zero in the last epoch.
        schedule = {"schedule": "restarts", "restart_epochs": epochs, "final_lr": 0.0, "warmup_epochs": 0}
        rates = {"lr": self.options.classifier_lr, "weight_decay": self.options.classifier_weight_decay}
        optim = self.config.optim.model_copy(update={**schedule, **rates})
        return [
            Stage("representation", epochs=self.config.train.epochs, trainable=("network.",), evaluated=False),
            Stage("classifier", epochs=epochs, optim=optim, trainable=("balanced.",)),
        ]

    def set_epoch(self, stage: int, epoch: int) -> None:
        super().set_epoch(stage, epoch)
        self.uses_balanced.set(stage == CLASSIFIER)

    def train(self, mode: bool = True) -> CRT:
        """In the second stage the representation and its batch statistics are frozen."""
        super().train(mode)
        if self.stage == CLASSIFIER:
            self.network.eval()
            if self.average is not None:
                self.average.eval()
        return self

    def passes(self) -> list[Pass]:
        if self.stage == REPRESENTATION:
            return super().passes()
        counts = self.data.counts
        return [Pass(self.data.balanced(self.order_key(), int(counts.max()) * int((counts > 0).sum())))]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        if self.stage == REPRESENTATION:
            _, logits = self.network(batch.views["weak"], batch.mask)
        else:
            with torch.no_grad():
                features, _ = self.eval_network(batch.views["weak"])
            logits = self.balanced(features)
        return {"loss": cross_entropy(logits, batch.label, batch.valid, self.world)}

    def after_step(self) -> None:
        if self.stage == REPRESENTATION:
            super().after_step()

    def scores(self, images: Tensor) -> dict[str, Tensor]:
        features, logits = self.eval_network(images)
        first = {"linear": logits.float()}
        return {"balanced": self.balanced(features).float(), **first} if self.uses_balanced else first


@full_precision
def normalize_features(features_BD: Tensor, centre_D: Tensor) -> Tensor:
    """Features minus the mean of the training set, normalised to unit length ("CL2N")."""
    return unit(features_BD - centre_D)


class NCM(CrossEntropy):
    """Cross-entropy training; class means are computed after every epoch."""

    options: NCMOptions
    centre: Tensor  # (D,) mean feature
    means: Tensor  # (K,D) means of centred unit features, not normalised again
    present: Tensor  # (K,) bool

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        K, D = data.classes, self.network.features
        self.register_buffer("centre", torch.zeros(D))
        self.register_buffer("means", torch.zeros(K, D))
        self.register_buffer("present", torch.zeros(K, dtype=torch.bool))

    def surveys_after_epoch(self) -> bool:
        return True

    def survey_outputs(self, images: Tensor, given: Tensor) -> dict[str, Tensor]:
        return {"features": self.eval_network(images)[0]}

    def end_epoch(self, survey: Survey | None) -> None:
        assert survey is not None
        features = survey["features"]
        self.centre.copy_(self.world.all_reduce_sum(features.double().sum(0)) / survey.total)
        label = self.data.labels(survey.index)
        rows = normalize_features(features, self.centre)
        sums = self.world.all_reduce_sum(class_sums(rows, label, torch.ones_like(rows[:, 0]), self.data.classes))
        self.present.copy_(sums[:, -1] > 0)
        self.means.copy_(sums[:, :-1] / sums[:, -1:].clamp_min(1))

    def scores(self, images: Tensor) -> dict[str, Tensor]:
        """Minus the squared distance to each class mean."""
        features, logits = self.eval_network(images)
        score = -(
            torch.cdist(
                normalize_features(features, self.centre), self.means, compute_mode="donot_use_mm_for_euclid_dist"
            )
            ** 2
        )
        return {"nearest_mean": score.masked_fill(~self.present, FAR), "linear": logits.float()}
