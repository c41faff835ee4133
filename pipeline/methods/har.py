"""Heteroskedastic adaptive regularisation (Cao et al., ICLR 2021).

A first network is trained on half of the samples. Classes in which it is often wrong on the other half, and rare classes,
get a stronger Lipschitz regulariser in the main training:
    L = L_ce + strength * mean_i r(label_i) * sum_l || dL_ce / dh_il ||,
where h_il is the output of normalisation layer l for sample i before scale and shift. This needs gradients of gradients.
B rows on this rank, K classes, N training samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.config import Config
from pipeline.data import sampling
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.data.keyed_random import keyed_generator
from pipeline.distributed.world import World
from pipeline.methods.base import OneNetwork, Stage
from pipeline.methods.ldam import class_weights
from pipeline.methods.options import HAROptions
from pipeline.methods.parts.flag import Flag
from pipeline.methods.parts.losses import cross_entropy, sample_losses
from pipeline.methods.parts.survey import Survey
from pipeline.models.backbones import FeatureInput
from pipeline.models.batchnorm import BatchNorm
from pipeline.models.network import Network
from shards.base.errors import UserError

PROBE, MAIN = 0, 1
_SPLIT = 0x4A1F  # purpose of random numbers


def held_out_half(data: TrainingSet) -> np.ndarray:
    """(N,) bool: the held-out half, drawn class by class; of an odd number the larger part is trained on."""
    shuffled = keyed_generator(data.seed, _SPLIT).permutation(len(data))
    held = np.zeros(len(data), bool)
    held[shuffled] = sampling.occurrence(data.given[shuffled]) % 2 == 1
    return held


def class_strengths(
    wrong_K: Tensor, held_K: Tensor, counts_K: Tensor, error_power: float, count_power: float
) -> Tensor:
    """(K,) in 0..1. A class without held-out samples counts as always wrong; one without samples gets 0."""
    error = torch.where(held_K > 0, wrong_K / held_K.clamp_min(1), 1.0)
    raw = error**error_power / counts_K.clamp_min(1) ** count_power * (counts_K > 0)
    return (raw / raw.max().clamp_min(1e-12)).float()


class HAR(OneNetwork[HAROptions]):
    strengths: Tensor  # (K,)

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        _check_double_backward(config)
        self.probe = Network(config.model, data.classes, world)
        self.held_out = held_out_half(data)
        self.register_buffer("strengths", torch.zeros(data.classes))
        self.register_buffer("weights", class_weights(data.counts, self.options.beta))
        self.is_probed = Flag(self, "probed")  # whether the main network is evaluated
        if not self._norms():
            raise UserError(
                "model.backbone: har regularises batch or group normalisations and finds none in "
                f"{config.model.backbone}. Choose another backbone or method."
            )

    # -- stages and passes ------------------------------------------------------------------------------

    def stages(self) -> list[Stage]:
        epochs = self.config.train.epochs
        length = max(1, round(self.options.probe_part * epochs))
        probe = Stage("probe", epochs=length, trainable=("probe.",), evaluated=False)
        return [probe, Stage("train", epochs=epochs, trainable=("network.",))]

    def set_epoch(self, stage: int, epoch: int) -> None:
        super().set_epoch(stage, epoch)
        self.is_probed.set(stage == MAIN)

    def passes(self) -> list[Pass]:
        if self.stage == PROBE:
            return [Pass(self.data.shuffled(self.order_key(), np.flatnonzero(~self.held_out)))]
        return super().passes()

    @property
    def eval_network(self) -> Network:
        return super().eval_network if self.is_probed else self.probe

    def after_step(self) -> None:
        if self.stage == MAIN:
            super().after_step()

    # -- strength by class ------------------------------------------------------------------------------

    def surveys_before_epoch(self) -> bool:
        return self.stage == MAIN and self.epoch == 0

    def survey_outputs(self, images: Tensor, given: Tensor) -> dict[str, Tensor]:
        return {"wrong": self.probe(images)[1].argmax(1) != given}

    def begin_epoch(self, survey: Survey | None) -> None:
        if survey is None:
            return
        label = self.data.labels(survey.index)
        held = torch.from_numpy(self.held_out).to(label.device)[survey.index].double()
        wrong = survey["wrong"].double() * held
        sums = torch.zeros(2, self.data.classes, dtype=torch.float64, device=label.device)
        wrong_K, held_K = self.world.all_reduce_sum(sums.index_add_(1, label, torch.stack([wrong, held])))
        counts = torch.from_numpy(self.data.counts).to(label.device)
        self.strengths.copy_(
            class_strengths(wrong_K, held_K, counts, self.options.error_power, self.options.count_power)
        )

    # -- training ---------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        if self.stage == PROBE:
            loss = cross_entropy(self.probe(batch.views["weak"], batch.mask)[1], batch.label, batch.valid, self.world)
            return {"loss": loss, "ce": loss}
        late = self.epoch >= round(self.options.reweight_start * self.config.train.epochs)
        weight = batch.valid * self.weights[batch.label] if late else batch.valid  # type: ignore[index]
        with self._record_outputs() as outputs:
            _, logits = self.network(batch.views["weak"], batch.mask)
        loss_B = sample_losses(logits, batch.label)
        ce = self.world.global_mean(loss_B, weight)
        har = self._regulariser(loss_B, weight, outputs, batch)
        return {"loss": ce + self.options.strength * har, "ce": ce, "har": har}

    def _regulariser(self, loss_B: Tensor, weight_B: Tensor, outputs: list[Tensor], batch: Batch) -> Tensor:
        """The gradients are those of the MEAN loss of the global batch. They are taken of the sum and divided afterwards:
        this loses less in half precision and does not depend on ranks and micro-batches.
        """
        with torch.autocast(loss_B.device.type, enabled=False):
            gradients = torch.autograd.grad((loss_B * weight_B).sum(), outputs, create_graph=True)
            norms_B = torch.zeros_like(loss_B)
            for layer, gradient in zip(self._norms(), gradients):
                gradient = gradient.to(loss_B.dtype)
                if (scale := getattr(layer, "weight", None)) is not None:  # the gradient before the layer's scale
                    gradient = gradient * scale[:, None, None]
                # The square root has no derivative at zero.
                norms_B = norms_B + (gradient.flatten(1).square().sum(1) + 1e-12).sqrt()
            total = self.world.all_reduce_sum(weight_B.sum()).clamp_min(1e-8)
            return self.world.global_mean(self.strengths[batch.label] * norms_B, batch.valid) / total * batch.share

    def _norms(self) -> Sequence[nn.Module]:
        """The normalisations of the residual blocks: all but the stem's. Of stored features: the features themselves."""
        if isinstance(self.network.backbone, FeatureInput):
            return [self.network.backbone]
        return [m for m in self.network.backbone.modules() if isinstance(m, BatchNorm | nn.GroupNorm)][1:]

    @contextmanager
    def _record_outputs(self) -> Iterator[list[Tensor]]:
        """Collects the outputs of the normalisation layers, in the order of `_norms`."""
        outputs: dict[int, Tensor] = {}

        def record(number: int, output: Tensor) -> Tensor:
            if not output.requires_grad:  # a frozen backbone or stored features; the gradient still depends on the head
                output = output.detach().requires_grad_()
            outputs[number] = output
            return output.clone()  # the next layer may work in place

        # timm has normalisation and activation in one module; its `drop` is between them.
        points = [getattr(layer, "drop", layer) for layer in self._norms()]
        handles = [p.register_forward_hook(lambda _m, _i, out, n=n: record(n, out)) for n, p in enumerate(points)]
        try:
            ordered: list[Tensor] = []
            yield ordered
            ordered.extend(outputs[n] for n in range(len(points)))
        finally:
            for handle in handles:
                handle.remove()


def _check_double_backward(config: Config) -> None:
    model = config.model
    problems = {
        "model.compile=false": model.compile,
        "model.checkpoint_activations=false": model.checkpoint_activations,
    }
    fixes = [fix for fix, wrong in problems.items() if wrong]
    if fixes:
        raise UserError(
            f"har takes gradients of gradients, which these settings do not allow. Set {' and '.join(fixes)}."
        )
