"""SSR+ (Feng, Tzimiropoulos and Patras, BMVC 2022): relabel what the classifier is sure of, select what the neighbours confirm.

Every epoch: survey -> labels -> vote of the nearest neighbours -> selected samples; the losses are in selection_method.py.
n rows of the survey on this rank, N in all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.data.batch import TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import Beliefs
from pipeline.methods.options import SSROptions
from pipeline.methods.parts.neighbour_votes import balanced_votes
from pipeline.methods.parts.survey import Survey
from pipeline.methods.selection_method import SelectionMethod
from pipeline.models.network import unit


class SSR(SelectionMethod[SSROptions]):
    """`label` is the given one, or the predicted one where the classifier is sure."""

    support: Tensor  # (N,) votes for the given label, relative to those for the class with most

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        self.register_buffer("support", torch.ones(len(data)))

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
