"""DivideMix with a second classifier on each network, trained by balanced softmax. B rows on this rank, K classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.config import Config
from pipeline.data.batch import Batch, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.dividemix import DivideMix
from pipeline.methods.parts.losses import cross_entropy
from pipeline.methods.parts.survey import Survey
from pipeline.models.network import Average
from pipeline.models.precision import full_precision


class TwoHeads(DivideMix):
    """The mean of all four classifiers predicts. The class counts of a network's losses are those of its peer's selection."""

    counts: Tensor  # (2,K) labels each network trusts, by class

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        K, D = data.classes, self.network(0).features
        self.balanced = nn.ModuleList(nn.Linear(D, K) for _ in range(2))
        self.balanced_average = Average(self.balanced, config.model.ema) if config.model.ema else None
        self.register_buffer("counts", torch.from_numpy(data.counts).float().repeat(2, 1))

    def begin_epoch(self, survey: Survey | None) -> None:
        super().begin_epoch(survey)
        if survey is None:
            return
        given, K = self.data.given_on(self.belief.device), self.data.classes
        for n in range(2):
            trusted = given[self.belief[n] > self.options.threshold]
            self.counts[n].copy_(torch.bincount(trusted, minlength=K))

    def balanced_eval_head(self, n: int) -> nn.Module:
        heads = self.balanced if self.balanced_average is None else self.balanced_average.network
        return heads[n]

    # -- training --------------------------------------------------------------------------------------------

    def trained_parameters(self, n: int) -> tuple[str, ...]:
        return (*super().trained_parameters(n), f"balanced.{n}.")

    def after_step(self) -> None:
        super().after_step()
        if self.balanced_average is not None:
            self.balanced_average.update(self.balanced)

    def warmup_losses(self, n: int, batch: Batch) -> dict[str, Tensor]:
        features, logits = self.network(n)(batch.views["weak"], batch.mask)
        return self.given_losses(n, features, logits, batch.label, batch.valid)

    def given_losses(self, n: int, features: Tensor, logits: Tensor, label: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """Both classifiers on the given labels."""
        parts = {"ce": cross_entropy(logits, label, valid, self.world)}
        logits = balanced_softmax_logits(self.balanced[n](features), self.counts[n])
        parts["balanced"] = cross_entropy(logits, label, valid, self.world)
        return {"loss": parts["ce"] + parts["balanced"], **parts}

    def mixed_losses(
        self, n: int, batch: Batch, features: Tensor, logits: Tensor, target: Tensor, valid: Tensor
    ) -> dict[str, Tensor]:
        losses = super().mixed_losses(n, batch, features, logits, target, valid)
        logits = balanced_softmax_logits(self.balanced[n](features), self.counts[1 - n])
        parts = self.semi_supervised(logits, target, valid, self.labelled_weight(batch))
        loss = parts["labelled"] + self.unlabelled_weight * parts.get("unlabelled", 0.0)
        named = {f"balanced_{name}": value for name, value in parts.items()}
        return {**losses, **named, "loss": losses["loss"] + loss}

    # -- evaluation ------------------------------------------------------------------------------------------

    def scores(self, images: Tensor) -> dict[str, Tensor]:
        """First the mean of both classifiers of both networks, then each kind."""
        outputs = [self.eval_network(n)(images) for n in range(2)]
        linear = torch.stack([logits.float() for _, logits in outputs]).mean(0)
        balanced = torch.stack([self.balanced_eval_head(n)(outputs[n][0]).float() for n in range(2)]).mean(0)
        return {"both": (linear + balanced) / 2, "linear": linear, "balanced": balanced}


@full_precision
def balanced_softmax_logits(logits_BK: Tensor, counts_K: Tensor) -> Tensor:
    """Balanced softmax: class frequencies are added in training, so the plain logits are class-balanced.

    A class without samples counts as one sample; its logit would be minus infinity.
    """
    return logits_BK + counts_K.clamp_min(1).log()
