"""Evenhand: a label counts when others confirm it, neighbours or the prototype of its class, and every class is drawn alike.

Every epoch: survey -> labels -> votes of the neighbours, nearest prototypes -> selected samples; the losses are in
selection_method.py. After the epoch: survey -> prototypes of the selected samples, a second classifier.
n rows of the survey on this rank, N samples in all, M of them in the bank, K classes, D features.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.data import sampling
from pipeline.data.batch import TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import Beliefs
from pipeline.methods.options import EvenhandOptions
from pipeline.methods.parts.losses import given_confidence, prototype_logits
from pipeline.methods.parts.neighbour_votes import balanced_votes
from pipeline.methods.parts.prototypes import class_prototypes, confirmed_by_prototype
from pipeline.methods.parts.survey import Survey
from pipeline.methods.selection_method import SelectionMethod
from pipeline.models.network import unit

MOST_NEIGHBOURS = 200
TEMPERATURE = 0.1  # of the prototypes' softmax
BANK = 9  # stream of random numbers


class Evenhand(SelectionMethod[EvenhandOptions]):
    """`label` is that of a selected sample: the given one, or the predicted one where the classifier is sure. Of the others it
    is the likeliest."""

    prototypes: Tensor  # (K,D) of the network as it is now
    score: Tensor  # (N,) probability of the given label, by the linear head
    support: Tensor  # (N,) votes for the given label, relative to those for the class with most

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        self.register_buffer("prototypes", torch.zeros(data.classes, self.network.features))
        self.register_buffer("score", torch.ones(len(data)))
        self.register_buffer("support", torch.ones(len(data)))

    # -- beliefs -----------------------------------------------------------------------------------------------

    def surveys_before_epoch(self) -> bool:
        return True

    def surveys_after_epoch(self) -> bool:
        return True

    def survey_outputs(self, images: Tensor, given: Tensor) -> dict[str, Tensor]:
        features, logits = self.eval_network(images)
        sureness, likeliest = logits.float().softmax(1).max(1)
        confidence = given_confidence(logits, given)
        return {"z": unit(features), "sureness": sureness, "likeliest": likeliest, "confidence": confidence}

    def begin_epoch(self, survey: Survey | None) -> None:
        assert survey is not None
        o, given = self.options, self.data.labels(survey.index)
        likeliest = survey["likeliest"].long()
        own = torch.where(survey["sureness"] > o.relabel_above, likeliest, given)
        label = survey.all_gather(own.int()).long()
        place, bank = self._bank(label, survey)
        votes = balanced_votes(
            survey["z"], bank, label[place >= 0], self.data.classes, self.neighbours, o.neighbour_block, own, given,
            own_n=place[survey.index],
        )  # fmt: skip
        confirmed = (votes[0] >= 1) | confirmed_by_prototype(survey["z"], own, self.data.classes, self.world)
        selected = survey.all_gather(confirmed.to(torch.uint8)) > 0
        selected |= self._unconfirmed_classes(label, selected)[label]
        self.selected.copy_(selected)
        self.label.copy_(torch.where(selected, label, survey.all_gather(likeliest.int()).long()))
        self.support.copy_(survey.all_gather(votes[1]))
        self.score.copy_(survey.all_gather(survey["confidence"]))

    def gathered_samples(self) -> int:
        return min(self.options.bank, len(self.data))

    def end_epoch(self, survey: Survey | None) -> None:
        assert survey is not None
        label, weight = self.label[survey.index].long(), self.selected[survey.index].float()
        self.prototypes.copy_(class_prototypes(survey["z"], label, weight, self.prototypes, self.world)[0])

    @property
    def neighbours(self) -> int:
        return self.options.neighbours or min(math.isqrt(len(self.data)), MOST_NEIGHBOURS)

    def _bank(self, label_N: Tensor, survey: Survey) -> tuple[Tensor, Tensor]:
        """(N,) place of every sample among those that vote, -1 if it does not; (M,D) their embeddings.

        All samples vote, or of very many the same number of every class.
        """
        N = len(self.data)
        if self.options.bank >= N:
            return torch.arange(N, device=label_N.device), survey.all_gather(survey["z"])
        chosen = sampling.balanced(
            label_N.cpu().numpy(), self.data.classes, self.data.seed, self.order_key(), self.options.bank, BANK
        )
        member = np.unique(chosen)
        place = torch.full((N,), -1, device=label_N.device)
        place[torch.from_numpy(member).to(place.device)] = torch.arange(len(member), device=place.device)
        ends = np.searchsorted(member, np.cumsum(self.world.rank_slice_sizes(N)))
        own = survey["z"][place[survey.index] >= 0]
        return place, self.world.all_gather_rows(own, np.diff(ends, prepend=0).tolist())

    def _unconfirmed_classes(self, label_N: Tensor, selected_N: Tensor) -> Tensor:
        """(K,) bool: classes none of whose samples is confirmed. They keep all rather than be lost."""
        return torch.bincount(label_N[selected_N], minlength=self.data.classes) == 0

    @property
    def beliefs(self) -> Beliefs:
        label, weight = self.label.long(), self.selected.float()
        clean = self.selected & (label == self.data.given_on(label.device))
        return Beliefs(
            weight, label, clean, self.score, other_scores={"neighbours": self.support}, basis=(label, weight)
        )

    # -- evaluation --------------------------------------------------------------------------------------------

    def scores(self, images: Tensor) -> dict[str, Tensor]:
        features, logits = self.eval_network(images)
        prototype = prototype_logits(unit(features), self.prototypes, TEMPERATURE)
        return {"linear": logits.float(), "prototype": prototype}
