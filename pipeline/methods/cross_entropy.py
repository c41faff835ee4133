"""Plain cross-entropy on the given labels: the baseline."""

from __future__ import annotations

from torch import Tensor

from pipeline.data.batch import Batch
from pipeline.methods.base import OneNetwork
from pipeline.methods.options import CrossEntropyOptions
from pipeline.methods.parts.losses import cross_entropy


class CrossEntropy(OneNetwork[CrossEntropyOptions]):
    def forward(self, batch: Batch) -> dict[str, Tensor]:
        _, logits = self.network(batch.views["weak"], batch.mask)
        loss = cross_entropy(logits, batch.label, batch.valid, self.world)
        return {"loss": loss, "ce": loss}
