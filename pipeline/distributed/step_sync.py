"""One small agreement of all ranks per step: shall we stop, does anybody raise a hand (more to do, time to save), who is slow.

It goes over CPU tensors, so that an accelerator never waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

import torch

from pipeline.distributed.world import World

T = TypeVar("T")


class TrainingStopped(Exception):
    """All ranks agreed to stop; the state is consistent and can be saved."""


class StopSource(Protocol):
    """Something that may ask for a stop, with a reason."""

    @property
    def wanted(self) -> str | None: ...


class StepSync:
    def __init__(self, world: World, stop_source: StopSource | None = None) -> None:
        self.world, self.stop_source = world, stop_source
        self.busy = torch.zeros(world.size, dtype=torch.float64)  # seconds of own work per rank since the last report

    def sync(self, busy_seconds: float = 0.0, raised: bool = True) -> bool:
        """Called by all ranks together. Raises TrainingStopped on all of them or on none; says whether anybody raised a hand."""
        reason = self.stop_source.wanted if self.stop_source else None
        said = torch.zeros(2 + self.world.size, dtype=torch.float64)
        said[0], said[1], said[2 + self.world.rank] = float(reason is not None), float(raised), busy_seconds
        said = self.world.all_reduce_sum(said)
        self.busy += said[2:]
        if said[0] > 0:
            raise TrainingStopped(reason or "another rank was asked to stop")
        return bool(said[1] > 0)

    def keep_pace(self, own: Iterable[T]) -> Iterator[T | None]:
        """Own batches, then None while other ranks still have some: every rank makes the same number of turns."""
        batches = iter(own)
        while True:
            item = next(batches, None)
            if not self.sync(raised=item is not None):
                return
            yield item

    def slowest_rank(self) -> tuple[int, float] | None:
        """(rank, ratio to the median) of the slowest rank since the last call, if it stands out."""
        busy, self.busy = self.busy, torch.zeros_like(self.busy)
        slowest = int(busy.argmax())
        others = torch.cat([busy[:slowest], busy[slowest + 1 :]])
        if not len(others) or busy[slowest] < 1.0:  # less than a second of work says nothing
            return None
        ratio = float(busy[slowest] / others.median().clamp_min(1e-9))
        return (slowest, ratio) if ratio > 1.5 else None
