"""The base class of methods that select samples by their labels and train on these, drawn class-balanced.

    L = cross-entropy of mixed selected samples + consistency * L_fc of all samples.
B rows of a batch on this rank, N samples in all.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import TypeVar

from pipeline.config import Config
from pipeline.data import sampling
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import OneNetwork
from pipeline.methods.options import SelectionOptions
from pipeline.methods.parts.losses import soft_cross_entropy
from pipeline.methods.parts.mixup import mix, mixup_lambda, mixup_partners
from pipeline.methods.parts.projection import Projection
from pipeline.models.network import unit
from pipeline.models.precision import full_precision

HIDDEN = 256  # width between the layers of both perceptrons
MIXUP_LAMBDA, MIXUP_PARTNERS = 1, 2  # purposes of random numbers
ALL, SELECTED = 0, 1  # streams of a pass

Selection = TypeVar("Selection", bound=SelectionOptions, default=SelectionOptions, covariant=True)


class SelectionMethod(OneNetwork[Selection]):
    label: Tensor  # (N,) the label a selected sample is trained with
    selected: Tensor  # (N,) bool

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        kind = torch.int16 if data.classes < 2**15 else torch.int32
        self.register_buffer("label", torch.tensor(data.given, dtype=kind))
        self.register_buffer("selected", torch.ones(len(data), dtype=torch.bool))
        if self.options.consistency:
            D, width, rows = self.network.features, self.options.projection, self.network.rows
            self.projector = Projection(D, HIDDEN, width, rows)
            self.predictor = Projection(width, HIDDEN, width, rows)

    def passes(self) -> list[Pass]:
        """All samples, and beside them selected ones, equally many of every class that has some."""
        selected = self.selected.cpu().numpy()
        if not selected.any():  # a vote that confirms no label is no information
            selected = np.ones_like(selected)
        label = np.where(selected, self.label.cpu().numpy(), -1)
        rows = -(-len(self.data) // self.data.batch) * self.data.batch
        counts = np.bincount(label[selected], minlength=self.data.classes)
        key = self.order_key()
        length = min(rows, int(counts.max()) * int((counts > 0).sum()))
        chosen = sampling.balanced(label, self.data.classes, self.data.seed, key, length, SELECTED)
        chosen = self.data.shuffled(key, chosen, SELECTED)
        pair = ("strong", "strong2")
        if not self.options.consistency:
            return [Pass(np.resize(chosen, rows), pair)]
        return [Pass(self.data.shuffled(key), ("weak", "strong"), second=chosen, second_views=pair)]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        parts = {"ce": self.mixed_loss(batch.second or batch)}
        if self.options.consistency:
            parts["fc"] = self.consistency_loss(batch)
        return {"loss": parts["ce"] + self.options.consistency * parts.get("fc", 0.0), **parts}

    def mixed_loss(self, batch: Batch) -> Tensor:
        images = torch.cat([batch.views["strong"], batch.views["strong2"]])
        target = F.one_hot(self.label[batch.index].long(), self.data.classes).float().repeat(2, 1)
        lam = mixup_lambda(batch, self.options.mixup, MIXUP_LAMBDA, fold=True)
        partner = mixup_partners(batch, 2, MIXUP_PARTNERS)
        _, logits = self.network(mix(images, partner, lam), batch.mask)
        return soft_cross_entropy(logits, mix(target, partner, lam), batch.valid.repeat(2), self.world)

    def consistency_loss(self, batch: Batch) -> Tensor:
        """From the strong view the projection of the weak one is predicted; no gradient reaches the weak view."""
        with torch.no_grad():
            wanted = self.projector(self.network(batch.views["weak"], batch.mask)[0], batch.mask)
        features, _ = self.network(batch.views["strong"], batch.mask)
        predicted = self.predictor(self.projector(features, batch.mask), batch.mask)
        return negative_cosine(predicted, wanted, batch.valid, self.world)


@full_precision
def negative_cosine(first_BD: Tensor, second_BD: Tensor, weight_B: Tensor, world: World) -> Tensor:
    return world.global_mean(-(unit(first_BD) * unit(second_BD)).sum(1), weight_B)
