"""PLS-LSA (Albert et al., ECCV 2024), one network: two detectors of wrong labels in turn, pseudo-labels by trust in them.

Every epoch after the warm-up: survey -> wrong labels, by a mixture over the losses or by a linear separation of what that
mixture finds -> trust in the pseudo-labels of the wrong ones. Then
    L = weighted cross-entropy of mixed samples + penalty * L_prior + contrastive * L_cont.
n rows of the survey on this rank, N in all, B rows of a batch, G over all ranks, K classes, D width of the projection.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.config import Config
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import Beliefs, OneNetwork
from pipeline.methods.dividemix import uniform_penalty
from pipeline.methods.options import PLSLSAOptions
from pipeline.methods.parts.gaussian_mixture import Fit, normalised, posterior, sharpen
from pipeline.methods.parts.losses import sample_losses, soft_cross_entropy
from pipeline.methods.parts.middle_layer import MiddleLayer
from pipeline.methods.parts.mixup import mix, mixup_lambda, mixup_partners
from pipeline.methods.parts.per_sample import update_table
from pipeline.methods.parts.prototypes import BLOCK
from pipeline.methods.parts.separation import linear_separation
from pipeline.methods.parts.survey import Survey
from pipeline.models.network import unit
from pipeline.models.precision import full_precision

FIT = Fit(iterations=10, tolerance=1e-2, floor=5e-4)
FEWEST = 3  # wrong labels from which their pseudo-labels are compared
MIXUP_LAMBDA, MIXUP_PARTNERS = 1, 2  # purposes of random numbers


class PLSLSA(OneNetwork[PLSLSAOptions]):
    guess: Tensor  # (n,K) pseudo-label of the sample's last step
    wrong: Tensor  # (N,) bool: the given label is not believed
    weight: Tensor  # (N,) 1, or the trust in the pseudo-label of a wrong one
    score: Tensor  # (N,) chance of the given label to be right, by the detector of this epoch
    likeliest: Tensor  # (N,) predicted class

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        self.middle = MiddleLayer(config.model, self.options.layer, self.network.backbone)
        self.projector = nn.Linear(self.network.features, self.options.projection)
        self.register_table("guess", data.classes)
        self.register_buffer("wrong", torch.zeros(len(data), dtype=torch.bool))
        self.register_buffer("weight", torch.ones(len(data)))
        self.register_buffer("score", torch.ones(len(data)))
        self.register_buffer("likeliest", torch.tensor(data.given, dtype=torch.int32))

    # -- beliefs ---------------------------------------------------------------------------------------------

    @property
    def warmup_epochs(self) -> int:
        return max(1, round(self.options.warmup * self.config.train.epochs))

    @property
    def detecting(self) -> bool:
        return self.epoch >= self.warmup_epochs

    @property
    def guessing(self) -> bool:
        """The first survey needs the pseudo-labels of the epoch before it."""
        return self.epoch >= self.warmup_epochs - 1

    @property
    def detector(self) -> str:
        """By the epoch that ended before the survey, counted from 0: even ones are followed by the linear detector."""
        if self.options.detector != "alternate":
            return self.options.detector
        return "linear" if self.epoch % 2 else "loss"

    def surveys_before_epoch(self) -> bool:
        return self.detecting

    def survey_outputs(self, images: Tensor, given: Tensor) -> dict[str, Tensor]:
        maps, (features, logits) = self.middle.of(self.eval_network, images)
        return {
            "middle": unit(features if maps is None else maps),
            "logits": logits,
            "loss": sample_losses(logits, given),
        }

    def begin_epoch(self, survey: Survey | None) -> None:
        if survey is None:
            return
        losses = survey.all_gather(survey["loss"]).cpu().numpy()
        right = self.world.broadcast_object(mixture_chance(losses) if self.world.is_main else None)
        wrong = 1 - right > self.options.wrong_above
        if self.detector == "linear":
            part = torch.from_numpy(wrong).to(survey.index.device)[survey.index]
            chance = survey.all_gather(linear_separation(survey["middle"], part, self.world))
            right = 1 - chance.double().cpu().numpy()
            wrong = right < 0.5
        pseudo = survey.all_gather(self.pseudo_losses(survey)).cpu().numpy()
        weight = self.world.broadcast_object(pseudo_label_trust(pseudo, wrong) if self.world.is_main else None)
        for buffer, value in ((self.wrong, wrong), (self.score, right), (self.weight, weight)):
            buffer.copy_(torch.from_numpy(value))
        self.likeliest.copy_(survey.all_gather(survey["logits"].argmax(1).int()))

    def pseudo_losses(self, survey: Survey) -> Tensor:
        """(n,) cross-entropy of the prediction against the pseudo-label. A sample that had no step has its given label."""
        out = [survey["loss"].new_zeros(0)]
        for rows in torch.arange(len(survey.index), device=survey.index.device).split(BLOCK):
            guess, given = self.guess[rows].to(out[0].dtype), self.data.labels(survey.index[rows])
            seen = guess.sum(1, keepdim=True) > 0
            target = torch.where(seen, guess, F.one_hot(given, self.data.classes).to(guess))
            out.append(-(target * survey["logits"][rows].log_softmax(1)).sum(1))
        return torch.cat(out)

    @property
    def beliefs(self) -> Beliefs | None:
        if not self.detecting:
            return None
        given = self.data.given_on(self.wrong.device)
        label = torch.where(self.wrong, self.likeliest.long(), given)
        return Beliefs(self.weight, label, ~self.wrong, self.score, basis=(label, self.weight))

    # -- training --------------------------------------------------------------------------------------------

    def passes(self) -> list[Pass]:
        order = self.data.shuffled(self.order_key())
        if not self.detecting:
            return [Pass(order, ("weak", "weak2") if self.guessing else ("weak",), trainable=("network.",))]
        contrast = self.options.contrastive > 0
        views = ("weak", "weak2", "strong", *(("strong2",) if contrast else ()))
        return [Pass(order, views, trainable=("network.", "projector.") if contrast else ("network.",))]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        target, weight = F.one_hot(batch.label, self.data.classes).float(), batch.valid
        images, guess = batch.views["weak"], self._guess(batch) if self.guessing else target
        if self.detecting:
            wrong = self.wrong[batch.index]
            target = torch.where(wrong[:, None], guess.to(target), target)
            images = torch.where(wrong.view(-1, *[1] * (images.ndim - 1)), batch.views["strong"], images)
            weight = weight * self.weight[batch.index]
        lam = mixup_lambda(batch, self.options.mixup, MIXUP_LAMBDA, fold=True)
        partner = mixup_partners(batch, 1, MIXUP_PARTNERS)
        features, logits = self.network(mix(images, partner, lam), batch.mask)
        sides = [soft_cross_entropy(logits, target[rows], weight[rows], self.world) for rows in (slice(None), partner)]
        parts = {"ce": lam * sides[0] + (1 - lam) * sides[1]}
        if self.detecting and self.options.penalty:
            parts["penalty"] = uniform_penalty(logits, batch.valid, self.world)
        if self.detecting and self.options.contrastive:
            other, _ = self.network(batch.views["strong2"], batch.mask)
            parts["cont"] = mixed_contrastive(
                unit(self.projector(features)), unit(self.projector(other)), target.argmax(1), partner, lam, batch.valid,
                self.options.temperature, self.world, batch.rows,
            )  # fmt: skip
        loss = parts["ce"] + self.options.penalty * parts.get("penalty", 0.0)
        return {"loss": loss + self.options.contrastive * parts.get("cont", 0.0), **parts}

    @torch.no_grad()
    def _guess(self, batch: Batch) -> Tensor:
        """(B,K) sharpened predictions of the second weak view, with the statistics of the batch; they are kept for the survey."""
        _, logits = self.network(batch.views["weak2"], batch.mask)
        guess = sharpen(logits.float().softmax(1), self.options.sharpening)
        update_table(self.guess, batch, guess, self.world, len(self.data), 0.0)
        return guess


def mixture_chance(losses_N: np.ndarray) -> np.ndarray:
    """(N,) chance to belong to the component of small losses."""
    return posterior(normalised(losses_N, "small"), "small", FIT).astype(np.float64)


def pseudo_label_trust(losses_N: np.ndarray, wrong_N: np.ndarray) -> np.ndarray:
    """(N,) 1, and for wrong labels the chance that their pseudo-label belongs to those of small loss."""
    trust = np.ones(len(losses_N))
    if wrong_N.sum() >= FEWEST:
        trust[wrong_N] = mixture_chance(losses_N[wrong_N])
    return trust


@full_precision
def mixed_contrastive(
    mixed_BD: Tensor,
    other_BD: Tensor,
    label_B: Tensor,
    partner_B: Tensor,
    lam: float,
    valid_B: Tensor,
    temperature: float,
    world: World,
    rows: Sequence[int],
) -> Tensor:
    """A mixed picture looks for the other views, of all ranks, that have its class, and to the part 1-lam that of its partner."""
    keys = world.all_gather_rows(other_BD, rows, grad=True)  # (G,D)
    label_G, valid_G = world.all_gather_rows(label_B, rows), world.all_gather_rows(valid_B, rows)
    out = (valid_G <= 0)[None]
    log_p = (mixed_BD @ keys.T / temperature).masked_fill(out, -torch.inf).log_softmax(1).masked_fill(out, 0.0)
    loss_B = torch.zeros_like(log_p[:, 0])
    for share, label in ((lam, label_B), (1 - lam, label_B[partner_B])):
        same = ((label[:, None] == label_G) & ~out).to(log_p.dtype)
        loss_B = loss_B - share * (same * log_p).sum(1) / same.sum(1).clamp_min(1)
    return world.global_mean(loss_B, valid_B)
