"""Early-learning regularisation (Liu et al., NeurIPS 2020): ELR with one network, ELR+ with two.

A moving average of the predictions for every sample (the memory) keeps the network from memorising wrong labels:
    L = cross-entropy + strength * mean log(1 - <memory, prediction>).
B rows of a batch on this rank, K classes, N training samples, n of them with their memory on this rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.config import Config
from pipeline.data.batch import Batch, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import Beliefs, OneNetwork
from pipeline.methods.options import ELROptions, ELRPlusOptions
from pipeline.methods.parts import mixup
from pipeline.methods.parts.losses import cross_entropy, soft_cross_entropy
from pipeline.methods.parts.per_sample import update_table
from pipeline.methods.two_networks import TwoNetworks
from pipeline.models.network import Network
from pipeline.models.precision import full_precision
from shards.base.errors import UserError

BLOCK = 8192  # rows at a time
LEAST = 1e-4  # predictions are at least this far from 0 and 1
MIXUP_LAMBDA, MIXUP_PARTNERS = 1, 3  # purposes of random numbers; the second network uses the next ones


@full_precision
def prediction(logits_BK: Tensor, least: float = LEAST) -> Tensor:
    return logits_BK.softmax(1).clamp(least, 1 - least)


@full_precision
def regulariser(prediction_BK: Tensor, memory_BK: Tensor, weight_B: Tensor, world: World) -> Tensor:
    """Mean of log(1 - <memory, prediction>): falls as the prediction agrees with the memory."""
    return world.global_mean(torch.log(1 - (memory_BK * prediction_BK).sum(1)), weight_B)


def memory_beliefs(memory_nK: Tensor, data: TrainingSet, world: World) -> Beliefs:
    """The largest class of the memory is believed; samples not seen yet keep their label."""
    given = data.given_on(memory_nK.device)
    own, rows = given[world.rank_slice(len(data))], world.rank_slice_sizes(len(data))
    parts = []
    for memory, label in zip(memory_nK.split(BLOCK), own.split(BLOCK)):
        memory = memory.reshape(len(label), -1, data.classes).mean(1)  # of both networks, if there are two
        believed = torch.where(memory.sum(1) > 0, memory.argmax(1), label)
        parts.append((believed, memory.gather(1, label[:, None])[:, 0]))
    label, score = (world.all_gather_rows(torch.cat(part), rows) for part in zip(*parts))
    return Beliefs(label=label, clean=label == given, score=score)


class ELR(OneNetwork[ELROptions]):
    memory: Tensor  # (n,K)

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        self.register_table("memory", data.classes)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        _, logits = self.network(batch.views["weak"], batch.mask)
        predicted = prediction(logits)
        fresh = predicted.detach()
        fresh = fresh / fresh.sum(1, keepdim=True)
        memory = update_table(self.memory, batch, fresh, self.world, len(self.data), self.options.beta)
        ce = cross_entropy(logits, batch.label, batch.valid, self.world)
        elr = regulariser(predicted, memory, batch.valid, self.world)
        return {"loss": ce + self.options.strength * elr, "ce": ce, "elr": elr}

    @property
    def beliefs(self) -> Beliefs:
        return memory_beliefs(self.memory, self.data, self.world)


class ELRPlus(TwoNetworks[ELRPlusOptions]):
    """The memory of each network is made by the averaged weights of the other, from images that are not mixed."""

    memory: Tensor  # (n,2,K)

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        if config.model.ema:
            raise UserError("elr_plus averages its weights itself (method.ema). Leave model.ema out.")
        super().__init__(config, data, world)
        self.register_table("memory", 2, data.classes)
        self.steps = 0  # steps done so far; (epoch, step) determine it

    @property
    def average_decay(self) -> float:
        return self.options.ema

    def eval_network(self, number: int) -> Network:
        """The networks themselves; the averages only make the memories."""
        return self.network(number)

    def teacher(self, number: int) -> Network:
        return self.network(number) if self.average is None else self.average[number].network  # type: ignore[return-value]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        self.steps = self._steps_done(batch)
        parts = [self._losses_of(n, batch) for n in range(2)]
        ce, elr = (sum(values) for values in zip(*parts))
        return {"loss": ce + self.options.strength * self._ramp_factor(self.options.ramp) * elr, "ce": ce, "elr": elr}

    def _losses_of(self, n: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy and regulariser of network n."""
        images = batch.views["weak"]
        with torch.no_grad():
            fresh = prediction(self.teacher(1 - n)(images, batch.mask)[1], 0.0)
        memory = update_table(self.memory[:, n], batch, fresh, self.world, len(self.data), self.options.beta)
        lam = mixup.mixup_lambda(batch, self.options.mixup, MIXUP_LAMBDA + n, fold=True)
        partner = mixup.mixup_partners(batch, 1, MIXUP_PARTNERS + n)
        target = mixup.mix(F.one_hot(batch.label, self.data.classes).float(), partner, lam)
        memory = mixup.mix(memory, partner, lam)
        _, logits = self.network(n)(mixup.mix(images, partner, lam), batch.mask)
        if self.options.remembered_targets:
            target = target * memory
            target = target / target.sum(1, keepdim=True).clamp_min(1e-12)
        ce = soft_cross_entropy(logits, target, batch.valid, self.world)
        return ce, regulariser(prediction(logits), memory, batch.valid, self.world)

    def _steps_done(self, batch: Batch) -> int:
        per_epoch = -(-len(self.data) // self.data.batch)
        return self.epoch * per_epoch + batch.step

    def _ramp_factor(self, part: float) -> float:
        """From almost 0 to 1 over this part of the training."""
        per_epoch = -(-len(self.data) // self.data.batch)
        length = part * self.config.train.epochs * per_epoch
        return math.exp(-5 * (1 - min(1.0, self.steps / length)) ** 2) if length else 1.0

    def after_step(self) -> None:
        """Without a ramp a plain average at first, then a moving one."""
        if self.options.ema_ramp:
            decay = self.options.ema * self._ramp_factor(self.options.ema_ramp)
        else:
            decay = min(1 - 1 / (self.steps + 2), self.options.ema)
        for average in self.average or ():
            average.decay = decay  # type: ignore[assignment]
        super().after_step()

    @property
    def beliefs(self) -> Beliefs:
        return memory_beliefs(self.memory, self.data, self.world)
