"""RRL (Li et al., ICCV 2021): neighbours in the embedding correct the labels.

Each epoch: survey -> soft labels from neighbours and classifier -> prototypes of samples with a label ->
    L = L_ce + contrastive * L_cc + prototype(e) * L_pc + reconstruction * L_rec.
n rows of the survey on this rank, N in all, B rows of a batch, K classes, D embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
SIMILARITIES = 1 << 26  # numbers in memory at a time while neighbours are searched


@dataclass
class SoftLabels:
    """(N,K) soft labels: one-hot where the given label is kept, and rows of their own for the other samples only."""

    hard: Tensor  # (N,) likeliest class
    place: Tensor  # (N,) int32 row of the sample, -1 for one-hot
    rows: Tensor  # (M,K)

    def __getitem__(self, index: Tensor) -> Tensor:
        """(...,K) soft labels of some samples; memory of the caller."""
        place, hard = self.place[index].long(), self.hard[index].long()
        soft = (place >= 0) & (place < len(self.rows))  # an exported model may lack the rows
        if len(self.rows):
            out = self.rows[place.clamp(0, len(self.rows) - 1)].mul_(soft[..., None])
        else:
            out = self.rows.new_zeros(*index.shape, self.rows.shape[1])
        return out.scatter_add_(-1, hard[..., None], (~soft).to(out)[..., None])


class RRL(PrototypeMethod[RRLOptions]):
    bank: Tensor  # (N,D) embeddings of the last survey: neighbours for evaluation
    hard: Tensor  # (N,) likeliest class of the soft label
    soft_place: Tensor  # (N,) and
    soft_rows: Tensor  # (M,K): see SoftLabels
    kept: Tensor  # (N,) bool: the given label is kept
    used: Tensor  # (N,) float: 1 for samples that have a label, kept or corrected

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        K, D, N = data.classes, config.model.embedding, len(data)
        self.decoder = nn.Linear(D, self.network.features)
        given = torch.from_numpy(data.given)
        self.register_buffer("bank", torch.zeros(N, D))
        self.register_buffer("hard", given.to(torch.int16 if K < 2**15 else torch.int32, copy=True))
        self.register_buffer("soft_place", torch.full((N,), -1, dtype=torch.int32))
        self.register_growing("soft_rows", K)
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
        survey.all_gather(survey["z"].to(self.bank), out=self.bank)
        if self.cleaning_now:
            self._clean_labels(survey)
        label, weight = self.hard[survey.index].long(), self.used[survey.index]
        self.prototypes.copy_(class_prototypes(survey["z"], label, weight, self.prototypes, self.world)[0])

    def end_epoch(self, survey: Survey | None) -> None:
        if survey is not None:
            survey.all_gather(survey["z"].to(self.bank), out=self.bank)

    @property
    def soft(self) -> SoftLabels:
        return SoftLabels(self.hard, self.soft_place, self.soft_rows)

    def _clean_labels(self, survey: Survey) -> None:
        """Half of a soft label comes from the neighbours' soft labels, half from the classifier."""
        soft, o = self.soft, self.options

        def classifier(rows: slice) -> Tensor:
            return survey["linear"][rows].softmax(1)

        def mixed(rows: slice) -> Tensor:
            z, own = survey["z"][rows], survey.index[rows]
            neighbours = knn_label_distribution(z, self.bank, soft, o.neighbours, o.temperature, o.neighbour_block, own)
            return (neighbours + classifier(rows)) / 2

        if self.epoch == self.first_cleaning:  # neighbours need soft labels to start from
            soft = self._keep_given(classifier, survey)[0]
        soft, kept, top, self.given_score = self._keep_given(mixed, survey)
        self.hard.copy_(soft.hard)
        self.soft_place.copy_(soft.place)
        self.soft_rows = soft.rows.to(self.soft_rows)
        self.kept.copy_(kept)
        self.used.copy_(top > o.use_above)

    def _keep_given(
        self, scores: Callable[[slice], Tensor], survey: Survey
    ) -> tuple[SoftLabels, Tensor, Tensor, Tensor]:
        """Soft labels of all ranks from the scores of some rows of the survey: one-hot where the given label scores enough.

        Then (N,) each: whether it does; the largest value of the soft label; the score of the given label.
        """
        parts: list[tuple[Tensor, ...]] = []
        for start in range(0, max(len(survey.index), 1), self.options.neighbour_block):
            rows = slice(start, start + self.options.neighbour_block)
            soft, given = scores(rows), self.data.labels(survey.index[rows])
            score, (top, hard) = soft.gather(1, given[:, None])[:, 0], soft.max(1)
            kept = score > self.options.keep_above
            # Class numbers as int32 and truth values as bytes: gloo and NCCL know few types.
            hard, top = torch.where(kept, given, hard).int(), torch.where(kept, 1.0, top)
            parts.append((hard, kept.to(torch.uint8), top, score, soft[~kept]))
        hard, kept, top, score, soft_rows = map(torch.cat, zip(*parts))
        del parts
        hard, kept, top, score = map(survey.all_gather, (hard, kept, top, score))
        corrected = kept == 0
        counts = [int(part.sum()) for part in corrected.split(self.world.rank_slice_sizes(survey.total))]
        place = torch.where(corrected, corrected.cumsum(0, dtype=torch.int32) - 1, -1)
        return SoftLabels(hard, place, self.world.all_gather_rows(soft_rows, counts)), ~corrected, top, score

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if (whole := state_dict.pop(f"{prefix}soft", None)) is not None:  # of version 0.1: (N,K)
            corrected = whole.max(1).values < 1
            place = torch.where(corrected, corrected.cumsum(0, dtype=torch.int32) - 1, -1)
            state_dict |= {f"{prefix}soft_place": place, f"{prefix}soft_rows": whole[corrected]}
        super()._load_from_state_dict(state_dict, prefix, *args)

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
    soft_NK: Tensor | SoftLabels,
    k: int,
    temperature: float,
    block: int,
    own_n: Tensor | None = None,
) -> Tensor:
    """(n,K) mean soft label of the k nearest of the bank, weighted by exp(cosine / temperature).

    `own_n` is the bank index of the sample itself, which does not count. Memory: block x k x K.
    """
    k = min(k, len(bank_ND) - (own_n is not None))
    parts = [soft_NK[torch.zeros(0, dtype=torch.long, device=z_nD.device)]]  # (0,K)
    for start in range(0, len(z_nD), block):
        rows = slice(start, start + block)
        own = None if own_n is None else own_n[rows]
        bank_block = max(k, SIMILARITIES // block)
        cosine, neighbor = nearest_neighbors(z_nD[rows], bank_ND, k, own, block, bank_block)
        parts.append(soft_NK[neighbor].mul_((cosine / temperature).softmax(1)[:, :, None]).sum(1))
    return torch.cat(parts)
