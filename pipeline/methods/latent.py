"""A linear classifier and posteriors of the true labels from frozen features, without a gradient step.

One survey stores the features. Two linear classifiers (shrunken discriminant, logistic regression) are cross-fitted; EM
finds the transition matrix from true to given labels; what is believed of a sample never comes from its own label alone.
The calibrated mean of both, refitted with soft labels, becomes the weights of `network.head`.

N samples over R ranks, K classes, D features, d principal components. Each rank holds N/R x D features, up to 1.8
times N/R x d of them reduced, and three arrays of N/R x K, float32 (`working_memory`); every rank holds D x D and K x K
numbers in float64. Time: 16 logistic regressions of at least 40 passes with 4 N K d / R operations, N d (d + K) / R for
each discriminant, and about 3000 passes over N K / R scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.base import Beliefs, OneNetwork, Stage
from pipeline.methods.options import LatentOptions
from pipeline.methods.parts.cross_fitting import BLOCK, FOLDS, CrossFit, cross_fit, stratified_folds
from pipeline.methods.parts.linear import Linear
from pipeline.methods.parts.principal_components import principal_components
from pipeline.methods.parts.survey import Survey
from shards.base.errors import UserError

MANY_SCORES = 1_000_000  # samples x classes
KEEP_ABOVE = 0.5  # a label is believed when it is likelier right than wrong


class Latent(OneNetwork[LatentOptions]):
    weight: Tensor  # (N,) float32, probability of the refined label
    refined: Tensor  # (N,) int16 or int32
    score: Tensor  # (N,) float32, probability that the given label is right
    predictive: Tensor  # (N,) float32, probability of the given label from the features alone

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        if config.engine == "deepspeed":
            raise UserError(
                "method.name=latent takes no optimiser step, so DeepSpeed has nothing to do. Set engine=ddp."
            )
        super().__init__(config, data, world)
        K, N = data.classes, len(data)
        self.register_buffer("weight", torch.ones(N))
        self.register_buffer("refined", torch.tensor(data.given, dtype=torch.int16 if K < 2**15 else torch.int32))
        self.register_buffer("score", torch.ones(N))
        self.register_buffer("predictive", torch.ones(N))

    def stages(self) -> list[Stage]:
        return [Stage("fit", epochs=1, trainable=("network.head",))]

    def surveys_before_epoch(self) -> bool:
        return True

    def passes(self) -> list[Pass]:
        return []

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        raise TypeError("latent has no loss: its classifier is fitted when the epoch begins")

    def survey_outputs(self, images: Tensor, given: Tensor) -> dict[str, Tensor]:
        return {"features": self.eval_network(images)[0]}

    def working_memory(self) -> dict[str, int]:
        """At its peak: the scores of both classifiers and their mean, of all samples or of all folds but one with a copy
        of their features."""
        N, K, D = len(self.data), self.data.classes, self.network.features
        n, d = self.world.rank_slice_sizes(N)[self.world.rank], min(self.options.components, D)
        rows = min(n, BLOCK)
        return {
            "fit: reduced features": 4 * n * d,
            "fit: scores and their mean": 4 * max(n * K * 3, n * (K * 3 + d) * (FOLDS - 1) // FOLDS),
            "fit: a block of scores": 4 * rows * K * 4,
            "fit: classifiers of the folds": 8 * K * (d + 1) * FOLDS * (FOLDS + 1),
            "fit: transition matrices": 8 * K * K * 6,
            "fit: covariances": 8 * D * D * 3,
        }

    def begin_epoch(self, survey: Survey | None) -> None:
        assert survey is not None
        features_nD, given_n = survey["features"], self.data.labels(survey.index)
        refuse_nonfinite(features_nD, survey)
        folds = torch.from_numpy(stratified_folds(self.data.given, self.data.seed)).to(given_n.device)
        with threads_for(len(self.data) * self.data.classes):
            classifier, found = fit_on_features(
                features_nD,
                given_n,
                folds[survey.index],
                self.data.classes,
                self.options.components,
                self.stoppable_world,
            )
        self._write_head(classifier)
        self._believe(found.posterior, found.predictive, given_n, survey)

    @torch.no_grad()
    def _write_head(self, classifier: Linear) -> None:
        for head in (self.network.head, self.eval_network.head):  # the second is that of the average, if there is one
            head.get_parameter("weight").copy_(classifier.weight)
            head.get_parameter("bias").copy_(classifier.bias)

    def _believe(self, posterior_nK: Tensor, predictive_n: Tensor, given_n: Tensor, survey: Survey) -> None:
        """Gather into the buffers: a label is replaced only where another one is very likely."""
        score_n = posterior_nK.gather(1, given_n[:, None])[:, 0]
        best_n, likeliest_n = posterior_nK.max(1)
        change_n = (likeliest_n != given_n) & (best_n > self.options.relabel_above)
        self.score.copy_(survey.all_gather(score_n))
        self.weight.copy_(survey.all_gather(torch.where(change_n, best_n, score_n)))
        self.refined.copy_(survey.all_gather(torch.where(change_n, likeliest_n, given_n)))
        self.predictive.copy_(survey.all_gather(predictive_n))

    @property
    def beliefs(self) -> Beliefs:
        return Beliefs(
            weight=self.weight,
            label=self.refined.long(),
            clean=self.score >= KEEP_ABOVE,
            score=self.score,
            out_of_sample=True,
            other_scores={"predictive": self.predictive},
            extra={"estimated_noise": float(1 - self.score.mean())},
        )


def fit_on_features(
    features_nD: Tensor, given_n: Tensor, fold_n: Tensor, classes: int, components: int, world: World
) -> tuple[Linear, CrossFit]:
    """The classifier of features, and what is found out about the samples of this rank."""
    centre_D, basis_Dd = principal_components(features_nD, components, world)
    centre, basis = centre_D.to(features_nD.dtype), basis_Dd.to(features_nD.dtype)
    x_nd = features_nD.new_empty(len(features_nD), basis.shape[1])
    for x, features in zip(x_nd.split(BLOCK), features_nD.split(BLOCK)):
        torch.matmul(features - centre, basis, out=x)
    found = cross_fit(x_nd, given_n, fold_n, classes, world)
    weight_KD = found.classifier.weight @ basis_Dd.T
    return Linear(weight_KD, found.classifier.bias - weight_KD @ centre_D), found


@contextmanager
def threads_for(scores: int) -> Iterator[None]:
    """One thread for little work: thousands of short operations, where threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if scores < MANY_SCORES else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def refuse_nonfinite(features_nD: Tensor, survey: Survey) -> None:
    """Called by all ranks together: all raise, or none."""
    finite_n = torch.cat([features.isfinite().all(1) for features in features_nD.split(BLOCK)])
    bad_n = survey.index[~finite_n].tolist()
    bad = [index for part in survey.world.all_gather_object(bad_n) for index in part]
    if bad:
        raise UserError(
            f"The features of {len(bad)} samples are not finite, among them sample {bad[0]}. Check model.pretrained and the "
            "stored features, and use train.precision=fp32."
        )
