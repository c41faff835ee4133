"""RRL (Li et al., ICCV 2021): neighbours in the embedding correct the labels.

Each epoch: survey -> soft labels from neighbours and classifier -> prototypes of samples with a label ->
    L = L_ce + contrastive * L_cc + prototype(e) * L_pc + reconstruction * L_rec.
n rows of the survey on this rank, N in all, B rows of a batch, K classes, D embedding width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.config import Config
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import Beliefs, Stage
from pipeline.methods.options import RRLOptions
from pipeline.methods.parts.losses import cross_entropy, instance_contrastive
from pipeline.methods.parts.nearest_neighbors import nearest_neighbors
from pipeline.methods.parts.prototypes import class_prototypes
from pipeline.methods.parts.survey import Survey
from pipeline.methods.prototype_method import VIEWS, PrototypeMethod
from pipeline.models.network import unit
from pipeline.models.precision import full_precision

WARMUP, MAIN = 0, 1


class RRL(PrototypeMethod[RRLOptions]):
    bank: Tensor  # (N,D) embeddings of the last survey: neighbours for evaluation
    soft: Tensor  # (N,K) soft labels; one-hot where the given label is kept
    hard: Tensor  # (N,) their likeliest class
    kept: Tensor  # (N,) bool: the given label is kept
    used: Tensor  # (N,) float: 1 for samples that have a label, kept or corrected

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        K, D, N = data.classes, config.model.embedding, len(data)
        self.decoder = nn.Linear(D, self.network.features)
        given = torch.from_numpy(data.given).long()
        self.register_buffer("bank", torch.zeros(N, D))
        self.register_buffer("soft", F.one_hot(given, K).float())
        self.register_buffer("hard", given.to(torch.int16 if K < 2**15 else torch.int32))
        self.register_buffer("kept", torch.ones(N, dtype=torch.bool))
        self.register_buffer("used", torch.ones(N))
        # (N,) score of the given label in the last survey; in no checkpoint, since only the epoch's metrics need it
        self.given_score: Tensor | None = None

    def stages(self) -> list[Stage]:
        reconstruction = ("network.projector", "decoder") if self.options.reconstruction else ()
        warmup = ("network.backbone", "network.head", *reconstruction)
        trainable = ("network.", *reconstruction)
        return [
            Stage("warm-up", steps=self.options.warmup_steps, constant_lr=True, trainable=warmup),
            Stage("train", epochs=self.config.train.epochs, fresh_optimizer=False, trainable=trainable),
        ]

    # -- beliefs ---------------------------------------------------------------------------------------------

    @property
    def first_cleaning(self) -> int:
        return round(self.options.cleaning_start * self.config.train.epochs)

    @property
    def cleaning_now(self) -> bool:
        return self.stage == MAIN and self.epoch >= self.first_cleaning

    def surveys_before_epoch(self) -> bool:
        return self.stage == MAIN

    def surveys_after_epoch(self) -> bool:
        return self.stage == MAIN

    def survey_outputs(self, images: Tensor, given: Tensor) -> dict[str, Tensor]:
        return dict(zip(("z", "linear"), self.eval_forward(images)))

    def begin_epoch(self, survey: Survey | None) -> None:
        if survey is None:
            return
        self.bank.copy_(survey.all_gather(survey["z"]))
        if self.cleaning_now:
            self._clean_labels(survey)
        label, weight = self.hard[survey.index].long(), self.used[survey.index]
        self.prototypes.copy_(class_prototypes(survey["z"], label, weight, self.prototypes, self.world)[0])

    def end_epoch(self, survey: Survey | None) -> None:
        if survey is not None:
            self.bank.copy_(survey.all_gather(survey["z"]))

    def _clean_labels(self, survey: Survey) -> None:
        """Half of a soft label comes from the neighbours' soft labels, half from the classifier."""
        given = self.data.labels(survey.index)
        classifier = survey["linear"].softmax(1)
        if self.epoch == self.first_cleaning:  # neighbours need soft labels to start from
            self.soft.copy_(survey.all_gather(self._keep_given(classifier, given)[0]))
        neighbours = knn_label_distribution(
            survey["z"], self.bank, self.soft, self.options.neighbours, self.options.temperature,
            self.options.neighbour_block, survey.index,
        )  # fmt: skip
        mixed = (neighbours + classifier) / 2
        soft, kept = self._keep_given(mixed, given)
        top, hard = soft.max(1)
        self.soft.copy_(survey.all_gather(soft))
        self.hard.copy_(survey.all_gather(hard.int()))  # gloo and NCCL have no int16
        self.kept.copy_(survey.all_gather(kept.to(torch.uint8)).bool())
        self.used.copy_(survey.all_gather((top > self.options.use_above).float()))
        self.given_score = survey.all_gather(mixed.gather(1, given[:, None])[:, 0])

    def _keep_given(self, soft_nK: Tensor, given_n: Tensor) -> tuple[Tensor, Tensor]:
        """Soft labels, one-hot where the given label is kept; and (n,) bool: where it is kept."""
        kept = soft_nK.gather(1, given_n[:, None])[:, 0] > self.options.keep_above
        return torch.where(kept[:, None], F.one_hot(given_n, soft_nK.shape[1]).to(soft_nK), soft_nK), kept

    @property
    def beliefs(self) -> Beliefs | None:
        if not self.cleaning_now:
            return None
        label = self.hard.long()
        return Beliefs(self.used, label, self.kept, self.given_score, basis=(label, self.used))

    # -- training --------------------------------------------------------------------------------------------

    def passes(self) -> list[Pass]:
        views = ("weak",) if self.stage == WARMUP else ("weak", "strong")
        return [Pass(self.data.shuffled(self.order_key()), views)]

    @property
    def prototype_weight(self) -> float:
        top, ramp = self.options.prototype, self.options.prototype_ramp * self.config.train.epochs
        return min(1 + self.epoch * (top - 1) / ramp, top) if ramp else top

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Before cleaning `hard` and `used` are those of the given labels."""
        label, weight = self.hard[batch.index].long(), batch.valid * self.used[batch.index]
        features, logits = self.network(batch.views["weak"], batch.mask)
        parts = {"ce": cross_entropy(logits, label, weight, self.world)}
        z, parts["rec"] = self._embed_and_reconstruct(features, batch)
        if self.stage == MAIN:
            strong, _ = self.network(batch.views["strong"], batch.mask)
            z_strong, error = self._embed_and_reconstruct(strong, batch)
            parts["rec"] = parts["rec"] + error
            parts["cc"] = instance_contrastive(
                z, z_strong, batch.valid, self.options.temperature, self.world, batch.rows
            )
            views, mixup = VIEWS[self.options.mixup_views], self.options.mixup
            parts["pc"] = self.prototype_loss(batch, label, weight, views, mixup, self.options.temperature)
        loss = (
            parts["ce"]
            + self.options.reconstruction * parts["rec"]
            + self.options.contrastive * parts.get("cc", 0.0)
            + self.prototype_weight * parts.get("pc", 0.0)
        )
        return {"loss": loss, **parts}

    def _embed_and_reconstruct(self, features: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(B,D) unit embeddings, and the error of reconstructing the features from them."""
        assert self.network.projector is not None
        if not self.options.reconstruction:
            return self.network.embed(features), features.new_zeros(())
        code = self.network.projector(features)
        return unit(code), reconstruction_error(self.decoder(code), features, batch.valid, self.world)

    # -- evaluation ------------------------------------------------------------------------------------------

    def scores(self, images: Tensor) -> dict[str, Tensor]:
        (z, logits), o = self.eval_forward(images), self.options
        neighbours = knn_label_distribution(z, self.bank, self.soft, o.neighbours, o.temperature, o.neighbour_block)
        return {"linear": logits.float(), "neighbours": neighbours.clamp_min(1e-8).log()}


@full_precision
def reconstruction_error(decoded_BF: Tensor, features_BF: Tensor, valid_B: Tensor, world: World) -> Tensor:
    return world.global_mean((decoded_BF.relu() - features_BF).square().mean(1), valid_B)


@full_precision
def knn_label_distribution(
    z_nD: Tensor,
    bank_ND: Tensor,
    soft_NK: Tensor,
    k: int,
    temperature: float,
    block: int,
    own_n: Tensor | None = None,
) -> Tensor:
    """(n,K) mean soft label of the k nearest of the bank, weighted by exp(cosine / temperature).

    `own_n` is the bank index of the sample itself, which does not count. Memory: block x (N + k*K).
    """
    k = min(k, len(bank_ND) - (own_n is not None))
    out = soft_NK.new_zeros(len(z_nD), soft_NK.shape[1])
    for start in range(0, len(z_nD) if k else 0, block):
        rows = slice(start, start + block)
        own = None if own_n is None else own_n[rows]
        cosine, neighbor = nearest_neighbors(z_nD[rows], bank_ND, k, own, block)
        out[rows] = ((cosine / temperature).softmax(1)[:, :, None] * soft_NK[neighbor]).sum(1)
    return out
