"""The contract between the trainer and a method. The trainer knows no method by name.

An epoch is  survey (if wanted) -> begin_epoch -> passes -> evaluate.  Everything a method believes lives in buffers or
parameters, so that a checkpoint of the module is a checkpoint of the method.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.config import Config, OptimConfig
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.survey import Survey
from pipeline.world import World


@dataclass(frozen=True)
class Stage:
    """A part of the training with one optimiser and one course of the learning rate."""

    name: str
    epochs: int = 0  # length: whole epochs,
    steps: int = 0  # or steps of one pass (no survey, no evaluation)
    optim: OptimConfig | None = None  # None: the run's own
    constant_lr: bool = False
    fresh_optimizer: bool = True
    trainable: tuple[str, ...] = ("",)  # prefixes of the parameter names that learn


@dataclass
class Beliefs:
    """What a method believes about every training sample, by permanent index. Any part may be unknown."""

    weight: Tensor | None = None  # (N,) float
    label: Tensor | None = None  # (N,) refined label
    clean: Tensor | None = None  # (N,) bool
    score: Tensor | None = None  # (N,) float, confidence in the given label
    extra: dict[str, float] = field(default_factory=dict)  # scalars worth a curve, e.g. the threshold


class Method(nn.Module):
    """Networks, beliefs and losses of one method."""

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__()
        self.config, self.data, self.world = config, data, world
        self.stage = 0
        self.epoch = 0

    # -- the plan --------------------------------------------------------------------------------------------------

    def stages(self) -> list[Stage]:
        return [Stage("train", epochs=self.config.train.epochs)]

    def enter(self, stage: int, epoch: int) -> None:
        """Called before every epoch, also when resuming inside one; must only set what (stage, epoch) determine."""
        self.stage, self.epoch = stage, epoch

    def wants_survey(self) -> bool:
        """Whether the epoch just entered starts with a survey."""
        return False

    def begin_epoch(self, survey: Survey | None) -> None:
        """Update beliefs. Called once per epoch on all ranks; not called again when resuming inside the epoch."""

    def passes(self) -> list[Pass]:
        """The walks of this epoch: a pure function of beliefs, stage and epoch."""
        return [Pass(self.data.shuffled(self.tick()))]

    def tick(self, walk: int = 0) -> int:
        """A number for (stage, epoch, walk) that keys random orders and augmentations."""
        return (self.stage * 1_000_000 + self.epoch) * 8 + walk

    # -- the networks ----------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Named losses of this rank; 'loss' is the one to descend. Averaged over ranks they are global means."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Called after every optimiser step (moving averages)."""

    def survey_outputs(self, images: Tensor) -> dict[str, Tensor]:
        """What the survey keeps of each picture; evaluation mode, no gradient."""
        raise NotImplementedError

    def scores(self, images: Tensor) -> dict[str, Tensor]:
        """Scores (B,K) by head, the one that counts first; evaluation mode. Softmax of them is a distribution."""
        raise NotImplementedError

    # -- what it believes ------------------------------------------------------------------------------------------

    def beliefs(self) -> Beliefs | None:
        return None

    def given_labels(self) -> Tensor:
        return torch.from_numpy(self.data.given.astype(np.int64))
