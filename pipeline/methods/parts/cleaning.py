"""Label cleaning: threshold, refined labels, sample weights (paper section 3.3, and the released code)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pipeline.methods.options import PrototypicalOptions
from pipeline.methods.parts.losses import prototype_logits
from pipeline.methods.parts.prototypes import BLOCK


def threshold_at(options: PrototypicalOptions, epoch: int, epochs: int, classes: int) -> float:
    """The confidence below which a label is doubted in an epoch, counted from epoch 0."""
    start, growth = options.threshold_start, options.threshold_growth
    if options.threshold == "fixed":
        return start
    if options.threshold == "linear":
        return start + (options.threshold_end - start) * epoch / epochs
    if options.threshold == "transfer":
        start, growth = transfer_schedule(classes, epochs, options.temperature, options.end_cosine)
    return start * growth**epoch


def transfer_schedule(classes: int, epochs: int, temperature: float, end_cosine: float) -> tuple[float, float]:
    """(start, growth) for any K and E: from chance to the score of a sample at `end_cosine` with all others at 0.

    The paper's hand-set thresholds end at a cosine of 0.30 to 0.36 on all of its data sets.
    """
    lift = math.exp(end_cosine / temperature)
    start, end = 1 / classes, lift / (lift + classes - 1)
    return start, (end / start) ** (1 / epochs)


@dataclass
class Cleaned:
    label: Tensor  # (n,) refined label
    clean: Tensor  # (n,) bool: the given label is believed
    weight: Tensor  # (n,) float32
    score: Tensor  # (n,) float32: confidence in the given label


def refine(
    logits_NK: Tensor, given_N: Tensor, threshold: float, relabel_weight: str, min_score: float = 0.0
) -> Cleaned:
    """Keep a label whose confidence passes the threshold, else take the likeliest class (paper eq. 5 and 6).

    The likeliest class may still be the given one: such a sample is doubtful, not relabelled.
    """
    probability = logits_NK.float().softmax(1)
    score = probability.gather(1, given_N[:, None])[:, 0]
    top, likeliest = probability.max(1)
    clean = score > threshold
    label = torch.where(clean, given_N, likeliest)
    if relabel_weight == "margin":
        weight = torch.where(clean, score, (threshold - score) / 2)
    elif relabel_weight == "half":
        weight = torch.where(clean, score, score / 2)
    else:  # no re-weighting
        weight = torch.ones_like(score)
    weight = torch.where(clean | (top > min_score), weight, 0.0).clamp_min(0.0)
    return Cleaned(label, clean, weight, score)


def refine_all(
    z_ND: Tensor, given_N: Tensor, prototypes_KD: Tensor, threshold: float, options: PrototypicalOptions
) -> Cleaned:
    """`refine` by prototypes, a block of rows at a time: linear in N, and never N x K numbers at once."""
    blocks = [
        refine(
            prototype_logits(z, prototypes_KD, options.temperature),
            given,
            threshold,
            options.relabel_weight,
            options.min_score,
        )
        for z, given in zip(torch.split(z_ND, BLOCK), torch.split(given_N, BLOCK))
    ]
    return Cleaned(*(torch.cat([getattr(b, f.name) for b in blocks]) for f in fields(Cleaned)))
