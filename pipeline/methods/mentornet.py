"""MentorNet with its predefined curriculum (Jiang et al., ICML 2018): the rule itself, not the network that learns it.

First all samples; then those whose loss is below a moving percentile of the losses; at the end the weight falls
linearly above the percentile. B rows on this rank, G over all ranks, N training samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.data.batch import Batch, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import Beliefs, OneNetwork
from pipeline.methods.options import MentorNetOptions
from pipeline.methods.parts import mixup
from pipeline.methods.parts.losses import sample_losses
from pipeline.methods.parts.per_sample import update_by_index
from pipeline.methods.parts.survey import Survey
from pipeline.models.precision import full_precision
from pipeline.process.log import log

DROPOUT = 1  # purpose of random numbers


@full_precision
def quantile(values_G: Tensor, valid_G: Tensor, part: float) -> Tensor:
    """The `part` quantile of the valid values, with linear interpolation; 0 if there are none. Nothing is read back to the host."""
    ordered = torch.where(valid_G > 0, values_G, torch.inf).sort().values
    last = (valid_G > 0).sum() - 1
    position = (part * last).clamp_min(0)
    low = position.floor().long()
    high = torch.minimum(low + 1, last.clamp_min(0))
    value = torch.lerp(ordered.take(low).double(), ordered.take(high).double(), position.double() - low).to(
        values_G.dtype
    )
    return torch.where(last >= 0, value, 0)


class MentorNet(OneNetwork[MentorNetOptions]):
    moving: Tensor  # moving percentile of the losses; infinite before the first step
    weight: Tensor  # (N,) in the last step of the sample
    score: Tensor  # (N,) confidence in the given label, in that step

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        self.register_buffer("moving", torch.tensor(torch.inf))
        self.register_buffer("weight", torch.ones(len(data)))
        self.register_buffer("score", torch.ones(len(data)))

    @property
    def progress(self) -> float:
        return self.epoch / self.config.train.epochs

    def begin_epoch(self, survey: Survey | None) -> None:
        if self.epoch == 0:
            message = (
                "noise rate %.3f, given by method.percentile=%g: samples beyond it are left out; nothing is estimated"
            )
            log.info(message, 1 - self.options.percentile, self.options.percentile)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        loss_B, loss_G, valid_G = self._losses(batch)
        self._update_percentile(quantile(loss_G, valid_G, self.options.percentile))
        weight = self._curriculum(loss_B.detach())
        update_by_index(self.weight, batch, weight, self.world)
        update_by_index(self.score, batch, torch.exp(-loss_B), self.world)
        early = self.progress < self.options.dropout_part
        seen = mixup.row_uniforms(batch, DROPOUT) >= (self.options.dropout if early else self.options.dropout_late)
        loss = self.world.global_mean(loss_B, weight * seen * batch.valid)
        return {"loss": loss, "moving_percentile": self.moving.clone()}

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(B,) of this rank with gradient; (G,) of all ranks, and which of them are valid."""
        _, logits = self.network(batch.views["weak"])
        loss = sample_losses(logits, batch.label)
        return (
            loss,
            self.world.all_gather_rows(loss.detach(), batch.rows),
            self.world.all_gather_rows(batch.valid, batch.rows),
        )

    @torch.no_grad()
    def _update_percentile(self, percentile: Tensor) -> None:
        decay = self.options.decay
        moved = torch.where(self.moving.isinf(), percentile, decay * self.moving + (1 - decay) * percentile)
        self.moving.copy_(torch.where(moved.isfinite(), moved, self.moving))

    def _curriculum(self, loss_B: Tensor) -> Tensor:
        if self.progress < self.options.burn_in:
            return torch.ones_like(loss_B)
        beyond = loss_B - self.moving
        if self.progress < self.options.soft_start:
            return (beyond <= 0).float()
        return (1 - beyond / self.options.soft_width).clamp(0, 1)

    @property
    def beliefs(self) -> Beliefs:
        return Beliefs(weight=self.weight, clean=self.weight >= 1, score=self.score)
