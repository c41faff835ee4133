"""The Prototypical Classifier (arXiv 2110.11553), on any number of ranks.

Each epoch: survey of all training samples -> prototypes -> threshold -> refined labels and weights -> train with
    L = ce * L_ce + contrastive * L_cc + prototype(e) * L_pc.
B rows on this rank, K classes, D embedding width, N training samples.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import Beliefs, Stage
from pipeline.methods.options import PrototypicalOptions
from pipeline.methods.parts import cleaning
from pipeline.methods.parts.losses import cross_entropy, given_confidence, instance_contrastive, prototype_logits
from pipeline.methods.parts.nearest_neighbors import nearest_neighbors
from pipeline.methods.parts.prototypes import class_prototypes
from pipeline.methods.parts.survey import Survey
from pipeline.methods.prototype_method import VIEWS, PrototypeMethod

WARMUP, MAIN = 0, 1
PRESETS = {
    "paper": {"relabel_weight": "margin", "neighbour_rule": False, "prototype_labels": "refined"},
    "released": {"relabel_weight": "half", "neighbour_rule": True, "prototype_labels": "given"},
}


def apply_preset(options: PrototypicalOptions) -> PrototypicalOptions:
    """The options with the preset's values where they are not set."""
    chosen = {key: value for key, value in PRESETS[options.preset].items() if getattr(options, key) in ("preset", None)}
    return options.model_copy(update=chosen)


class Prototypical(PrototypeMethod[PrototypicalOptions]):
    """Training uses `prototypes`, of the epoch's start; evaluation uses `current`."""

    current: Tensor  # (K,D) of the network as it is now
    weight: Tensor  # (N,) float32
    refined: Tensor  # (N,) int16 or int32
    clean: Tensor  # (N,) bool
    flagged: Tensor  # (N,) uint8: epochs in which the label was doubted

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        self.options = apply_preset(self.options)
        K, D, N = data.classes, config.model.embedding, len(data)
        self.register_buffer("current", torch.zeros(K, D))
        self.register_buffer("weight", torch.ones(N))
        self.register_buffer("refined", torch.tensor(data.given, dtype=torch.int16 if K < 2**15 else torch.int32))
        self.register_buffer("clean", torch.ones(N, dtype=torch.bool))
        self.register_buffer("flagged", torch.zeros(N, dtype=torch.uint8))
        # Scores and basis of the last survey: 16 bytes a sample, kept until the next survey replaces them. They are in
        # no checkpoint, since only the epoch's metrics need them.
        self.survey_beliefs = Beliefs()
        self.empty_classes = 0

    def stages(self) -> list[Stage]:
        # The projector has no loss in the warm-up; both stages share one optimiser, as in the released code.
        warmup = Stage(
            "warm-up", steps=self.options.warmup_steps, constant_lr=True, trainable=("network.backbone", "network.head")
        )
        trainable = ("network.backbone", "network.projector") + (
            ("network.head",) if self.options.cross_entropy else ()
        )
        return [warmup, Stage("train", epochs=self.config.train.epochs, fresh_optimizer=False, trainable=trainable)]

    # -- beliefs --------------------------------------------------------------------------------------------------------

    @property
    def cleaning_now(self) -> bool:
        start = round(self.options.cleaning_start * self.config.train.epochs)
        return self.options.cleaning and self.stage == MAIN and self.epoch >= start

    @property
    def threshold(self) -> float:
        return cleaning.threshold_at(self.options, self.epoch, self.config.train.epochs, self.data.classes)

    def surveys_before_epoch(self) -> bool:
        return self.stage == MAIN

    def surveys_after_epoch(self) -> bool:
        return self.stage == MAIN

    def survey_outputs(self, images: Tensor, given: Tensor) -> dict[str, Tensor]:
        z, logits = self.eval_forward(images)
        return {"z": z, "linear": given_confidence(logits, given)}

    def begin_epoch(self, survey: Survey | None) -> None:
        if survey is None:
            return
        basis = (self._prototype_labels().clone(), self.weight.clone())
        self.prototypes.copy_(self._prototypes_of(survey))
        given = self.data.labels(survey.index)
        part = cleaning.refine_all(survey["z"], given, self.prototypes, self.threshold, self.options)
        others = {"linear": survey.all_gather(survey["linear"])}
        self.survey_beliefs = Beliefs(score=survey.all_gather(part.score), other_scores=others, basis=basis)
        if self.cleaning_now:
            self._update_beliefs(part, survey)

    def end_epoch(self, survey: Survey | None) -> None:
        if survey is not None:
            self.current.copy_(self._prototypes_of(survey))

    def _prototype_labels(self) -> Tensor:
        """(N,) the labels prototypes are averaged by."""
        if self.options.prototype_labels == "refined":
            return self.refined
        return self.data.given_on(self.weight.device).int()

    def _prototypes_of(self, survey: Survey) -> Tensor:
        """(K,D) with the weights of the last cleaning; before the first they are all 1."""
        label = self._prototype_labels()[survey.index].long()
        out, empty = class_prototypes(survey["z"], label, self.weight[survey.index], self.prototypes, self.world)
        self.empty_classes = int(empty.sum())
        return out

    def _update_beliefs(self, part: cleaning.Cleaned, survey: Survey) -> None:
        """Gather the cleaning of all ranks into the buffers."""
        self.refined.copy_(survey.all_gather(part.label.int()))  # gloo cannot send int16
        self.clean.copy_(survey.all_gather(part.clean.to(torch.uint8)).bool())
        if self.options.neighbour_rule and self.options.relabel_weight != "one":
            bank, block = survey.all_gather(survey["z"]), self.options.neighbour_block
            _, nearest = nearest_neighbors(survey["z"], bank, 1, survey.index, block, 8 * block)
            differs = self.refined[nearest[:, 0]] != self.refined[survey.index]
            part.weight = torch.where(differs, part.weight / 2, part.weight)
        self.weight.copy_(survey.all_gather(part.weight))
        self.flagged += (~self.clean & (self.flagged < 255)).to(torch.uint8)

    @property
    def beliefs(self) -> Beliefs:
        """Scores of the last survey; weights, labels and clean flags of the last cleaning."""
        extra = {"empty_classes": float(self.empty_classes)}
        if not self.cleaning_now:
            return replace(self.survey_beliefs, extra=extra)
        extra["threshold"] = self.threshold
        label = self.refined.long()
        return replace(self.survey_beliefs, weight=self.weight, label=label, clean=self.clean, extra=extra)

    # -- training -------------------------------------------------------------------------------------------------------

    def passes(self) -> list[Pass]:
        if self.stage == WARMUP:
            return [Pass(self.data.shuffled(self.order_key()))]
        return [Pass(self.data.shuffled(self.order_key()), ("weak", "strong"))]

    @property
    def mixing_now(self) -> bool:
        return self.cleaning_now or self.options.mixup_before_cleaning or not self.options.cleaning

    @property
    def prototype_weight(self) -> float:
        top, ramp = self.options.prototype, self.options.prototype_ramp * self.config.train.epochs
        return min(1 + self.epoch * (top - 1) / ramp, top) if ramp else top

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Three passes through the network, each with its own batch statistics: weak, strong, mixed."""
        weak = batch.views["weak"]
        features, logits = self.network(weak, batch.mask)
        if self.stage == WARMUP:
            loss = cross_entropy(logits, batch.label, batch.valid, self.world)
            return {"loss": loss, "ce": loss}
        label, weight = batch.label, batch.valid
        if self.cleaning_now:
            label, weight = self.refined[batch.index].long(), self.weight[batch.index] * batch.valid
        parts: dict[str, Tensor] = {}
        weighted = self.options.weighted_ce
        if self.options.cross_entropy:
            parts["ce"] = cross_entropy(
                logits, label if weighted else batch.label, weight if weighted else batch.valid, self.world
            )
        if self.options.contrastive:
            strong, _ = self.network(batch.views["strong"], batch.mask)
            z, z_strong = self.network.embed(features), self.network.embed(strong)
            parts["cc"] = instance_contrastive(
                z, z_strong, batch.valid, self.options.temperature, self.world, batch.rows
            )
        views, mixup = VIEWS[self.options.mixup_views], self.options.mixup if self.mixing_now else 0.0
        parts["pc"] = self.prototype_loss(batch, label, weight, views, mixup, self.options.temperature)
        loss = (
            self.options.cross_entropy * parts.get("ce", 0.0)
            + self.options.contrastive * parts.get("cc", 0.0)
            + self.prototype_weight * parts["pc"]
        )
        return {"loss": loss, **parts}

    # -- evaluation -----------------------------------------------------------------------------------------------------

    def scores(self, images: Tensor) -> dict[str, Tensor]:
        (z, logits), T = self.eval_forward(images), self.options.temperature
        heads = {"prototype": prototype_logits(z, self.current, T), "stale": prototype_logits(z, self.prototypes, T)}
        if self.options.stale_prototypes:
            heads = {"prototype": heads["stale"], "fresh": heads["prototype"]}
        return {**heads, "linear": logits.float()}
