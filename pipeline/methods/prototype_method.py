"""What methods share whose network also puts pictures on the unit sphere, where class prototypes lie.

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

MIX_COEFFICIENT, MIX_PARTNER = 1, 2  # purposes of random numbers


class PrototypeMethod(OneNetwork[Options]):
    """One network with a projector, and prototypes to compare its embeddings with."""

    prototypes: Tensor  # (K,D)

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world, embed=True)
        self.register_buffer("prototypes", torch.zeros(data.classes, config.model.embedding))

    def eval_forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(B,D) embeddings and (B,K) logits of the linear head, by the network that judges."""
        features, logits = self.eval_network(images)
        return self.eval_network.embed(features), logits

    def embeddings(self, images: Tensor) -> Tensor:
        return self.eval_forward(images)[0]

    def prototype_loss(
        self, batch: Batch, label: Tensor, weight: Tensor, views: Sequence[str], mixup: float, temperature: float
    ) -> Tensor:
        """L_pc (paper eq. 3): mixed pictures towards the mixture of their prototypes; mixup 0 leaves them as they are.

        Samples of weight zero neither learn nor lend their picture.
        """
        images = torch.cat([batch.views[view] for view in views])
        target = F.one_hot(label, self.data.classes).float().repeat(len(views), 1)
        weights = weight.repeat(len(views))
        if mixup:
            lam = mixup_lambda(batch, mixup, MIX_COEFFICIENT)
            partner = mixup_partners(replace(batch, valid=weight), len(views), MIX_PARTNER)
            images, target, weights = (mix(v, partner, lam) for v in (images, target, weights))
        z = self.network.embed(self.network(images)[0])
        return soft_cross_entropy(prototype_logits(z, self.prototypes, temperature), target, weights, self.world)


VIEWS = {"both": ("weak", "strong"), "weak": ("weak",)}  # what `mixup_views` stands for
