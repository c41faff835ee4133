"""Cross-entropy on the labels and weights that an earlier run arrived at, from its backbone and head on (`model.start`).

An earlier run on frozen features finds wrong labels quickly; this one lets the backbone learn without them. Started from
nothing, it believes all given labels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.data.batch import Batch, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import Beliefs, OneNetwork
from pipeline.methods.options import FinetuneOptions
from pipeline.methods.parts.losses import cross_entropy

LARGEST = 20.0  # factor on the weight of a sample for the rarity of its class


class Finetune(OneNetwork[FinetuneOptions]):
    weight: Tensor  # (N,) float32
    refined: Tensor  # (N,) int16 or int32

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        small = data.classes < 2**15
        self.register_buffer("weight", torch.ones(len(data)))
        self.register_buffer("refined", torch.tensor(data.given, dtype=torch.int16 if small else torch.int32))
        self.factors = self.class_factors()

    def set_epoch(self, stage: int, epoch: int) -> None:
        super().set_epoch(stage, epoch)
        self.factors = self.class_factors()  # beliefs came with the weights and do not change in this run

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        _, logits = self.network(batch.views["weak"], batch.mask)
        label = self.refined[batch.index].long()
        weight = self.weight[batch.index] * self.factors[label]
        loss = cross_entropy(logits, label, weight * batch.valid, self.world)
        return {"loss": loss, "ce": loss}

    def class_factors(self) -> Tensor:
        """(K,) (mean size of a class / its size) ** balance; sizes are sums of weights by refined label."""
        size_K = torch.zeros(self.data.classes, dtype=torch.float64, device=self.weight.device)
        size_K.index_add_(0, self.refined.long(), self.weight.double())
        ratio_K = size_K.mean() / size_K.clamp_min(1e-9)
        return (ratio_K**self.options.balance).clamp_max(LARGEST).float()

    @property
    def beliefs(self) -> Beliefs:
        return Beliefs(weight=self.weight, label=self.refined.long())
