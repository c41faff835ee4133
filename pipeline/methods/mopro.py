"""MoPro (Li et al., ICLR 2021): labels corrected in every step by moving prototypes; a balanced classifier.

Losses of a step: cross-entropy, contrast against a queue of keys from an averaged network, and contrast against the
prototypes. Queue, prototypes and beliefs change after the step, in the same way on all ranks.
B rows on this rank, G over all ranks, K classes, D embedding width, N training samples.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.data import sampling
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import Beliefs, Stage
from pipeline.methods.options import MoProOptions
from pipeline.methods.parts.key_queue import enqueue, queue_contrastive
from pipeline.methods.parts.losses import cross_entropy, prototype_logits
from pipeline.methods.parts.survey import Survey
from pipeline.methods.prototype_method import PrototypeMethod
from pipeline.models.network import Average, unit
from pipeline.models.precision import full_precision
from shards.base.errors import UserError

MAIN, RETRAIN = 0, 1


class MoPro(PrototypeMethod[MoProOptions]):
    """A prototype is zero until its class was seen."""

    queue: Tensor  # (Q+1,D) keys; the last row takes keys of padding rows
    written: Tensor  # how many keys were ever written
    label: Tensor  # (N,) corrected label of the sample's last step
    kept: Tensor  # (N,) 1 where the given label scores above chance
    used: Tensor  # (N,) 1 where the sample has a label, kept or corrected
    score: Tensor  # (N,) score of the given label

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        if self.options.queue < config.data.batch:
            raise UserError(
                f"method.queue={self.options.queue} cannot hold the keys of one step; set it to data.batch="
                f"{config.data.batch} or more."
            )
        self.key_average = Average(self.network, self.options.momentum)
        self.register_buffer("queue", torch.zeros(self.options.queue + 1, config.model.embedding))
        self.register_buffer("written", torch.zeros((), dtype=torch.long))
        self.register_buffer("label", torch.tensor(data.given, dtype=torch.int32))
        for name in ("kept", "used", "score"):
            self.register_buffer(name, torch.ones(len(data)))
        self.pending: list[tuple[Tensor, Tensor]] = []  # rows of the current step, of all ranks

    def stages(self) -> list[Stage]:
        main = Stage("train", epochs=self.config.train.epochs, trainable=("network.",))
        if not self.options.retrain_part:
            return [main]
        epochs = max(1, round(self.options.retrain_part * self.config.train.epochs))
        schedule = {"lr": self.options.retrain_lr, "weight_decay": 0.0, "schedule": "steps",
                  "milestones": (1 / 3, 2 / 3), "decay": 0.1, "warmup_epochs": 0}  # fmt: skip
        optim = self.config.optim.model_copy(update=schedule)
        return [main, Stage("classifier", epochs=epochs, optim=optim, trainable=("network.head",))]

    # -- beliefs ---------------------------------------------------------------------------------------------

    @property
    def first_cleaning(self) -> int:
        return max(1, round(self.options.cleaning_start * self.config.train.epochs))

    @property
    def cleaning_now(self) -> bool:
        return self.stage == RETRAIN or self.epoch >= self.first_cleaning

    def surveys_before_epoch(self) -> bool:
        """The last stage takes its labels from one survey, not from the steps before."""
        return self.stage == RETRAIN and self.epoch == 0

    def survey_outputs(self, images: Tensor, given: Tensor) -> dict[str, Tensor]:
        z, logits = self.eval_forward(images)
        scores = prototype_logits(z, self.prototypes, self.options.temperature)
        return dict(zip(("label", "kept", "used", "score"), self._correct(logits, scores, given)))

    def begin_epoch(self, survey: Survey | None) -> None:
        if survey is None:
            return
        for name, memory in zip(("label", "kept", "used", "score"), (self.label, self.kept, self.used, self.score)):
            memory.copy_(survey.all_gather(survey[name].to(memory.dtype)))

    @full_precision
    def _correct(
        self, logits: Tensor, prototype_scores: Tensor, given: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Corrected label; whether the given one scores above chance; whether there is a label; score of the given one."""
        share = self.options.classifier_weight
        soft = share * logits.softmax(1) + (1 - share) * prototype_scores.softmax(1)
        score = soft.gather(1, given[:, None])[:, 0]
        top, likeliest = soft.max(1)
        sure, kept = top > self.options.relabel_above, score > 1 / soft.shape[1]
        return torch.where(sure, likeliest, given), kept.float(), (kept | sure).float(), score

    @property
    def beliefs(self) -> Beliefs | None:
        """Labels as corrected in the last epoch; clean are those kept and not changed."""
        if self.stage == MAIN and self.epoch <= self.first_cleaning:
            return None
        given = self.data.given_on(self.label.device)
        label, clean = self.label.long(), (self.kept > 0) & (self.label == given)
        return Beliefs(self.used, label, clean, self.score, basis=(label, self.used))

    # -- training --------------------------------------------------------------------------------------------

    def passes(self) -> list[Pass]:
        if self.stage == MAIN:
            return [Pass(self.data.shuffled(self.order_key()), ("weak", "strong"))]
        used = self.used.cpu().numpy() > 0
        if not used.any():
            used[:] = True
        label = np.where(used, self.label.cpu().numpy(), -1)
        order = sampling.balanced(label, self.data.classes, self.data.seed, self.order_key(), int(used.sum()))
        return [Pass(order)]

    def train(self, mode: bool = True) -> MoPro:
        """In the last stage the representation and its batch statistics are frozen."""
        super().train(mode)
        if self.stage == RETRAIN:
            self.network.rest()
            self.eval_network.rest()
        return self

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        if self.stage == RETRAIN:
            with torch.no_grad():
                features = self.eval_network.encode(batch.views["weak"])
            label = self.label[batch.index].long()
            return {"loss": cross_entropy(self.network.head(features), label, batch.valid, self.world)}
        features, logits = self.network(batch.views["weak"], batch.mask)
        z = self.network.embed(features)
        with torch.no_grad():
            averaged = self.key_average.network
            key = averaged.embed(averaged(batch.views["strong"], batch.mask)[0])
        prototype_scores = prototype_logits(z, self.prototypes, self.options.temperature)
        label, kept, used, score = self._correct(logits.detach(), prototype_scores.detach(), batch.label)
        if not self.cleaning_now:
            label, kept, used = batch.label, torch.ones_like(kept), torch.ones_like(used)
        weight = batch.valid * used
        self._save_for_after_step(
            batch, label, torch.cat([key, z, torch.stack([kept, used, score, batch.valid], 1)], 1)
        )
        parts = {"ce": cross_entropy(logits, label, weight, self.world)}
        parts["cc"] = queue_contrastive(
            z, key, self.queue[:-1], self.written, batch.valid, self.options.temperature, self.world
        )
        if self.epoch > 0:  # in the first epoch the prototypes form
            parts["pc"] = cross_entropy(prototype_scores, label, weight, self.world)
        loss = parts["ce"] + self.options.contrastive * parts["cc"]
        return {"loss": loss + self.options.prototype * parts.get("pc", 0.0), **parts}

    @torch.no_grad()
    def _save_for_after_step(self, batch: Batch, label: Tensor, rows: Tensor) -> None:
        """Save the rows for after_step: the loss still needs queue and prototypes as they are."""
        index_and_label = torch.stack([batch.index, label], 1)
        self.pending.append(
            (self.world.all_gather_rows(index_and_label, batch.rows), self.world.all_gather_rows(rows, batch.rows))
        )

    @torch.no_grad()
    def after_step(self) -> None:
        super().after_step()
        if self.stage == RETRAIN:
            return
        self.key_average.update(self.network)
        index_and_label, rows = (torch.cat(parts) for parts in zip(*self.pending))
        self.pending = []
        finite, rows = rows.isfinite().all(1), rows.nan_to_num()
        (index, label), (key, z, flags) = index_and_label.T, torch.split(rows, [*2 * [self.queue.shape[1]], 4], 1)
        kept, used, score, valid = flags.T
        valid = valid * finite  # the optimiser skips such a step, so nothing is stored of it
        enqueue(self.queue, self.written, key, valid)
        self.prototypes.copy_(ema_update(self.prototypes, z, label, used * valid, self.options.prototype_momentum))
        for memory, value in zip((self.label, self.kept, self.used, self.score), (label, kept, used, score)):
            change = (value.to(memory.dtype) - memory[index]) * valid.to(memory.dtype)
            memory.index_add_(0, index, change)

    # -- evaluation ------------------------------------------------------------------------------------------

    def scores(self, images: Tensor) -> dict[str, Tensor]:
        z, logits = self.eval_forward(images)
        return {
            "linear": logits.float(),
            "prototype": prototype_logits(z, self.prototypes, self.options.temperature),
        }


def ema_update(prototypes_KD: Tensor, z_GD: Tensor, label_G: Tensor, weight_G: Tensor, momentum: float) -> Tensor:
    """(K,D) unit prototypes after an update by each sample of weight 1, in order.

    In closed form: the coefficient of a sample is (1 - m) m^(samples of its class after it).
    """
    counts = (weight_G > 0)[:, None] & (label_G[:, None] == label_G)  # (G,G) by later sample (rows), earlier (columns)
    after = counts.tril(-1).sum(0)
    total = torch.zeros(len(prototypes_KD), device=label_G.device).index_add_(0, label_G, (weight_G > 0).float())
    part = torch.where(weight_G > 0, (1 - momentum) * momentum ** after.double(), 0.0)
    sums = prototypes_KD.double() * momentum ** total.double()[:, None]
    return unit(sums.index_add_(0, label_G, part[:, None] * z_GD.double())).float()
