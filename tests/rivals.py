"""A small training for any method: pictures in memory, the real loader, survey and engine, no files."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from pipeline.config import Config
from pipeline.data.batch import Batch, TrainingSet
from pipeline.data.loader import Loader
from pipeline.distributed.world import World
from pipeline.engines.ddp import TorchEngine
from pipeline.methods.base import Method
from pipeline.methods.options import load_method
from pipeline.methods.parts.survey import Survey, take_survey

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
    return load_method(config.method.name)(config, data, world or World())


@dataclass
class Place:
    """Where a training stands, as the trainer keeps it."""

    stage: int = 0
    epoch: int = 0
    epoch_started: bool = False
    pass_index: int = 0
    step: int = 0


@dataclass
class Course:
    """A training that can be stopped after any step and gone on with from a copy of its state."""

    config: Config
    pictures: Pictures = field(default_factory=Pictures)
    classes: int = CLASSES
    world: World = field(default_factory=World)
    double: bool = False  # train in float64, so that rounding does not grow to something from step to step

    def __post_init__(self) -> None:
        self.method = make_method(self.config, self.pictures.given, self.classes, self.world)
        if self.double:
            self.method.double()
        self.loader = Loader(self.pictures, self.config.data, self.config.seed, self.world)
        self.engine = TorchEngine(self.config, self.method, self.world)
        self.at = Place()

    def steps(self) -> Iterator[dict[str, float]]:
        """Named losses of every step, until the training ends."""
        for number, stage in enumerate(self.method.stages()[self.at.stage :], self.at.stage):
            self.engine.begin_stage(stage, resuming=self.at.epoch > 0 or self.at.epoch_started)
            for epoch in range(self.at.epoch, stage.epochs or 1):
                self.method.set_epoch(number, epoch)
                if not self.at.epoch_started:
                    self.method.begin_epoch(self.survey() if self.method.surveys_before_epoch() else None)
                    self.at.epoch_started = True
                yield from self._epoch(stage.trainable)
                self.method.end_epoch(self.survey() if self.method.surveys_after_epoch() else None)
                self.at = Place(number, epoch + 1)
            self.at = Place(number + 1)

    def _epoch(self, trainable: tuple[str, ...]) -> Iterator[dict[str, float]]:
        for number, pass_ in enumerate(self.method.passes()[self.at.pass_index :], self.at.pass_index):
            self.engine.set_trainable(pass_.trainable or trainable)
            self.method.train()
            for batch in self.loader.batches(pass_, self.method.order_key(number), self.at.step):
                losses = self.engine.step(self._cast(batch), self.config.optim.lr)
                self.at.step += 1
                yield {name: float(value) for name, value in losses.items()}
            self.at.pass_index, self.at.step = number + 1, 0

    @torch.no_grad()
    def survey(self) -> Survey:
        self.method.eval()
        batches = ((index, images.double() if self.double else images) for index, images in self.loader.survey())
        survey = take_survey(
            lambda index, images: self.method.survey_outputs(images, self.method.data.labels(index)),
            batches, len(self.pictures), self.world,
        )  # fmt: skip
        if self.double:
            survey.outputs = {name: value.double() for name, value in survey.outputs.items()}
        return survey

    def _cast(self, batch: Batch) -> Batch:
        if self.double:
            batch.views = {name: view.double() for name, view in batch.views.items()}
            batch.beside = batch.beside and self._cast(batch.beside)
        return batch

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(
            {"method": self.method.state_dict(), "engine": self.engine.optimizer_state_dict(), "at": self.at.__dict__}
        )

    def load(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        self.method.load_state_dict(state["method"])
        self.engine.load_optimizer_state_dict(state["engine"])
        self.at = Place(**state["at"])


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
