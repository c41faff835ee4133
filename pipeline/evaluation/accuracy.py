"""Exact evaluation over all ranks: every picture counts once, and ranks exchange only sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pipeline.distributed.step_sync import StepSync
from pipeline.distributed.world import World
from pipeline.evaluation.metrics import accuracy, group_accuracies
from pipeline.methods.base import Method
from shards.bias import class_groups


@dataclass
class Evaluation:
    """Counts of one pass over labelled pictures, summed over ranks."""

    metrics: dict[str, float]
    correct: np.ndarray  # (K,) of the main head
    total: np.ndarray  # (K,)
    confusion: np.ndarray  # (K,K) true by predicted
    marginal: dict[str, np.ndarray]  # head -> (K,) mean predicted probability (paper figure 2)
    confidence: dict[str, np.ndarray] = field(default_factory=dict)  # head -> (K,) mean confidence in the label


@torch.no_grad()
def evaluate(
    method: Method,
    split: str,
    batches: Iterable[tuple[Tensor, Tensor]],
    labels: np.ndarray,
    clean_counts: np.ndarray,
    world: World,
    step_sync: StepSync,
    autocast: torch.autocast,
    dummy_forward: Callable[[Callable[[Tensor], object]], None] = lambda forward: None,
) -> Evaluation:
    """Metrics are named by their split: `{split}/top1`.

    `batches` yields (index, images) of this rank's part; `labels` (n,) are the labels to compare with.
    `dummy_forward` is called while only other ranks have pictures left (Engine.dummy_forward).
    """
    classes = method.data.classes
    label_n = torch.from_numpy(labels.astype(np.int64)).to(world.device)
    counts: dict[str, Tensor] = {}  # head -> (K, K+3): confusion | top-5 hits | sums of probability and confidence
    method.eval()
    for item in step_sync.keep_pace(batches):
        if item is None:
            dummy_forward(method.scores)
            continue
        index, images = item
        with autocast:
            scores = method.scores(images)
        label = label_n[index]
        for head, score in scores.items():
            _count(counts.setdefault(head, _zeros(classes, world)), score, label)
    heads = next(filter(None, world.all_gather_object(list(counts))))  # a rank without pictures has none
    summed = {head: world.all_reduce_sum(counts.get(head, _zeros(classes, world))).cpu().numpy() for head in heads}
    return _summarise(split, summed, class_groups(clean_counts))


def _zeros(classes: int, world: World) -> Tensor:
    return torch.zeros(classes, classes + 3, dtype=torch.float64, device=world.device)


def _count(rows: Tensor, score_BK: Tensor, label_B: Tensor) -> None:
    """Add a batch: columns 0..K-1 confusion, then top-5 hits, sum of p(k), sum of the label's confidence.

    A picture whose label is not known (-1) adds zeros. To leave it out, the host would have to wait for the labels.
    """
    K = score_BK.shape[1]
    known, label_B = label_B >= 0, label_B.clamp_min(0)
    probability = torch.where(known[:, None], score_BK.double().softmax(1), 0.0)
    top = score_BK.topk(min(5, K), 1).indices
    rows.index_put_((label_B, score_BK.argmax(1)), known.double(), accumulate=True)
    rows[:, K].index_add_(0, label_B, (known & (top == label_B[:, None]).any(1)).double())
    rows[:, K + 1] += probability.sum(0)
    rows[:, K + 2].index_add_(0, label_B, probability.gather(1, label_B[:, None])[:, 0])


def _summarise(split: str, summed: dict[str, np.ndarray], groups: dict[str, np.ndarray]) -> Evaluation:
    metrics: dict[str, float] = {}
    out: Evaluation | None = None
    for head, rows in summed.items():
        K = len(rows)
        confusion = rows[:, :K].round().astype(np.int64)
        correct, total = np.diag(confusion), confusion.sum(1)
        if out is None:  # the first head is the main one
            metrics |= _top(split, rows, correct, total)
            metrics |= {f"{split}/{name}": value for name, value in group_accuracies(correct, total, groups).items()}
            out = Evaluation(metrics, correct, total, confusion, {})
        else:
            metrics |= _top(f"{split}/{head}", rows, correct, total)
        marginal = rows[:, K + 1] / max(total.sum(), 1)
        divergence = (marginal * np.log(np.maximum(marginal * K, 1e-300))).sum()  # KL from uniform
        metrics[f"{split}/{head}/marginal_kl"] = float(divergence)
        out.marginal[head] = marginal
        out.confidence[head] = rows[:, K + 2] / np.maximum(total, 1)
    assert out is not None
    return out


def _top(name: str, rows: np.ndarray, correct: np.ndarray, total: np.ndarray) -> dict[str, float]:
    return {f"{name}/top1": accuracy(correct, total), f"{name}/top5": accuracy(rows[:, len(rows)], total)}
