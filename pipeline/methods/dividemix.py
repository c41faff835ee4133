"""DivideMix (Li et al., ICLR 2020): divide by a mixture over losses, then learn the rest without its labels.

Every epoch after the warm-up: survey -> probability of each label to be right, by each network -> two passes. In a
pass one network learns. The beliefs of the other network divide the samples into labelled and unlabelled ones, and both
networks guess the labels of the unlabelled. B rows on this rank, K classes, N training samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.config import Config
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import Beliefs
from pipeline.methods.options import DivideMixOptions
from pipeline.methods.parts import mixup
from pipeline.methods.parts.gaussian_mixture import Fit, normalised, posterior, sharpen
from pipeline.methods.parts.losses import cross_entropy, sample_losses, soft_cross_entropy
from pipeline.methods.parts.survey import Survey
from pipeline.methods.two_networks import TwoNetworks
from pipeline.models.network import Network
from pipeline.models.precision import full_precision

T = TypeVar("T")
FIT = Fit(iterations=10, tolerance=1e-2, floor=5e-4)
MIXUP_LAMBDA, MIXUP_PARTNERS = 1, 2  # purposes of random numbers
LABELLED, UNLABELLED = 0, 1  # streams of a pass


class DivideMix(TwoNetworks[DivideMixOptions]):
    warmup_views: tuple[str, ...] = ("weak",)
    divided_views: tuple[str, ...] = ("weak", "weak2")
    mixed_views: tuple[str, str] = ("weak", "weak2")  # those of them that are learned
    belief: Tensor  # (2,N) probability that the given label is right, by each network
    refined: Tensor  # (N,) the given label, or the vote of both networks where it is not believed
    past: Tensor  # (2,E,N) normalised losses of the last E epochs, the newest first
    epochs_seen: Tensor  # epochs with a survey so far

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        kind = torch.int16 if data.classes < 2**15 else torch.int32
        self.register_buffer("belief", torch.ones(2, len(data)))
        self.register_buffer("refined", torch.tensor(data.given, dtype=kind))
        if self.options.loss_epochs > 1:
            self.register_buffer("past", torch.zeros(2, self.options.loss_epochs, len(data)))
            self.register_buffer("epochs_seen", torch.zeros((), dtype=torch.long))

    # -- beliefs ---------------------------------------------------------------------------------------------

    @property
    def warmup_epochs(self) -> int:
        part = self.options.warmup
        return max(1, round(part * self.config.train.epochs)) if part else 0

    @property
    def dividing(self) -> bool:
        return self.epoch >= self.warmup_epochs

    def surveys_before_epoch(self) -> bool:
        return self.dividing

    def survey_outputs(self, images: Tensor, given: Tensor) -> dict[str, Tensor]:
        return self.votes_and_losses([self.eval_network(n)(images)[1] for n in range(2)], given)

    def votes_and_losses(self, logits: list[Tensor], given: Tensor) -> dict[str, Tensor]:
        """The class both networks vote for, and the loss of each on the given label."""
        vote = (logits[0].float().softmax(1) + logits[1].float().softmax(1)).argmax(1)
        return {"vote": vote, "loss0": sample_losses(logits[0], given), "loss1": sample_losses(logits[1], given)}

    def begin_epoch(self, survey: Survey | None) -> None:
        if survey is None:
            return
        belief = np.stack(self.divide(survey))  # (2,N)
        undecided = ~(belief > self.options.threshold).any(1)
        belief[undecided] = 1.0  # a mixture that believes no label is no information
        self.belief.copy_(torch.from_numpy(belief))
        vote = survey.all_gather(survey["vote"].int()).to(self.refined.dtype)  # gloo and NCCL have no int16
        given = self.data.given_on(self.refined.device).to(self.refined.dtype)
        self.refined.copy_(torch.where(self._is_clean(), given, vote))

    def divide(self, survey: Survey) -> list[np.ndarray]:
        """For each network: (N,) probability that the given label is right, the same on every rank."""
        losses_by_network = []
        for n in range(2):
            losses = survey.all_gather(survey[f"loss{n}"]).cpu().numpy()
            losses_by_network.append(self._average_losses(n, normalised(losses, "small")))
        if self.options.loss_epochs > 1:
            self.epochs_seen += 1
        return self.on_main_rank(lambda: [posterior(values, "small", FIT) for values in losses_by_network])

    def on_main_rank(self, fit: Callable[[], T]) -> T:
        """Fit on rank 0 and send the result: ranks whose fits differ in the last digit would train on other samples."""
        return self.world.broadcast_object(fit() if self.world.is_main else None)

    def _average_losses(self, n: int, losses_N: np.ndarray) -> np.ndarray:
        """The mean over the last epochs, this one included."""
        if self.options.loss_epochs == 1:
            return losses_N
        self.past[n].copy_(torch.cat([torch.from_numpy(losses_N).to(self.past)[None], self.past[n, :-1]]))
        known = min(int(self.epochs_seen) + 1, self.options.loss_epochs)
        return self.past[n, :known].double().mean(0).cpu().numpy()

    def _is_clean(self) -> Tensor:
        return self.belief.mean(0) > self.options.threshold

    @property
    def beliefs(self) -> Beliefs | None:
        if not self.dividing:
            return None
        kept = self.belief > self.options.threshold  # (2,N)
        agree = {"agreement": float((kept[0] == kept[1]).float().mean())}
        return Beliefs(label=self.refined.long(), clean=self._is_clean(), score=self.belief.mean(0), extra=agree)

    # -- training --------------------------------------------------------------------------------------------

    def trained_parameters(self, n: int) -> tuple[str, ...]:
        return (f"networks.{n}.",)

    def passes(self) -> list[Pass]:
        return [self._divided_pass(n) if self.dividing else self._warmup_pass(n) for n in range(2)]

    def _warmup_pass(self, n: int) -> Pass:
        batch = self.options.warmup_batch * self.data.batch
        order = self.data.shuffled(self.order_key(n))
        return Pass(order, self.warmup_views, batch, trainable=self.trained_parameters(n), learner=n)

    def _divided_pass(self, n: int) -> Pass:
        """Divided by the other network's beliefs. All batches are full, so both streams have equal rows and groups."""
        kept = (self.belief[1 - n] > self.options.threshold).cpu().numpy()
        labelled = self.data.shuffled(self.order_key(n), np.flatnonzero(kept), LABELLED)
        rest = self.data.shuffled(self.order_key(n), np.flatnonzero(~kept), UNLABELLED)
        order = np.resize(labelled, -(-len(labelled) // self.data.batch) * self.data.batch)
        second = rest if len(rest) else None
        return Pass(order, self.divided_views, second=second, trainable=self.trained_parameters(n), learner=n)

    @property
    def unlabelled_weight(self) -> float:
        """Rises linearly after the warm-up; constant in an epoch, with the value of its middle."""
        ramp = self.options.unlabelled_ramp * self.config.train.epochs
        done = (self.epoch + 0.5 - self.warmup_epochs) / ramp if ramp else 1.0
        return self.options.unlabelled * min(max(done, 0.0), 1.0)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        n = batch.learner
        if not self.dividing:
            return self.warmup_losses(n, batch)
        streams = [batch] if batch.second is None else [batch, batch.second]
        return self.divided_losses(n, batch, streams, *self._stacked(streams, self._guess(n, streams)))

    def divided_losses(
        self, n: int, batch: Batch, streams: Sequence[Batch], images: Tensor, target: Tensor, valid: Tensor
    ) -> dict[str, Tensor]:
        """Of both views of all streams, which are mixed first."""
        partner = pair_across(streams, MIXUP_PARTNERS)
        lam = mixup.mixup_lambda(batch, self.options.mixup, MIXUP_LAMBDA, fold=True)
        images, target = mixup.mix(images, partner, lam), mixup.mix(target, partner, lam)
        rows = 2 * len(batch.index)  # the labelled ones come first
        if not self.options.unlabelled:
            images, target, valid = images[:rows], target[:rows], valid[:rows]
        features, logits = self.network(n)(images, counted_rows(streams, valid))
        return self.mixed_losses(n, batch, features, logits, target, valid)

    def warmup_losses(self, n: int, batch: Batch) -> dict[str, Tensor]:
        _, logits = self.network(n)(batch.views["weak"], batch.mask)
        loss = cross_entropy(logits, batch.label, batch.valid, self.world)
        return {"loss": loss, "ce": loss}

    def mixed_losses(
        self, n: int, batch: Batch, features: Tensor, logits: Tensor, target: Tensor, valid: Tensor
    ) -> dict[str, Tensor]:
        """All named parts and their sum; the first 2B rows are labelled."""
        parts = self.semi_supervised(logits, target, valid, self.labelled_weight(batch))
        parts["penalty"] = uniform_penalty(logits, valid, self.world)
        loss = parts["labelled"] + self.unlabelled_weight * parts.get("unlabelled", 0.0)
        return {"loss": loss + self.options.penalty * parts["penalty"], **parts}

    def labelled_weight(self, batch: Batch) -> Tensor:
        """(2B,) weight of each labelled row in its loss."""
        return batch.valid.repeat(2)

    def semi_supervised(self, logits: Tensor, target: Tensor, valid: Tensor, weight: Tensor) -> dict[str, Tensor]:
        rows = len(weight)
        parts = {"labelled": soft_cross_entropy(logits[:rows], target[:rows], weight, self.world)}
        if len(logits) > rows:
            parts["unlabelled"] = squared_error(logits[rows:], target[rows:], valid[rows:], self.world)
        return parts

    @torch.no_grad()
    def _guess(self, n: int, streams: Sequence[Batch]) -> list[Tensor]:
        """(B,K) targets of each stream: labels refined by the learner, and labels guessed by both networks.

        The learner guesses in training mode, as in the authors' code: with the statistics of the batch.
        """
        own, peer = self.network(n), self.eval_network(1 - n).eval()
        labelled = streams[LABELLED]
        trust = self.belief[1 - n, labelled.index][:, None]
        onehot = F.one_hot(labelled.label, self.data.classes).float()
        targets = [trust * onehot + (1 - trust) * mean_prediction([own], labelled)]
        targets += [mean_prediction([own, peer], stream) for stream in streams[UNLABELLED:]]
        return [sharpen(target, self.options.sharpening) for target in targets]

    def _stacked(self, streams: Sequence[Batch], targets: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Pictures, targets and validity of both views of all streams, view by view."""
        images = torch.cat([s.views[view] for s in streams for view in self.mixed_views])
        target = torch.cat([target.repeat(2, 1) for target in targets])
        return images, target, torch.cat([stream.valid.repeat(2) for stream in streams])


def counted_rows(streams: Sequence[Batch], valid: Tensor) -> Tensor | None:
    """`valid`, or None where it is known without asking the device that all rows count."""
    return None if all(stream.mask is None for stream in streams) else valid


def mean_prediction(networks: Sequence[Network], batch: Batch) -> Tensor:
    """(B,K) mean softmax over the networks and both weak views."""
    views = torch.cat([batch.views["weak"], batch.views["weak2"]])
    probability = torch.stack([network(views, batch.mask)[1].float().softmax(1) for network in networks]).mean(0)
    first, second = probability.chunk(2)
    return (first + second) / 2


def pair_across(streams: Sequence[Batch], purpose: int) -> Tensor:
    """Mixing partners for both views of all streams; groups of the same number mix across streams."""
    keys = torch.cat([stream.index * len(streams) + number for number, stream in enumerate(streams)])
    groups = torch.cat([mixup.mixing_groups(stream) for stream in streams])
    ends = np.cumsum([0, *(2 * len(stream.index) for stream in streams)])
    rows = [torch.arange(start, stop, device=keys.device).view(2, -1) for start, stop in pairwise(ends.tolist())]
    seed = int(streams[0].generator(purpose).integers(2**31))
    return mixup.pair_within(groups, keys, torch.cat(rows, 1), seed)


@full_precision
def squared_error(logits_BK: Tensor, target_BK: Tensor, weight_B: Tensor, world: World) -> Tensor:
    """Mean over rows and classes of the squared difference between prediction and target."""
    return world.global_mean((logits_BK.softmax(1) - target_BK).square().mean(1), weight_B)


@full_precision
def uniform_penalty(logits_BK: Tensor, valid_B: Tensor, world: World) -> Tensor:
    """How far the mean prediction of the global batch is from uniform: KL(uniform || mean).

    It is no mean over rows, so the sums are gathered with gradient: every rank holds the whole value, and the average of the
    gradients over ranks is the gradient of that value.
    """
    sums = torch.cat([(logits_BK.softmax(1) * valid_B[:, None]).sum(0), valid_B.sum()[None]])
    sums = world.all_gather_rows(sums[None], [1] * world.size, grad=True).sum(0)
    mean = sums[:-1] / sums[-1].clamp_min(1e-8)
    return -(len(mean) * mean.clamp_min(1e-8)).log().mean()
