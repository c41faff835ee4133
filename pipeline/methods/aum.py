"""Area under the margin (Pleiss et al., NeurIPS 2020): leave out samples that behave like mislabelled ones.

Two short runs measure the margin of each sample, the logit of its label minus the largest other one, averaged over
epochs. In each run a few samples (the fakes) get an extra class as label. Samples whose margin is no better than
that of the fakes are left out of the main training.
B rows on this rank, K classes, N training samples.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.config import Config
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.data.keyed_random import keyed_generator
from pipeline.distributed.world import World
from pipeline.methods.base import Beliefs, OneNetwork, Stage
from pipeline.methods.options import AUMOptions
from pipeline.methods.parts.flag import Flag
from pipeline.methods.parts.losses import cross_entropy
from pipeline.methods.parts.per_sample import add_by_index
from pipeline.methods.parts.survey import Survey
from pipeline.models.network import Network
from pipeline.models.precision import full_precision

RUNS, RETRAINING = 2, 2  # stages 0 and 1 measure, stage 2 trains
_FAKES = 0xA0A0  # purpose of random numbers


def fake_sets(data: TrainingSet) -> Tensor:
    """(N, RUNS) bool: N/(K+1) fakes per run, at least one if N allows it; no sample is a fake in both runs."""
    size = min(max(1, len(data) // (data.classes + 1)), len(data) // RUNS)
    chosen = torch.from_numpy(keyed_generator(data.seed, _FAKES).permutation(len(data))[: RUNS * size].copy())
    fake = torch.zeros(len(data), RUNS, dtype=torch.bool)
    fake[chosen, torch.arange(len(chosen)) % RUNS] = True
    return fake


@full_precision
def margins(logits_BK: Tensor, label_B: Tensor) -> Tensor:
    """(B,) the label's logit minus the largest other one."""
    own = F.one_hot(label_B, logits_BK.shape[1]).bool()
    return logits_BK.masked_fill(~own, -torch.inf).amax(1) - logits_BK.masked_fill(own, -torch.inf).amax(1)


def select_clean(margin_NR: Tensor, fake_NR: Tensor, given_N: Tensor, percentile: float) -> tuple[Tensor, Tensor]:
    """(N,) bool: samples to train on, and (R,) the thresholds.

    A sample is left out if its margin is below the threshold in every run in which it is no fake. A class that would lose
    all its samples keeps them.
    """
    fakes = [margin_NR[fake_NR[:, r], r].double() for r in range(margin_NR.shape[1])]
    threshold_R = torch.stack([run.quantile(percentile) if len(run) else run.new_tensor(-torch.inf) for run in fakes])
    low = (margin_NR < threshold_R) | fake_NR
    keep = ~low.all(1) | fake_NR.all(1)
    left = torch.zeros(int(given_N.max()) + 1, device=given_N.device).index_add_(0, given_N, keep.float())
    return keep | (left[given_N] == 0), threshold_R


class AUM(OneNetwork[AUMOptions]):
    sums: Tensor  # (N,R) margins summed over epochs
    seen: Tensor  # (N,R) in how many epochs
    fake: Tensor  # (N,R) bool
    clean: Tensor  # (N,) bool
    threshold: Tensor  # (R,)

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        self.runs = nn.ModuleList(Network(config.model, data.classes + 1, world) for _ in range(RUNS))
        self.register_buffer("sums", torch.zeros(len(data), RUNS))
        self.register_buffer("seen", torch.zeros(len(data), RUNS))
        self.register_buffer("fake", fake_sets(data))
        self.register_buffer("clean", torch.ones(len(data), dtype=torch.bool))
        self.register_buffer("threshold", torch.zeros(RUNS, dtype=torch.float64))
        self.is_decided = Flag(self, "decided")  # whether `clean` is final and the retrained network is evaluated

    # -- stages and passes ------------------------------------------------------------------------------

    def stages(self) -> list[Stage]:
        """The runs keep the initial learning rate: margins are measured before wrong labels are memorised."""
        epochs = self.config.train.epochs
        length = max(1, round(self.options.probe_part * epochs))
        runs = [
            Stage(f"run {r + 1}", epochs=length, constant_lr=True, trainable=(f"runs.{r}.",), evaluated=False)
            for r in range(RUNS)
        ]
        return [*runs, Stage("retraining", epochs=epochs, trainable=("network.",))]

    def begin_epoch(self, survey: Survey | None) -> None:
        if self.stage != RETRAINING or self.epoch:
            return
        given = self.data.given_on(self.sums.device)
        clean, threshold = select_clean(self.margin, self.fake, given, self.options.percentile)
        self.clean.copy_(clean)
        self.threshold.copy_(threshold)
        self.is_decided.set(True)

    @property
    def margin(self) -> Tensor:
        """(N,R) area under the margin."""
        return self.sums / self.seen.clamp_min(1)

    def passes(self) -> list[Pass]:
        if self.stage != RETRAINING:
            return super().passes()
        return [Pass(self.data.shuffled(self.order_key(), self.clean.nonzero()[:, 0].cpu().numpy()))]

    @property
    def eval_network(self) -> Network:
        return super().eval_network if self.is_decided else self.runs[min(self.stage, RUNS - 1)]  # type: ignore[return-value]

    def after_step(self) -> None:
        if self.stage == RETRAINING:
            super().after_step()

    # -- training ---------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        if self.stage == RETRAINING:
            _, logits = self.network(batch.views["weak"], batch.mask)
            return {"loss": cross_entropy(logits, batch.label, batch.valid, self.world)}
        _, logits = self.runs[self.stage](batch.views["weak"], batch.mask)
        label = torch.where(self.fake[batch.index, self.stage], self.data.classes, batch.label)
        margin = margins(logits.detach(), label)
        add_by_index(self.sums[:, self.stage], batch, margin, self.world)
        add_by_index(self.seen[:, self.stage], batch, torch.ones_like(margin), self.world)
        return {"loss": cross_entropy(logits, label, batch.valid, self.world)}

    def scores(self, images: Tensor) -> dict[str, Tensor]:
        return {"linear": self.eval_network(images)[1][:, : self.data.classes].float()}

    @property
    def beliefs(self) -> Beliefs | None:
        if not self.is_decided:
            return None
        score = torch.where(self.fake, 0, self.margin).sum(1) / (~self.fake).sum(1).clamp_min(1)
        extra = {f"aum_threshold_{r + 1}": float(value) for r, value in enumerate(self.threshold)}
        return Beliefs(weight=self.clean.float(), clean=self.clean, score=score, extra=extra)
