"""LDAM and LDAM-DRW (Cao et al., NeurIPS 2019): larger margins for rarer classes; class weights late in the training.

Counts are those of the given labels. B rows on this rank, K classes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.config import Config
from pipeline.data.batch import Batch, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import OneNetwork
from pipeline.methods.options import LDAMDRWOptions, LDAMOptions
from pipeline.methods.parts.losses import cross_entropy
from pipeline.models.precision import full_precision


def class_margins(counts_K: np.ndarray, largest: float) -> Tensor:
    """(K,) in proportion to count^(-1/4), `largest` for the rarest class; 0 for classes without samples."""
    present = counts_K > 0
    raw = np.where(present, np.maximum(counts_K, 1) ** -0.25, 0.0)
    return torch.from_numpy(largest * raw / max(raw.max(initial=0), 1e-12)).float()


def class_weights(counts_K: np.ndarray, beta: float) -> Tensor:
    """(K,) one over the effective number of samples, with mean 1; 0 for classes without samples."""
    present = counts_K > 0
    counts = np.maximum(counts_K, 1).astype(np.float64)
    effective = (1 - beta**counts) / (1 - beta) if beta < 1 else counts
    raw = np.where(present, 1 / effective, 0.0)
    return torch.from_numpy(raw * present.sum() / max(raw.sum(), 1e-12)).float()


@full_precision
def margin_logits(cosine_BK: Tensor, label_B: Tensor, margins_K: Tensor, scale: float) -> Tensor:
    """Scaled cosines, minus its margin for the class of the label."""
    margin = F.one_hot(label_B, len(margins_K)) * margins_K[label_B][:, None]
    return scale * (cosine_BK - margin)


class LDAM(OneNetwork[LDAMOptions]):
    margins: Tensor  # (K,)
    weights: Tensor  # (K,)

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world, cosine=True)
        self.register_buffer("margins", class_margins(data.counts, self.options.max_margin))
        self.register_buffer("weights", torch.ones(data.classes))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        _, cosine = self.network(batch.views["weak"], batch.mask)
        logits = margin_logits(cosine, batch.label, self.margins, self.options.scale)
        loss = cross_entropy(logits, batch.label, batch.valid * self.weights[batch.label], self.world)
        return {"loss": loss}

    def scores(self, images: Tensor) -> dict[str, Tensor]:
        """Without margins, with the scale: the softmax of these is the trained prediction."""
        return {"cosine": self.options.scale * self.eval_network(images)[1].float()}


class LDAMDRW(LDAM):
    options: LDAMDRWOptions

    def set_epoch(self, stage: int, epoch: int) -> None:
        super().set_epoch(stage, epoch)
        late = epoch >= round(self.options.reweight_start * self.config.train.epochs)
        self.weights.copy_(
            class_weights(self.data.counts, self.options.beta) if late else torch.ones(self.data.classes)
        )
