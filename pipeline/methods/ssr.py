"""SSR+ (Feng, Tzimiropoulos and Patras, BMVC 2022): relabel what the classifier is sure of, select what the neighbours confirm.

Every epoch: survey -> labels -> vote of the nearest neighbours -> selected samples. Then
    L = cross-entropy of mixed selected samples, drawn class-balanced + consistency * L_fc of all samples.
n rows of the survey on this rank, N in all, B rows of a batch, K classes, D features.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.config import Config
from pipeline.data import sampling
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import Beliefs, OneNetwork
from pipeline.methods.options import SSROptions
from pipeline.methods.parts.losses import soft_cross_entropy
from pipeline.methods.parts.mixup import mix, mixup_lambda, mixup_partners
from pipeline.methods.parts.nearest_neighbors import nearest_neighbors
from pipeline.methods.parts.projection import Projection
from pipeline.methods.parts.survey import Survey
from pipeline.models.network import unit
from pipeline.models.precision import full_precision

SIMILARITIES = 1 << 26  # numbers in memory at a time while neighbours are searched
HIDDEN = 256  # width between the layers of both perceptrons
MIXUP_LAMBDA, MIXUP_PARTNERS = 1, 2  # purposes of random numbers
ALL, SELECTED = 0, 1  # streams of a pass


class SSR(OneNetwork[SSROptions]):
    label: Tensor  # (N,) the given label, or the predicted one where the classifier is sure
    selected: Tensor  # (N,) bool: the neighbours confirm that label
    support: Tensor  # (N,) votes for the given label, relative to those for the class with most

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        kind = torch.int16 if data.classes < 2**15 else torch.int32
        self.register_buffer("label", torch.tensor(data.given, dtype=kind))
        self.register_buffer("selected", torch.ones(len(data), dtype=torch.bool))
        self.register_buffer("support", torch.ones(len(data)))
        if self.options.consistency:
            D, width, rows = self.network.features, self.options.projection, self.network.rows
            self.projector = Projection(D, HIDDEN, width, rows)
            self.predictor = Projection(width, HIDDEN, width, rows)

    # -- beliefs ---------------------------------------------------------------------------------------------

    def surveys_before_epoch(self) -> bool:
        return True

    def survey_outputs(self, images: Tensor, given: Tensor) -> dict[str, Tensor]:
        features, logits = self.eval_network(images)
        sureness, likeliest = logits.float().softmax(1).max(1)
        return {"z": unit(features), "sureness": sureness, "likeliest": likeliest}

    def begin_epoch(self, survey: Survey | None) -> None:
        assert survey is not None
        o, given = self.options, self.data.labels(survey.index)
        sure = survey["sureness"] > o.relabel_above
        own = torch.where(sure, survey["likeliest"].long(), given)
        label = survey.all_gather(own.int()).long()
        bank = survey.all_gather(survey["z"])
        votes = balanced_votes(survey["z"], bank, label, self.data.classes, o.neighbours, o.neighbour_block, own, given)
        selected, support = (
            survey.all_gather(part) for part in ((votes[0] >= o.select_from).to(torch.uint8), votes[1])
        )
        self.label.copy_(label)
        self.selected.copy_(selected > 0)
        self.support.copy_(support)

    @property
    def beliefs(self) -> Beliefs:
        label, weight = self.label.long(), self.selected.float()
        clean = self.selected & (label == self.data.given_on(label.device))
        return Beliefs(weight, label, clean, self.support, basis=(label, weight))

    # -- training --------------------------------------------------------------------------------------------

    def passes(self) -> list[Pass]:
        """All samples, and beside them selected ones, equally many of every class that has some."""
        selected = self.selected.cpu().numpy()
        if not selected.any():  # a vote that confirms no label is no information
            selected = np.ones_like(selected)
        label = np.where(selected, self.label.cpu().numpy(), -1)
        rows = -(-len(self.data) // self.data.batch) * self.data.batch
        counts = np.bincount(label[selected], minlength=self.data.classes)
        key = self.order_key()
        length = min(rows, int(counts.max()) * int((counts > 0).sum()))
        chosen = sampling.balanced(label, self.data.classes, self.data.seed, key, length, SELECTED)
        chosen = self.data.shuffled(key, chosen, SELECTED)
        pair = ("strong", "strong2")
        if not self.options.consistency:
            return [Pass(np.resize(chosen, rows), pair)]
        return [Pass(self.data.shuffled(key), ("weak", "strong"), second=chosen, second_views=pair)]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        parts = {"ce": self.mixed_loss(batch.second or batch)}
        if self.options.consistency:
            parts["fc"] = self.consistency_loss(batch)
        return {"loss": parts["ce"] + self.options.consistency * parts.get("fc", 0.0), **parts}

    def mixed_loss(self, batch: Batch) -> Tensor:
        images = torch.cat([batch.views["strong"], batch.views["strong2"]])
        target = F.one_hot(self.label[batch.index].long(), self.data.classes).float().repeat(2, 1)
        lam = mixup_lambda(batch, self.options.mixup, MIXUP_LAMBDA, fold=True)
        partner = mixup_partners(batch, 2, MIXUP_PARTNERS)
        _, logits = self.network(mix(images, partner, lam), batch.mask)
        return soft_cross_entropy(logits, mix(target, partner, lam), batch.valid.repeat(2), self.world)

    def consistency_loss(self, batch: Batch) -> Tensor:
        """From the strong view the projection of the weak one is predicted; no gradient reaches the weak view."""
        with torch.no_grad():
            wanted = self.projector(self.network(batch.views["weak"], batch.mask)[0], batch.mask)
        features, _ = self.network(batch.views["strong"], batch.mask)
        predicted = self.predictor(self.projector(features, batch.mask), batch.mask)
        return negative_cosine(predicted, wanted, batch.valid, self.world)


@full_precision
def negative_cosine(first_BD: Tensor, second_BD: Tensor, weight_B: Tensor, world: World) -> Tensor:
    return world.global_mean(-(unit(first_BD) * unit(second_BD)).sum(1), weight_B)


@full_precision
def balanced_votes(
    z_nD: Tensor,
    bank_ND: Tensor,
    label_N: Tensor,
    classes: int,
    k: int,
    block: int,
    *asked_n: Tensor,
) -> list[Tensor]:
    """For each tensor of classes in `asked_n`: (n,) votes for that class, relative to the votes for the class with most.

    The k nearest samples of the bank have one vote each, the sample itself among them. Votes for a class are divided by the
    number of samples with that label, so that large classes do not win by their size. Memory: block x (k + classes).
    """
    size_K = torch.bincount(label_N, minlength=classes).clamp_min(1).to(z_nD.dtype)
    parts: list[list[Tensor]] = [[z_nD.new_zeros(0)] for _ in asked_n]
    k = min(k, len(bank_ND))
    for start in range(0, len(z_nD), block):
        rows = slice(start, start + block)
        bank_block = max(k, SIMILARITIES // block)
        near = label_N[nearest_neighbors(z_nD[rows], bank_ND, k, None, block, bank_block)[1]]  # (b,k)
        votes = z_nD.new_zeros(len(near), classes).scatter_add_(1, near, torch.ones_like(near, dtype=z_nD.dtype))
        votes /= size_K
        most = votes.max(1).values
        for part, asked in zip(parts, asked_n):
            part.append(votes.gather(1, asked[rows, None])[:, 0] / most)
    return [torch.cat(part) for part in parts]
