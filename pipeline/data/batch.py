"""The data a method sees: the training set without pictures, a pass over it, and one batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pipeline.data import sampling
from pipeline.data.keyed_random import keyed_generator


@dataclass(frozen=True)
class TrainingSet:
    """The training set without pictures and without true labels."""

    given: np.ndarray  # (N,) int32 given labels
    classes: int
    seed: int
    batch: int
    shard_sizes: tuple[int, ...] = ()
    shuffle_window: int = 0
    _on_device: dict[torch.device, Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.given)

    @property
    def counts(self) -> np.ndarray:
        """(K,) samples per given label."""
        return np.bincount(self.given, minlength=self.classes)

    def given_on(self, device: torch.device) -> Tensor:
        """(N,) int64 given labels on a device. They are copied there once; do not change them."""
        if device not in self._on_device:
            self._on_device[device] = torch.from_numpy(self.given).to(device, torch.long, copy=True)
        return self._on_device[device]

    def labels(self, index: Tensor) -> Tensor:
        """Given labels of some samples, int64, on the device of `index`."""
        return self.given_on(index.device)[index]

    def shuffled(self, order_key: int, subset: np.ndarray | None = None, stream: int = 0) -> np.ndarray:
        """Every sample (of the subset) once, in the order of this key."""
        return sampling.shuffled(len(self), self.seed, order_key, stream, subset, self.shard_sizes, self.shuffle_window)

    def balanced(self, order_key: int, length: int, stream: int = 0) -> np.ndarray:
        """`length` samples, every class equally often, cycling inside a class."""
        return sampling.balanced(self.given, self.classes, self.seed, order_key, length, stream)


@dataclass(frozen=True)
class Pass:
    """One pass over an order of samples.

    With `second`, each step also has a batch of that second order, which repeats as often as needed.
    """

    order: np.ndarray  # (n,) sample indices, already shuffled
    views: tuple[str, ...] = ("weak",)
    batch: int = 0  # 0: the run's global batch
    second: np.ndarray | None = None
    second_batch: int = 0
    second_views: tuple[str, ...] = ()  # empty: those of the first stream
    trainable: tuple[str, ...] | None = None  # None: the stage's
    learner: int = 0  # which of the method's networks learns in this pass; its batches say so too

    @property
    def views_by_stream(self) -> tuple[tuple[str, ...], ...]:
        return self.views, self.second_views or self.views


@dataclass
class Batch:
    """This rank's rows of one global batch.

    A row with valid = 0 must not count. Either it is padding (then its group is its own), or its picture did not decode
    (then it is grey, in its usual group).
    """

    index: Tensor  # (B,) int64 permanent sample index
    label: Tensor  # (B,) int64 given label
    valid: Tensor  # (B,) float32, 1 or 0
    views: dict[str, Tensor]  # name -> (B,3,H,W) float32, normalised
    rows: tuple[int, ...]  # how many rows each rank holds in this step
    key: tuple[int, ...]  # (seed, order_key, step): the same on every rank
    groups: Tensor  # (B,) int64, mixing group of each row; groups never cross ranks
    share: float = 1.0  # this micro-batch's part of its global batch, by rows over all ranks
    last: bool = True  # whether the optimiser steps after this micro-batch
    second: Batch | None = field(default=None)  # a second stream, e.g. unlabelled beside labelled
    learner: int = 0  # which of the method's networks learns: that of the pass
    total: int = 0  # rows of all ranks, without padding
    all_valid: bool = False  # known without asking the device: every row of this rank has valid = 1

    @property
    def mask(self) -> Tensor | None:
        """For a network in training: rows that count in batch statistics. None: all."""
        return None if self.all_valid else self.valid

    @property
    def step(self) -> int:
        """Number of the global batch in its pass."""
        return self.key[-1]

    def generator(self, purpose: int) -> np.random.Generator:
        """Random numbers of this step, the same on every rank and after a restart."""
        return keyed_generator(*self.key, purpose)
