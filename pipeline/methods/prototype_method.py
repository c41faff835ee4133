"""The base class of methods that compare embeddings on the unit sphere with class prototypes.

B rows on this rank, K classes, D embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.config import Config
from pipeline.data.batch import Batch, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import OneNetwork, Options
from pipeline.methods.parts.losses import prototype_logits, soft_cross_entropy
from pipeline.methods.parts.mixup import mix, mixup_lambda, mixup_partners

MIXUP_LAMBDA, MIXUP_PARTNERS = 1, 2  # purposes of random numbers


class PrototypeMethod(OneNetwork[Options]):
    """One network with a projector, and prototypes to compare its embeddings with."""

    prototypes: Tensor  # (K,D)

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world, embed=True)
        self.register_buffer("prototypes", torch.zeros(data.classes, config.model.embedding))

    def eval_forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(B,D) embeddings and (B,K) logits of the linear head, by `eval_network`."""
        features, logits = self.eval_network(images)
        return self.eval_network.embed(features), logits

    def embeddings(self, images: Tensor) -> Tensor:
        return self.eval_forward(images)[0]

    def prototype_loss(
        self, batch: Batch, label: Tensor, weight: Tensor, views: Sequence[str], mixup: float, temperature: float
    ) -> Tensor:
        """L_pc (paper eq. 3): mixed images against mixed labels, by prototypes; with mixup 0 they are not mixed.

        Samples of weight zero do not count, and others are not mixed with them.
        """
        images = torch.cat([batch.views[view] for view in views])
        target = F.one_hot(label, self.data.classes).float().repeat(len(views), 1)
        weights = weight.repeat(len(views))
        if mixup:
            lam = mixup_lambda(batch, mixup, MIXUP_LAMBDA)
            partner = mixup_partners(replace(batch, valid=weight), len(views), MIXUP_PARTNERS)
            images, target, weights = (mix(v, partner, lam) for v in (images, target, weights))
        z = self.network.embed(self.network(images, batch.mask)[0])
        return soft_cross_entropy(prototype_logits(z, self.prototypes, temperature), target, weights, self.world)


VIEWS = {"both": ("weak", "strong"), "weak": ("weak",)}  # by the option `mixup_views`
