"""Accuracy by group of classes, and how well wrong labels were found."""

from __future__ import annotations

import numpy as np

from pipeline.methods.base import Beliefs


def accuracy(correct_K: np.ndarray, total_K: np.ndarray) -> float:
    return float(100 * correct_K.sum() / max(total_K.sum(), 1))


def group_accuracies(correct_K: np.ndarray, total_K: np.ndarray, groups: dict[str, np.ndarray]) -> dict[str, float]:
    """Mean per-class accuracy of each group that has classes with test pictures."""
    seen = total_K > 0
    rate = 100 * correct_K / np.maximum(total_K, 1)
    return {name: float(rate[member & seen].mean()) for name, member in groups.items() if (member & seen).any()}


def detection(truth: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Precision, recall and F1 of a binary prediction."""
    hit = int((truth & predicted).sum())
    precision = hit / max(int(predicted.sum()), 1)
    recall = hit / max(int(truth.sum()), 1)
    return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / max(precision + recall, 1e-12)}


def roc_auc(truth: np.ndarray, score: np.ndarray) -> float | None:
    """ROC AUC: chance that a positive scores higher than a negative; None when one of the two is missing."""
    from scipy.stats import rankdata

    yes, no = int(truth.sum()), int((~truth).sum())
    if not yes or not no:
        return None
    return float((rankdata(score)[truth].sum() - yes * (yes + 1) / 2) / (yes * no))


def cleaning_metrics(
    beliefs: Beliefs | None, given: np.ndarray, true: np.ndarray, groups: dict[str, np.ndarray]
) -> dict[str, float]:
    """How the beliefs compare with the true labels, where these are known; groups go by the given label."""
    if beliefs is None:
        return {}
    out = {f"clean/{name}": value for name, value in beliefs.extra.items()}
    if beliefs.weight is not None:
        out["clean/mean_weight"] = float(beliefs.weight.mean())
    if beliefs.clean is not None:
        clean = beliefs.clean.cpu().numpy()
        out["clean/share"] = float(clean.mean())
        if beliefs.label is not None:
            label = beliefs.label.cpu().numpy()
            out["clean/relabelled"] = float((label != given).mean())
            out["clean/doubtful"] = float((~clean & (label == given)).mean())
    for head, score in _scores(beliefs).items():
        for group, member in groups.items():
            if member[given].any():
                out[f"confidence/{head}/{group}"] = float(score[member[given]].mean())
    known = true >= 0
    if not known.any():
        return out
    right = given == true
    if beliefs.clean is not None:
        for name, value in detection(right[known], clean[known]).items():
            out[f"clean/{name}"] = value
        for name, value in detection(~right[known], ~clean[known]).items():
            out[f"noisy/{name}"] = value
        for group, member in groups.items():
            rows = known & member[given]
            if rows.any():
                out |= {f"clean/{name}_{group}": v for name, v in detection(right[rows], clean[rows]).items()}
                out |= {f"noisy/{name}_{group}": v for name, v in detection(~right[rows], ~clean[rows]).items()}
    for head, score in _scores(beliefs).items():
        area = roc_auc(right[known], score[known])
        if area is not None:
            out["clean/auc" if head == FIRST else f"clean/auc_{head}"] = area
        for group, member in groups.items() if head == FIRST else ():
            rows = known & member[given]
            if (area := roc_auc(right[rows], score[rows])) is not None:
                out[f"clean/auc_{group}"] = area
    if beliefs.basis is not None:
        label, weight = (part.cpu().numpy() for part in beliefs.basis)
        held = weight[known].sum()
        if held > 0:  # share of the prototypes' weight that comes from samples of the right class
            out["prototype/purity"] = float(weight[known & (label == true)].sum() / held)
    if beliefs.label is not None:
        label = beliefs.label.cpu().numpy()
        out["clean/noise_before"] = float((~right[known]).mean())
        out["clean/noise_after"] = float((label[known] != true[known]).mean())
        changed = known & (label != given)
        if changed.any():
            out["clean/relabel_accuracy"] = float((label[changed] == true[changed]).mean())
    return out


FIRST = "first"  # the main head, whatever a method calls it


def _scores(beliefs: Beliefs) -> dict[str, np.ndarray]:
    heads = {FIRST: beliefs.score, **beliefs.other_scores}
    return {head: score.cpu().numpy() for head, score in heads.items() if score is not None}
