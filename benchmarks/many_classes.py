"""How far off is the estimated share of wrong labels with many classes and few samples of each?

`latent` on simulated features: classes are Gaussian clouds in 400 dimensions whose centres come in groups of five similar ones and
whose spreads differ; 24 samples a class. `apart` scales the centres, so it sets how hard the classes are. The
share of wrong labels is the mean of one minus the probability that a label is right, without the correction of the audit.

    python benchmarks/many_classes.py        # writes benchmarks/results/many_classes.json
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from record import write
from sklearn.metrics import f1_score, roc_auc_score

from pipeline.distributed.world import World
from pipeline.methods.latent import KEEP_ABOVE, fit_on_features
from pipeline.methods.options import LatentOptions
from pipeline.methods.parts.cross_fitting import stratified_folds

SAMPLES, DIMENSIONS, TESTS = 24, 400, 20  # a class
CELLS = [
    (classes, noise, apart)
    for classes in (14, 50, 100)
    for noise, apart in ((0.0, 0.6), (0.3, 0.6), (0.3, 0.8), (0.3, 1.0))
]


def clouds(classes: int, noise: float, apart: float, seed: int) -> tuple[np.ndarray, ...]:
    """Features, true and given labels; features and labels of a test set."""
    rng = np.random.default_rng([seed, classes, round(100 * noise), round(100 * apart)])
    between, within = (np.arange(1, DIMENSIONS + 1) ** -power for power in (0.5, 0.35))
    groups = rng.normal(size=(max(classes // 5, 1), DIMENSIONS))
    own = groups[rng.integers(0, len(groups), classes)] + rng.normal(size=(classes, DIMENSIONS))
    centre, spread = 0.7 * apart * own * between, rng.uniform(0.7, 1.3, (classes, 1))

    def draw(label: np.ndarray) -> np.ndarray:
        tails = rng.standard_t(6, size=(len(label), DIMENSIONS)) * (4 / 6) ** 0.5
        return (centre[label] + spread[label] * within * tails).astype(np.float32)

    true, test = np.repeat(np.arange(classes), SAMPLES), np.repeat(np.arange(classes), TESTS)
    wrong = rng.random(len(true)) < noise
    given = np.where(wrong, (true + rng.integers(1, classes, len(true))) % classes, true)
    return draw(true), true, given, draw(test), test


def measured(classes: int, noise: float, apart: float, seed: int = 0) -> dict[str, Any]:
    x, true, given, test_x, test = clouds(classes, noise, apart, seed)
    label, folds = torch.from_numpy(given), torch.from_numpy(stratified_folds(given, seed))
    classifier, found = fit_on_features(torch.from_numpy(x), label, folds, classes, LatentOptions().components, World())
    right, wrong = found.posterior.gather(1, label[:, None])[:, 0].numpy(), given != true
    row = {
        "classes": classes, "apart": apart, "wrong": wrong.mean(), "estimated": 1 - right.mean(),
        "accuracy": 100 * (classifier(torch.from_numpy(test_x)).argmax(1).numpy() == test).mean(),
        "auroc": 100 * roc_auc_score(wrong, -right) if wrong.any() else 0,
        "f1": 100 * f1_score(wrong, right < KEEP_ABOVE) if wrong.any() else 0,
    }  # fmt: skip
    return {name: round(float(value), 3 if name in ("wrong", "estimated") else 1) for name, value in row.items()}


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for cell in CELLS:
        rows.append(measured(*cell))
        print(rows[-1], flush=True)
    write({"what": "share of wrong labels, estimated and true, by number of classes", "rows": rows}, "torch")


if __name__ == "__main__":
    main()
