"""Every method with every config file of the paper's tables: the real sources, backbones and recipes, a few pictures.

Only sizes are cut down: pictures, their edge, the batch, the width of PreAct ResNet-18 and the number of epochs.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from PIL import Image

from pipeline import config as configuration
from pipeline.distributed.world import World
from pipeline.methods.options import MethodOptions
from pipeline.training.build import build
from shards.sources import fashion_mnist

METHODS = [options.model_fields["name"].default for options in get_args(get_args(MethodOptions)[0])]
SMALL = {
    "cifar10_lt": ["shards.largest=16", "shards.rho=8", "model.width=8"],
    "cifar10_lt_small": ["shards.largest=16", "shards.rho=8", "model.width=8"],
    "fashion_lt": ["shards.largest=16", "shards.rho=8"],
    "cifar100_lt": ["shards.largest=4", "shards.rho=4", "model.width=8"],
    "webvision_mini": ["data.size=75", "data.resize=80", "shards.resize=80", "train.precision=fp32"],
}
# What is counted in epochs, steps or samples and would not happen, or not fit, in so short a training.
SOONER = {
    "prototypical": ["method.warmup_steps=2", "method.cleaning_start=0.3"],
    "rrl": ["method.warmup_steps=2", "method.cleaning_start=0.3", "method.neighbours=5"],
    "mopro": ["method.queue=32", "method.cleaning_start=0.3"],
    "har": [
        "method.strength=0.2"
    ],  # it smooths by gradients of the mean over the batch, which is a quarter of the real
}


def cifar(root: Path, classes: int, each: int) -> None:
    """CIFAR's published layout: the brightness of a picture tells its class."""
    rng = np.random.default_rng(0)
    names = [f"class {k}".encode() for k in range(classes)]

    def batch(count: int) -> tuple[np.ndarray, list[int]]:
        labels = np.arange(count * classes) % classes
        data = rng.integers(0, 56, (len(labels), 3072)) + (labels * 200 // classes)[:, None]
        return data.astype(np.uint8), labels.tolist()

    def write(file: Path, content: dict[bytes, object]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(content, 2))

    if classes == 100:
        for split, count in (("train", each), ("test", 1)):
            data, labels = batch(count)
            write(root / "cifar-100-python" / split, {b"data": data, b"fine_labels": labels})
        write(root / "cifar-100-python/meta", {b"fine_label_names": names})
    else:
        folder = root / "cifar-10-batches-py"
        for part in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
            data, labels = batch(4)
            write(folder / part, {b"data": data, b"labels": labels})
        write(folder / "batches.meta", {b"label_names": names})


def fashion(root: Path) -> dict[str, str]:
    """Fashion-MNIST's published layout; returns the digests of its splits."""
    digests = {}
    for split, begin, count in (("train", "train", 200), ("test", "t10k", 20)):
        labels = np.arange(count) % 10
        pictures = np.random.default_rng(0).integers(0, 56, (count, 28, 28)) + 20 * labels[:, None, None]
        digests[split] = hashlib.sha256(
            b"".join(part.astype(np.uint8).tobytes() for part in (pictures, labels))
        ).hexdigest()
        for kind, array in (("images", pictures), ("labels", labels)):
            sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
            header = bytes([0, 0, 8, array.ndim]) + sizes
            (root / f"{begin}-{kind}-idx{array.ndim}-ubyte").write_bytes(header + array.astype(np.uint8).tobytes())
    return digests


def webvision(root: Path) -> None:
    """mini-WebVision's published layout with few pictures, and ILSVRC's validation folders."""
    ids = ["n01440764", *(f"n{1440765 + n:08d}" for n in range(49))]
    lines: dict[str, list[str]] = {"train_filelist_google": [], "val_filelist": []}
    rng = np.random.default_rng(0)

    def draw(name: Path, k: int) -> None:
        name.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((rng.integers(0, 56, (90, 100, 3)) + 4 * k).astype(np.uint8)).save(name)

    for k, wnid in enumerate(ids):
        for n in range(5 if k < 10 else 2):
            draw(root / f"google/q{k:04d}/{n}.jpg", k)
            lines["train_filelist_google"].append(f"google/q{k:04d}/{n}.jpg {k}\n")
        draw(root / f"val_images_256/val{k:06d}.jpg", k)
        lines["val_filelist"].append(f"val{k:06d}.jpg {k}\n")
        draw(root / f"ilsvrc/{wnid}/0.jpeg", k)
    (root / "info").mkdir()
    (root / "info/synsets.txt").write_text("".join(f"{wnid} name\n" for wnid in ids))
    for name, content in lines.items():
        (root / f"info/{name}.txt").write_text("".join(content))


SLOW = ("webvision_mini", "cifar10_lt_small", "fashion_lt")  # a minute a method
CONFIGS = ["cifar10_lt", "cifar100_lt", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.fixture(scope="module", params=CONFIGS)
def collection(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, list[str]]]:
    root = tmp_path_factory.mktemp(request.param)
    patch = pytest.MonkeyPatch()
    words = [f"--config=configs/{request.param}.yaml", f"shards.path={root}", f"shards.output={root}/shards"]
    if request.param == "webvision_mini":
        webvision(root)
        words.append(f"shards.imagenet={root}/ilsvrc")
    elif request.param == "fashion_lt":
        for split, digest in fashion(root).items():
            patch.setitem(fashion_mnist.SHA256, split, digest)
    else:
        cifar(root, 100 if request.param == "cifar100_lt" else 10, 4)
    yield request.param, words + SMALL[request.param]
    patch.undo()


@pytest.mark.parametrize("method", METHODS)
def test_trains(collection: tuple[str, list[str]], method: str, tmp_path: Path) -> None:
    name, words = collection
    short = ["train.epochs=3", "data.batch=16", "data.threads=1", "tracking.uri=", f"output={tmp_path}"]
    config = configuration.load([*words, f"method.name={method}", *short, *SOONER.get(method, [])])
    trainer = build(config, World())
    trainer.run()
    last = trainer.history[-1]
    assert all(math.isfinite(value) for past in trainer.history for value in past.values())
    assert 0 <= last["test/top1"] <= 100
    assert ("imagenet/top1" in last) == (name == "webvision_mini")
