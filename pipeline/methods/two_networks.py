"""The base class of methods with two networks: the pair, their moving averages, and their common prediction.

The networks have the same architecture and start from different weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.config import Config
from pipeline.data.batch import TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import Method, Options
from pipeline.models.network import Average, Network, unit


class TwoNetworks(Method[Options]):
    """Two networks and, if asked for, a moving average of each that is evaluated.

    Parameters are named `networks.0.…` and `networks.1.…`: prefixes for Stage.trainable and Pass.trainable.
    """

    def __init__(self, config: Config, data: TrainingSet, world: World, embed: bool = False) -> None:
        super().__init__(config, data, world)
        self.networks = nn.ModuleList(Network(config.model, data.classes, world, embed) for _ in range(2))
        decay = self.average_decay
        self.average = nn.ModuleList(Average(network, decay) for network in self.networks) if decay else None

    @property
    def average_decay(self) -> float:
        """Decay of the moving averages; 0: there are none."""
        return self.config.model.ema

    def network(self, number: int) -> Network:
        return self.networks[number]  # type: ignore[return-value]

    def eval_network(self, number: int) -> Network:
        """The network used for survey, evaluation and prediction."""
        return self.network(number) if self.average is None else self.average[number].network  # type: ignore[return-value]

    def after_step(self) -> None:
        if self.average is not None:
            for average, network in zip(self.average, self.networks):
                average.update(network)  # type: ignore[operator]

    def scores(self, images: Tensor) -> dict[str, Tensor]:
        """First the mean of the logits, then those of each network."""
        first, second = (self.eval_network(n)(images)[1].float() for n in range(2))
        return {"both": (first + second) / 2, "first": first, "second": second}

    def embeddings(self, images: Tensor) -> Tensor:
        """Cosines of these are the mean of the two networks' cosines."""
        return unit(torch.cat([unit(self.eval_network(n)(images)[0]) for n in range(2)], 1))
