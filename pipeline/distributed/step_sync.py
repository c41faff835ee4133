"""One small all-reduce per step: stop requests, one vote (more batches, or time to save), seconds of work by rank.

It uses CPU tensors, so the accelerator never waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from pipeline.distributed.world import World

T = TypeVar("T")


class TrainingStopped(Exception):
    """All ranks agreed to stop; the state is consistent and can be saved."""


class StopSource(Protocol):
    """Something that may ask for a stop."""

    @property
    def reason(self) -> str | None: ...


@dataclass(frozen=True)
class StoppableWorld(World):
    """The same ranks, for long work that changes no state before its end: every sum over ranks asks first whether to stop."""

    check: Callable[[], object] = bool

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        self.check()
        return super().all_reduce_sum(value)


class StepSync:
    def __init__(self, world: World, stop_source: StopSource | None = None) -> None:
        self.world, self.stop_source = world, stop_source
        self.work_seconds = torch.zeros(world.size, dtype=torch.float64)  # by rank, since the last report

    def sync(self, work_seconds: float = 0.0, vote: bool = True) -> bool:
        """Called by all ranks together. Returns whether any rank voted yes; raises TrainingStopped on all ranks or on none."""
        reason = self.stop_source.reason if self.stop_source else None
        message = torch.zeros(2 + self.world.size, dtype=torch.float64)
        message[0], message[1] = float(reason is not None), float(vote)
        message[2 + self.world.rank] = work_seconds
        message = self.world.all_reduce_sum(message)
        self.work_seconds += message[2:]
        if message[0] > 0:
            raise TrainingStopped(reason or "another rank was asked to stop")
        return bool(message[1] > 0)

    def stoppable_world(self) -> StoppableWorld:
        """The world whose sums raise TrainingStopped, on all ranks or on none."""
        return StoppableWorld(**vars(self.world), check=self.sync)

    def keep_pace(self, own: Iterable[T]) -> Iterator[T | None]:
        """Own batches, then None while other ranks still have some. Every rank yields equally often."""
        batches = iter(own)
        while True:
            item = next(batches, None)
            if not self.sync(vote=item is not None):
                return
            yield item

    def slowest_rank(self) -> tuple[int, float] | None:
        """(rank, ratio to the median) of the slowest rank since the last call, if it stands out."""
        seconds, self.work_seconds = self.work_seconds, torch.zeros_like(self.work_seconds)
        slowest = int(seconds.argmax())
        others = torch.cat([seconds[:slowest], seconds[slowest + 1 :]])
        if not len(others) or seconds[slowest] < 1.0:  # less than a second of work shows nothing
            return None
        ratio = float(seconds[slowest] / others.median().clamp_min(1e-9))
        return (slowest, ratio) if ratio > 1.5 else None
