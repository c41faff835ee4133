"""Co-teaching (Han et al., NeurIPS 2018): two networks, each trained on the samples of small loss of the other.

The share of samples left out rises to the noise rate, which is given or estimated. B rows on this rank, N training
samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.data.batch import Batch, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import Beliefs
from pipeline.methods.options import CoTeachingOptions
from pipeline.methods.parts.gaussian_mixture import Fit, posterior_by_class
from pipeline.methods.parts.losses import sample_losses
from pipeline.methods.parts.per_sample import rank_in_batch, update_by_index
from pipeline.methods.parts.survey import Survey
from pipeline.methods.two_networks import TwoNetworks
from pipeline.process.log import log


class CoTeaching(TwoNetworks[CoTeachingOptions]):
    noise: Tensor  # share of samples to leave out in the end
    kept: Tensor  # (N,) float32: how many networks kept the sample in its last step
    score: Tensor  # (N,) float32: mean confidence of the networks in the given label, in its last step

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        self.register_buffer("noise", torch.tensor(self.options.noise_rate or 0.0))
        self.register_buffer("kept", torch.full((len(data),), 2.0))
        self.register_buffer("score", torch.ones(len(data)))
        self.ramp = max(1, round(self.options.ramp * config.train.epochs))

    # -- noise rate -------------------------------------------------------------------------------------

    def surveys_before_epoch(self) -> bool:
        return self.options.noise_rate is None and 0 < self.epoch <= self.ramp

    def survey_outputs(self, images: Tensor, given: Tensor) -> dict[str, Tensor]:
        first, second = (sample_losses(self.eval_network(n)(images)[1], given) for n in range(2))
        return {"loss": first + second}

    def begin_epoch(self, survey: Survey | None) -> None:
        """Estimate the noise rate by a mixture over the losses, before wrong labels are memorised.

        Class by class, because rare classes have large losses whether their labels are right or wrong.
        """
        if self.epoch == 0:
            self._log_noise_rate()
        if survey is None:
            return
        losses = survey.all_gather(survey["loss"]).cpu().numpy()
        clean = posterior_by_class(losses, self.data.given, self.data.classes, "small", Fit(floor=5e-4))
        self.noise.fill_(1 - float(clean.mean()))
        log.info("noise rate %.3f, estimated from the losses of all samples", self.noise)

    def _log_noise_rate(self) -> None:
        if self.options.noise_rate is None:
            log.info("noise rate: estimated in epochs 1 to %d, because method.noise_rate is empty", self.ramp)
        else:
            log.info("noise rate %.3f, given by method.noise_rate", self.options.noise_rate)

    @property
    def left_out(self) -> Tensor:
        """Share of each batch to leave out in this epoch."""
        return self.noise * min(1.0, self.epoch / self.ramp)

    # -- training ---------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        losses = [sample_losses(self.network(n)(batch.views["weak"], batch.mask)[1], batch.label) for n in range(2)]
        easy = [self._has_small_loss(loss, batch) for loss in losses]
        update_by_index(self.kept, batch, easy[0] + easy[1], self.world)
        update_by_index(self.score, batch, (torch.exp(-losses[0]) + torch.exp(-losses[1])) / 2, self.world)
        first, second = (self.world.global_mean(losses[n], easy[1 - n]) for n in range(2))
        return {"loss": first + second, "first": first, "second": second}

    def _has_small_loss(self, loss_B: Tensor, batch: Batch) -> Tensor:
        """(B,) 1 for the samples of the smallest losses in the global batch, else 0."""
        rank, total = rank_in_batch(loss_B, batch, self.world)
        # 1e-4 against rounding: 0.7 of 10 samples are 7, not 6.
        count = torch.floor((1 - self.left_out) * total + 1e-4).clamp_min(1)
        return (rank < count).float() * batch.valid

    @property
    def beliefs(self) -> Beliefs:
        return Beliefs(
            weight=self.kept / 2,
            clean=self.kept > 1.5,  # both kept it
            score=self.score,
            extra={"noise_rate": float(self.noise)},
        )
