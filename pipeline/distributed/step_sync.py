"""One small agreement of all ranks per step: shall we stop, does anybody raise a hand (more to do, time to save), who is slow.

It goes over CPU tensors, so that an accelerator never waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

import torch

from pipeline.distributed.world import World

T = TypeVar("T")


class Stopped(Exception):
    """All ranks agreed to stop; the state is consistent and can be saved."""


class Wish(Protocol):
    """Something that may ask for a stop, with a reason."""

    @property
    def wanted(self) -> str | None: ...


class Pulse:
    def __init__(self, world: World, wish: Wish | None = None) -> None:
        self.world, self.wish = world, wish
        self.busy = torch.zeros(world.size, dtype=torch.float64)  # seconds of own work per rank since the last report

    def beat(self, busy_seconds: float = 0.0, raised: bool = True) -> bool:
        """Called by all ranks together. Raises Stopped on all of them or on none; says whether anybody raised a hand."""
        reason = self.wish.wanted if self.wish else None
        said = torch.zeros(2 + self.world.size, dtype=torch.float64)
        said[0], said[1], said[2 + self.world.rank] = float(reason is not None), float(raised), busy_seconds
        said = self.world.sum(said)
        self.busy += said[2:]
        if said[0] > 0:
            raise Stopped(reason or "another rank was asked to stop")
        return bool(said[1] > 0)

    def in_step(self, own: Iterable[T]) -> Iterator[T | None]:
        """Own batches, then None while other ranks still have some: every rank makes the same number of turns."""
        batches = iter(own)
        while True:
            item = next(batches, None)
            if not self.beat(raised=item is not None):
                return
            yield item

    def straggler(self) -> tuple[int, float] | None:
        """(rank, ratio to the median) of the slowest rank since the last call, if it stands out."""
        busy, self.busy = self.busy, torch.zeros_like(self.busy)
        slowest = int(busy.argmax())
        others = torch.cat([busy[:slowest], busy[slowest + 1 :]])
        if not len(others) or busy[slowest] < 1.0:  # less than a second of work says nothing
            return None
        ratio = float(busy[slowest] / others.median().clamp_min(1e-9))
        return (slowest, ratio) if ratio > 1.5 else None
