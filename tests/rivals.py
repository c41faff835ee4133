"""A small training for any method: pictures in memory, the real trainer, no files."""

from __future__ import annotations

import copy
import io
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from pipeline.checkpoints.checkpointer import Checkpointer
from pipeline.checkpoints.position import Position
from pipeline.config import Config
from pipeline.data.batch import Batch, TrainingSet
from pipeline.data.loader import Loader
from pipeline.distributed.world import World
from pipeline.engines import make_engine
from pipeline.methods.base import Method
from pipeline.methods.parts.survey import Survey
from pipeline.methods.simclr import method_class
from pipeline.tracking.tracker import NullTracker
from pipeline.training.trainer import Trainer, TrainingData

SIZE, CLASSES, SAMPLES = 8, 3, 45


class Pictures:
    """Noise, brighter in the channel of the true class; every fifth label is wrong, class 0 is largest."""

    def __init__(self, samples: int = SAMPLES, classes: int = CLASSES, even: bool = False) -> None:
        rng, index = np.random.default_rng(0), np.arange(samples)
        true = (rng.random(samples) ** 2 * classes).astype(np.int32)
        wrong = index % 5 == 0
        if even:  # as many of every class, the first of each with the label of the next class
            true, wrong = (index % classes).astype(np.int32), index < classes
        self.given = np.where(wrong, (true + 1) % classes, true).astype(np.int32)
        pixels = rng.integers(0, 128, (samples, SIZE, SIZE, 3), dtype=np.uint8)
        pixels[np.arange(samples), :, :, true % 3] += 100
        self.encoded = [self._png(p) for p in pixels]
        self.shard_sizes = (samples,)

    @staticmethod
    def _png(pixels: np.ndarray) -> bytes:
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "PNG")
        return out.getvalue()

    def __len__(self) -> int:
        return len(self.encoded)

    def read(self, index: int) -> bytes:
        return self.encoded[index]

    def prefetch(self, shards: Any) -> None: ...


def small_config(method: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """Group normalisation: what a row gives must not depend on which rows its rank holds."""
    return Config.model_validate(
        {
            "data": {"batch": 16, "size": SIZE, "padding": 1, "mix_group": 4, "threads": 1} | sections.get("data", {}),
            "model": {"width": 4, "norm": "group", "embedding": 6} | sections.get("model", {}),
            "optim": {"lr": 0.02, "schedule": "constant"} | sections.get("optim", {}),
            "train": {"epochs": 3} | sections.get("train", {}),
            "method": method,
        }
    )


def make_method(config: Config, given: np.ndarray, classes: int, world: World | None = None) -> Method:
    torch.manual_seed(config.seed)
    data = TrainingSet(given, classes, config.seed, config.data.batch)
    return method_class(config)(config, data, world or World())


class MemorySplit:
    """Pictures in memory as a split of shards; their true labels are not known."""

    def __init__(self, pictures: Pictures, classes: int) -> None:
        self.pictures, self.given, self.shard_sizes = pictures, pictures.given, pictures.shard_sizes
        self.true = np.full(len(pictures), -1, np.int32)
        self.classes = [f"class {k}" for k in range(classes)]
        self.clean_counts = np.bincount(pictures.given, minlength=classes)
        counts = self.clean_counts.tolist()
        self.info = SimpleNamespace(given_counts=counts, clean_counts=counts)
        self.manifest = SimpleNamespace(hash="in memory")
        self.read, self.prefetch = pictures.read, pictures.prefetch

    def __len__(self) -> int:
        return len(self.pictures)


class DoubleLoader(Loader):
    """Batches in float64."""

    def _to_input(self, *args: Any) -> torch.Tensor:
        return super()._to_input(*args).double()


@dataclass
class Course:
    """The real trainer on pictures in memory. It can be stopped after any step and resumed from a copy of its state."""

    config: Config
    pictures: Pictures = field(default_factory=Pictures)
    classes: int = CLASSES
    world: World = field(default_factory=World)
    double: bool = False  # train in float64, so that rounding errors stay small over many steps

    def __post_init__(self) -> None:
        self.method = make_method(self.config, self.pictures.given, self.classes, self.world)
        if self.double:
            self.method.double()
        split: Any = MemorySplit(self.pictures, self.classes)
        loader = (DoubleLoader if self.double else Loader)(split, self.config.data, self.config.seed, self.world)
        data = TrainingData(split, {"test": split}, loader, {"test": loader})
        checkpoints = Checkpointer(f"memory://{uuid.uuid4().hex}", 2, self.world, background=False)
        engine = make_engine(self.config, self.method, self.world)
        self.trainer = Trainer(self.config, self.world, self.method, engine, data, checkpoints, NullTracker())

    @property
    def position(self) -> Position:
        return self.trainer.position

    def steps(self) -> Iterator[dict[str, float]]:
        """Named losses of every step, until the training ends."""
        for losses in self.trainer.steps():
            yield {name: float(value) for name, value in losses.items()}

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(self.trainer.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        self.trainer.load_state_dict(copy.deepcopy(state))


def batch_of(method: Method, rows: int, seed: int = 0, learner: int = 0, views: tuple[str, ...] = ("weak",)) -> Batch:
    """A batch by hand, in float64, of random samples and pictures; the last row stands for nothing."""
    rng = np.random.default_rng(seed)
    index = torch.from_numpy(rng.permutation(len(method.data))[:rows])
    images = {v: torch.from_numpy(rng.normal(size=(rows, 3, SIZE, SIZE))) for v in views}
    valid = torch.ones(rows)
    valid[-1] = 0
    label = torch.from_numpy(method.data.given)[index].long()
    key = (method.data.seed, method.order_key(), 0)
    return Batch(index, label, valid, images, (rows,), key, torch.arange(rows) // 4, learner=learner)


def survey_of(outputs: dict[str, torch.Tensor]) -> Survey:
    total = len(next(iter(outputs.values())))
    return Survey(torch.arange(total), outputs, total, World())
