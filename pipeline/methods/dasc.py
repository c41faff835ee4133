"""DaSC (Baik, Yoon, Kim and Choi, ECCV 2024): class centres weighted by predictions, and contrast by confidence.

DivideMix with two classifiers on each network. Every sample of sufficient confidence counts for the centre of every class
by its prediction, whatever its label. Sure samples learn a balanced supervised contrast, the others to know themselves again.
n rows of the survey on this rank, N in all, B rows of a batch, G over all ranks, K classes, P width of the projection.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.config import Config
from pipeline.data.batch import Batch, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.dividemix import LABELLED, counted_rows
from pipeline.methods.options import DaSCOptions
from pipeline.methods.parts.gaussian_mixture import Fit, posterior_by_class, sharpen
from pipeline.methods.parts.key_queue import enqueue, queue_contrastive
from pipeline.methods.parts.losses import given_confidence
from pipeline.methods.parts.projection import Projection
from pipeline.methods.parts.prototypes import BLOCK
from pipeline.methods.parts.survey import Survey
from pipeline.methods.two_heads import TwoHeads
from pipeline.models.batchnorm import CountedRows
from pipeline.models.network import Average, unit
from pipeline.models.precision import full_precision
from shards.base.errors import UserError

FIT = Fit()


class DaSC(TwoHeads):
    options: DaSCOptions
    warmup_views = ("weak", "weak2")
    divided_views = ("strong", "strong2", "weak")
    mixed_views = ("strong", "strong2")
    queue: Tensor  # (2,Q+1,P) keys; the last row takes keys of rows that do not count
    written: Tensor  # (2,) how many keys were ever written

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__(config, data, world)
        D, P = self.network(0).features, self.options.projection
        needed = max(self.options.warmup_batch, 1) * config.data.batch
        if self.options.queue < needed:
            raise UserError(
                f"method.queue={self.options.queue} cannot hold the keys of one step; set it to method.warmup_batch x "
                f"data.batch = {needed} or more."
            )
        self.projectors = nn.ModuleList(Projection(D, 4 * P, P, self.network(n).rows) for n in range(2))
        self.projectors_average = Average(self.projectors, config.model.ema) if config.model.ema else None
        # Its rows are classes, the same on every rank.
        self.centres = nn.ModuleList(Projection(D, 4 * P, P, CountedRows()) for _ in range(2))
        self.register_buffer("queue", torch.zeros(2, self.options.queue + 1, P))
        self.register_buffer("written", torch.zeros(2, dtype=torch.long))
        self.pending: list[
            tuple[int, Tensor, Tensor]
        ] = []  # queue, keys and validity of the current step, of all ranks

    # -- beliefs ---------------------------------------------------------------------------------------------

    def survey_outputs(self, images: Tensor, given: Tensor) -> dict[str, Tensor]:
        outputs = [self.eval_network(n)(images) for n in range(2)]
        out = self.votes_and_losses([logits for _, logits in outputs], given)
        for n, (features, logits) in enumerate(outputs):
            sureness = [scores.float().softmax(1).amax(1) for scores in (logits, self.balanced_eval_head(n)(features))]
            out |= {
                f"sureness{n}": torch.minimum(*sureness),
                f"logits{n}": logits,
                f"z{n}": self.eval_project(n, features),
            }
        return out

    @property
    def candidate_threshold(self) -> float:
        """Largest probability, by both classifiers, from which a sample counts for the centres; it grows."""
        done = self.epoch / self.config.train.epochs
        return float(self.options.candidate_growth**done / self.data.classes)

    def divide(self, survey: Survey) -> list[np.ndarray]:
        return [self.divide_by_network(n, survey) for n in range(2)]

    def divide_by_network(self, n: int, survey: Survey) -> np.ndarray:
        """(N,) chance of each label to belong to the component of its class that is nearer to the class centre."""
        z, given, K = survey[f"z{n}"], self.data.labels(survey.index), self.data.classes
        candidates = survey[f"sureness{n}"] > self.candidate_threshold
        centres = weighted_centres(z, survey[f"logits{n}"], candidates, self.options.temperature, self.world)
        own = [given_confidence(rows @ centres.T, label) for rows, label in zip(z.split(BLOCK), given.split(BLOCK))]
        score = survey.all_gather(torch.cat([*own, z.new_zeros(0)])).cpu().numpy()
        return self.on_main_rank(lambda: posterior_by_class(score, self.data.given, K, "large", FIT))

    # -- training --------------------------------------------------------------------------------------------

    @property
    def contrasting(self) -> bool:
        return self.dividing or self.epoch >= round(self.options.contrast_start * self.config.train.epochs)

    def trained_parameters(self, n: int) -> tuple[str, ...]:
        contrast = (f"projectors.{n}.", f"centres.{n}.") if self.contrasting else ()
        return (*super().trained_parameters(n), *contrast)

    def warmup_losses(self, n: int, batch: Batch) -> dict[str, Tensor]:
        images = torch.cat([batch.views[view] for view in self.warmup_views])
        label, valid = batch.label.repeat(2), batch.valid.repeat(2)
        features, logits = self.network(n)(images, batch.mask)
        losses = self.given_losses(n, features, logits, label, valid)
        if not self.contrasting:
            return losses
        z = self.project(n, features, batch.mask)
        target = F.one_hot(label, self.data.classes).to(z.dtype)
        balanced = self.balanced_contrast(n, z, target, valid, torch.ones_like(valid), [batch])
        self._keep_keys(n, z[: len(batch.index)], batch.valid, [batch.rows])
        return {**losses, "contrast": balanced, "loss": losses["loss"] + self.options.balanced_contrast * balanced}

    def divided_losses(
        self, n: int, batch: Batch, streams: Sequence[Batch], images: Tensor, target: Tensor, valid: Tensor
    ) -> dict[str, Tensor]:
        """Those of the mixed pictures, and the contrasts of the same pictures as they are."""
        losses = super().divided_losses(n, batch, streams, images, target, valid)
        mask = counted_rows(streams, valid)
        z = self.project(n, self.network(n)(images, mask)[0], mask)
        sure = target.amax(1) > self.options.confident_above
        balanced = self.balanced_contrast(n, z, target, valid, sure.to(valid), streams)
        first, second = views_apart(streams)
        unsure = valid[first] * (target[first].amax(1) < self.options.confident_above)
        slot = self._slot(n)
        itself = queue_contrastive(
            z[first], z[second].detach(), self.queue[slot, :-1], self.written[slot], unsure,
            self.options.discrimination_temperature, self.world,
        )  # fmt: skip
        loss = losses["loss"] + self.options.balanced_contrast * balanced + self.options.discrimination * itself
        return {**losses, "contrast": balanced, "discrimination": itself, "loss": loss}

    def mixed_losses(
        self, n: int, batch: Batch, features: Tensor, logits: Tensor, target: Tensor, valid: Tensor
    ) -> dict[str, Tensor]:
        streams = [batch] if batch.second is None or not self.options.unlabelled else [batch, batch.second]
        with torch.no_grad():
            z = self.project(n, features, counted_rows(streams, valid))
        _, second = views_apart(streams)
        self._keep_keys(n, z[second], valid[second], [stream.rows for stream in streams])
        return super().mixed_losses(n, batch, features, logits, target, valid)

    def project(self, n: int, features: Tensor, mask: Tensor | None) -> Tensor:
        """(B,P) unit vectors; `features` may be those of several views."""
        if mask is not None:
            mask = mask.repeat(len(features) // len(mask))
        return unit(self.projectors[n](features, mask))

    def balanced_contrast(
        self, n: int, z: Tensor, target: Tensor, valid: Tensor, confident: Tensor, streams: Sequence[Batch]
    ) -> Tensor:
        centres = unit(self.centres[n](self.network(n).head.weight, None))
        rows = [2 * sum(held) for held in zip(*(stream.rows for stream in streams))]
        temperature = self.options.temperature
        return balanced_contrastive(z, target, valid, confident, centres, temperature, self.world, rows)

    @torch.no_grad()
    def _guess(self, n: int, streams: Sequence[Batch]) -> list[Tensor]:
        """(B,K) targets of each stream, from its weak view: all four classifiers refine labels, the plain ones guess them."""
        own, peer = self.network(n), self.eval_network(1 - n).eval()
        heads = {own: self.balanced[n], peer: self.balanced_eval_head(1 - n)}
        targets = []
        for number, stream in enumerate(streams):
            said = []
            for network, balanced in heads.items():
                features, logits = network(stream.views["weak"], stream.mask)
                said += [logits.float().softmax(1)]
                said += [balanced(features).float().softmax(1)] if number == LABELLED else []
            targets.append(torch.stack(said).mean(0))
        labelled = streams[LABELLED]
        trust = self.belief[1 - n, labelled.index][:, None]
        onehot = F.one_hot(labelled.label, self.data.classes).float()
        targets[LABELLED] = trust * onehot + (1 - trust) * targets[LABELLED]
        return [sharpen(target, self.options.sharpening) for target in targets]

    # -- the queue of keys -----------------------------------------------------------------------------------

    def _slot(self, n: int) -> int:
        """The networks change queues after every divided epoch, so that a network meets keys of its peer."""
        return (n + max(self.epoch - self.warmup_epochs, 0)) % 2

    @torch.no_grad()
    def _keep_keys(self, n: int, z: Tensor, valid: Tensor, rows: Sequence[Sequence[int]]) -> None:
        """Keep the keys for after_step: the loss still needs the queue as it is. Stream by stream, so that their order does
        not depend on ranks."""
        start = 0
        for held in rows:
            mine = slice(start, start := start + held[self.world.rank])
            keys, counted = (self.world.all_gather_rows(part[mine], held) for part in (z, valid))
            self.pending.append((self._slot(n), keys, counted))

    @torch.no_grad()
    def after_step(self) -> None:
        super().after_step()
        if self.projectors_average is not None:
            self.projectors_average.update(self.projectors)
        for slot, keys, valid in self.pending:
            finite = keys.isfinite().all(1)  # the optimiser skips a step that is not, so nothing is stored of it
            enqueue(self.queue[slot], self.written[slot], keys.nan_to_num(), valid * finite)
        self.pending = []

    # -- evaluation ------------------------------------------------------------------------------------------

    def eval_project(self, n: int, features: Tensor) -> Tensor:
        projectors = self.projectors if self.projectors_average is None else self.projectors_average.network
        return unit(projectors[n](features, None))

    def embeddings(self, images: Tensor) -> Tensor:
        """Cosines of these are the mean of the two networks' cosines."""
        return unit(torch.cat([self.eval_project(n, self.eval_network(n)(images)[0]) for n in range(2)], 1))


def views_apart(streams: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Row numbers of the first and of the second view of all streams, which are stacked stream by stream."""
    first: list[Tensor] = []
    second: list[Tensor] = []
    start = 0
    for stream in streams:
        rows = torch.arange(len(stream.index), device=stream.index.device) + start
        first.append(rows)
        second.append(rows + len(rows))
        start += 2 * len(rows)
    return torch.cat(first), torch.cat(second)


@full_precision
def weighted_centres(z_nP: Tensor, logits_nK: Tensor, candidate_n: Tensor, temperature: float, world: World) -> Tensor:
    """(K,P) unit sums of the candidates of all ranks, weighted by softmax(logits / temperature); of all samples if there is none."""
    chosen_n = candidate_n.double()
    chosen_n = torch.where(world.all_reduce_sum(chosen_n.sum()) > 0, chosen_n, 1.0)
    sums = torch.zeros(logits_nK.shape[1], z_nP.shape[1], dtype=torch.float64, device=z_nP.device)
    for z, logits, chosen in zip(*(part.split(BLOCK) for part in (z_nP, logits_nK, chosen_n))):
        weight = (logits.double() / temperature).softmax(1) * chosen[:, None]
        sums += weight.T @ z.double()
    return unit(world.all_reduce_sum(sums)).to(z_nP.dtype)


@full_precision
def balanced_contrastive(
    z_AP: Tensor,
    target_AK: Tensor,
    valid_A: Tensor,
    confident_A: Tensor,
    centres_KP: Tensor,
    temperature: float,
    world: World,
    rows: Sequence[int],
) -> Tensor:
    """Semi-supervised balanced contrast of confident anchors with all rows of all ranks and a centre of every class.

    How much a row is a positive of an anchor is the inner product of their targets. In the denominator a class counts once,
    however many rows it has: each is divided by the number of others of its likeliest class.
    """
    K, offset = target_AK.shape[1], sum(rows[: world.rank]) if world.size > 1 else 0
    keys = torch.cat([world.all_gather_rows(z_AP, rows, grad=True), centres_KP])  # (G+K,P)
    classes = torch.eye(K, dtype=target_AK.dtype, device=target_AK.device)
    target = torch.cat([world.all_gather_rows(target_AK, rows), classes])
    counted = torch.cat([world.all_gather_rows(valid_A, rows), valid_A.new_ones(K)])
    likeliest = target.argmax(1)
    size_K = counted.new_zeros(K).index_add_(0, likeliest, counted)
    itself = torch.arange(len(z_AP), device=z_AP.device)[:, None] + offset
    left_out = (counted <= 0).expand(len(z_AP), -1).scatter(1, itself, True)
    positive = (target_AK @ target.T).masked_fill(left_out, 0.0)
    others = (size_K[likeliest] - positive).clamp_min(0.5)  # only a row that does not count can have less
    logits = z_AP @ keys.T / temperature
    total = (logits - others.log()).masked_fill(left_out, -torch.inf).logsumexp(1, keepdim=True)
    loss_A = (positive * (total - logits)).sum(1) / positive.sum(1)
    return world.global_mean(loss_A, valid_A * confident_A)
