"""Small trainings for engines to do: digits, a narrow network, real batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoints.checkpointer import Checkpointer
from pipeline.config import Config
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.data.loader import Loader
from pipeline.distributed.step_sync import StopSource
from pipeline.distributed.world import World
from pipeline.engines import make_engine
from pipeline.engines.engine import Engine
from pipeline.methods.base import Method, Stage
from pipeline.methods.simclr import method_class
from pipeline.tracking.tracker import NullTracker
from pipeline.training.trainer import Trainer, TrainingData
from shards.base.settings import merge
from shards.config import CacheConfig
from shards.reader import Split, open_split

SMALL: dict[str, Any] = {
    "data": {"batch": 64, "size": 8, "padding": 1, "threads": 1},
    "model": {"width": 8, "norm": "group"},
    "train": {"epochs": 1},
    "checkpoint": {"background": False},
}
METHODS: dict[str, dict[str, Any]] = {
    "cross_entropy": {"name": "cross_entropy"},
    "prototypical": {"name": "prototypical", "warmup_steps": 2, "cleaning_start": 0},
}


def small(method: str = "cross_entropy", **settings: Any) -> Config:
    return Config.model_validate(merge(merge(SMALL, {"method": METHODS[method]}), settings))


def splits(url: str) -> dict[str, Split]:
    return {name: open_split(url, name, CacheConfig()) for name in ("train", "test")}


def make_method(config: Config, train: Split, world: World) -> Method:
    data = TrainingSet(train.given, len(train.classes), config.seed, config.data.batch, tuple(train.shard_sizes))
    torch.manual_seed(config.seed)
    return method_class(config)(config, data, world)


def make_trainer(world: World, url: str, folder: str, config: Config, stop_source: StopSource | None = None) -> Trainer:
    """A trainer that stands where its newest checkpoint in `folder` left it."""
    train, test = (open_split(url, name, CacheConfig()) for name in ("train", "test"))
    loaders = [Loader(split, config.data, config.seed, world, config.optim.accumulate) for split in (train, test)]
    data = TrainingData(train, {"test": test}, loaders[0], {"test": loaders[1]})
    checkpoints = Checkpointer(folder, 3, world, background=False)
    method = make_method(config, train, world)
    engine = make_engine(config, method, world)
    resume = checkpoints.load()
    return Trainer(config, world, method, engine, data, checkpoints, NullTracker(), stop_source, resume=resume)


class Bench:
    """An engine with a method under it, in its main stage, and batches to feed it by hand."""

    def __init__(self, world: World, url: str, config: Config) -> None:
        self.world, self.config = world, config
        self.train = splits(url)["train"]
        self.method = make_method(config, self.train, world)
        self.stage = next(number for number, stage in enumerate(self.method.stages()) if stage.epochs)
        self.method.set_epoch(self.stage, 0)
        self.engine: Engine = make_engine(config, self.method, world)
        self.engine.begin_stage(self.method.stages()[self.stage], resuming=False)
        self.method.train()

    def batches(self, count: int, order_key: int = 0) -> Iterator[Batch]:
        """`count` pictures as the loader cuts them."""
        order = np.random.default_rng(order_key).permutation(len(self.train))[:count]
        loader = Loader(self.train, self.config.data, self.config.seed, self.world, self.config.optim.accumulate)
        yield from loader.batches(Pass(order, ("weak", "strong")), order_key)

    def steps(self, count: int, order_key: int = 0, lr: float = 0.05) -> list[float]:
        return [float(self.engine.step(batch, lr)["loss"]) for batch in self.batches(count, order_key)]

    def stage_of(self, **settings: Any) -> Stage:
        return Stage("another", epochs=1, **settings)

    def weights(self) -> dict[str, Tensor]:
        return copied(self.engine.model_state_dict())


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of any two numbers, by the largest number of its tensor."""
    assert one.keys() == other.keys()
    gaps = [
        (one[n].double() - other[n].double()).abs().max() / other[n].double().abs().max().clamp_min(1e-3) for n in one
    ]
    return float(torch.stack(gaps).max())


def poisoned(batch: Batch) -> Batch:
    """The same batch with a picture that makes the loss of the rank that holds it NaN."""
    batch.views["weak"][0] = torch.nan
    return batch
