"""A self-supervised start for any method (`model.start=simclr`): SimCLR (Chen et al., ICML 2020) on the same pictures.

Wrong labels cannot harm a backbone that has learned without them (C2D, Zheltonozhskii et al., WACV 2022). A stage before those of the method trains the
first network's backbone to find the other of two changed views of a picture among all views of the batch. Afterwards every
network of the method begins with this backbone and with its own head. B rows on this rank, D width of the projection.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeline.config import SIMCLR, Config
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.data.crops import CONTRAST
from pipeline.distributed.world import World
from pipeline.methods.base import Beliefs, Method, Stage, load_method
from pipeline.methods.parts.losses import nt_xent
from pipeline.methods.parts.survey import Survey
from pipeline.models.network import Network, unit
from pipeline.models.precision import full_precision

VIEWS = (CONTRAST, f"{CONTRAST}2")
WIDTH = 128  # of the projection, as in the paper
PROJECTOR = "start_projector"
_STAGE = 1_000_000  # in order keys: the orders of the method's own stages are those of a run without this one


def method_class(config: Config) -> type[Method]:
    """The class that implements the method of these settings, with its start."""
    own = load_method(config.method.name)
    return type(own.__name__, (SimCLRStart, own), {}) if config.model.start == SIMCLR else own


class SimCLRStart(Method):
    """Stands before the class of a method: in the first stage it answers the trainer, in the others the method does.

    The projector is made for this stage: two layers serve the backbone better than the linear projector of methods with
    embeddings (the paper's figure 8), and most methods have none. It has no batch normalisation, so nothing of it
    is shared between rows.
    """

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        self.starting = False  # whether this is the first stage
        self.start_epoch = 0
        features = self._first.features
        with torch.random.fork_rng(devices=[]):  # the same start for every method, and the weights of one without it
            torch.manual_seed(config.seed)
            self.start_projector: nn.Module | None = nn.Sequential(
                nn.Linear(features, features), nn.ReLU(), nn.Linear(features, WIDTH)
            )

    @property
    def _first_name(self) -> str:
        """Of the network that learns; averages are made after what they average."""
        return next(str(name) for name, module in self.named_modules() if isinstance(module, Network))

    @property
    def _first(self) -> Network:
        return next(module for module in self.modules() if isinstance(module, Network))

    # -- the stage -------------------------------------------------------------------------------------

    def stages(self) -> list[Stage]:
        epochs = max(1, round(self.config.model.start_part * self.config.train.epochs))
        optim = self.config.optim.model_copy(update={"schedule": "cosine"})
        trainable = (f"{self._first_name}.backbone.", f"{PROJECTOR}.")
        first, *others = super().stages()
        return [
            Stage(
                "self-supervised start",
                epochs=epochs,
                optim=optim,
                trainable=trainable,
                evaluated=False,
                self_supervised=True,
            ),
            replace(first, fresh_optimizer=True),
            *others,
        ]

    def set_epoch(self, stage: int, epoch: int) -> None:
        self.starting = stage == 0
        if not self.starting:
            return super().set_epoch(stage - 1, epoch)
        self.start_epoch = epoch
        for module in self.modules():
            if isinstance(module, Network):
                module.frozen = False  # what model.freeze lets rest in the first epochs of other stages

    def order_key(self, pass_index: int = 0) -> int:
        return (_STAGE * 1_000_000 + self.start_epoch) * 8 if self.starting else super().order_key(pass_index)

    def passes(self) -> list[Pass]:
        return [Pass(self.data.shuffled(self.order_key()), VIEWS)] if self.starting else super().passes()

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        if not self.starting:
            return super().forward(batch)
        assert self.start_projector is not None
        features, _ = self._first(torch.cat([batch.views[view] for view in VIEWS]), batch.mask)
        first, second = unit(full_precision(self.start_projector)(features)).chunk(2)
        loss = nt_xent(first, second, batch.valid, self.config.model.start_temperature, self.world, batch.rows)
        return {"loss": loss, "contrastive": loss}

    def share_backbone(self) -> nn.Module:
        """At the end of the stage: all networks, also those inside averages, begin with the backbone, which is returned."""
        first = self._first
        for network in [module for module in self.modules() if isinstance(module, Network) and module is not first]:
            network.backbone.load_state_dict(first.backbone.state_dict())
            if network.feature_norm == "batch":
                network.norm.load_state_dict(first.norm.state_dict())
        self.start_projector = None
        return first.backbone

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        if not any(name.startswith(f"{prefix}{PROJECTOR}.") for name in state_dict):
            self.start_projector = None  # the stage is over
        super()._load_from_state_dict(state_dict, prefix, *args)

    # -- what the method does in its own stages ---------------------------------------------------------

    def surveys_before_epoch(self) -> bool:
        return not self.starting and super().surveys_before_epoch()

    def surveys_after_epoch(self) -> bool:
        return not self.starting and super().surveys_after_epoch()

    def begin_epoch(self, survey: Survey | None) -> None:
        if not self.starting:
            super().begin_epoch(survey)

    def after_step(self) -> None:
        if not self.starting:
            super().after_step()

    @property
    def beliefs(self) -> Beliefs | None:
        return None if self.starting else super().beliefs
